"""How long it takes until something happens: `paceline --help`, and a job from its launch to its first step.

    python benchmarks/startup.py [--rounds 5] [--json]

Importing torch and building one of its optimizers, which imports as much again, is measured beside it: every process
of a job does that first.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

TIMEOUT_S = 120.0
JOB = [sys.executable, "-m", "paceline", "run", "-n", "4", "-m", "2", "--quiet", "--no-progress"]
IMPORTS = "import torch; torch.optim.SGD([torch.zeros(1)], lr=0.1)"
FIRST_STEP = """
import torch
import paceline
paceline.init()
model = torch.nn.Linear(4, 1)
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1))
model(torch.ones(4)).sum().backward()
optimizer.step()
print("stepped", flush=True)
"""


def seconds(command: list[str]) -> float:
    """Run a command and return its seconds."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, timeout=TIMEOUT_S, check=True)
    return time.perf_counter() - start


def seconds_to_first_step(script: Path) -> float:
    """Start a job of four workers and two servers; return the seconds until all workers have made a step."""
    start = time.perf_counter()
    with subprocess.Popen([*JOB, str(script)], stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        deadline = threading.Timer(TIMEOUT_S, job.kill)
        deadline.start()
        num_stepped = 0
        for line in job.stdout:
            num_stepped += "stepped" in line
            if num_stepped == 4:
                took_s = time.perf_counter() - start
        job.wait(TIMEOUT_S)
        deadline.cancel()
    if num_stepped != 4:
        raise SystemExit(f"{num_stepped} of 4 workers made a step")
    return took_s


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    check = "import sys, paceline.cli; sys.exit('torch' in sys.modules)"
    light = subprocess.run([sys.executable, "-c", check], timeout=TIMEOUT_S, check=False).returncode == 0
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first_step.py"
        script.write_text(FIRST_STEP)
        rounds = [
            (
                seconds([sys.executable, "-m", "paceline", "--help"]),
                seconds([sys.executable, "-c", IMPORTS]),
                seconds_to_first_step(script),
            )
            for _ in range(options.rounds)
        ]
    help_s, torch_s, first_step_s = (median(column) for column in zip(*rounds, strict=True))
    print(f"paceline --help           {help_s * 1000:7.0f} ms; it imports torch: {not light}")
    print(f"import torch and optimizer{torch_s * 1000:7.0f} ms in one process")
    print(f"launch to the first step  {first_step_s * 1000:7.0f} ms, four workers and two servers")
    if options.json:
        result = {"name": "startup", "help_s": round(help_s, 3), "help_imports_torch": not light}
        print(json.dumps(result | {"import_torch_s": round(torch_s, 3), "first_step_s": round(first_step_s, 3)}))


if __name__ == "__main__":
    main()
