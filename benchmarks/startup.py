"""How long a job takes to its first step, beside plain torch: a script that imports torch and makes the same step.

    python benchmarks/startup.py [--rounds 5] [--many] [--json]

The first step of two workers counts until both have made it, in rounds that alternate with the plain script. `init` is
what importing paceline and `paceline.init()` add to a script that runs alone, and `help` what `paceline --help` takes.
`--many` starts 64 workers and 4 servers, too. Both sides have their bytecode, as installed packages have: a round of
warming up writes it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

TIMEOUT_S = 300.0
PLAIN_STEP = """
import torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4)).sum().backward()
optimizer.step()
print("stepped", flush=True)
"""
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
INIT = """
import time
import torch
start = time.perf_counter()
import paceline
paceline.init()
print(time.perf_counter() - start)
"""
# Without it a source tree is compiled anew in each process; installed packages are compiled already.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def seconds_to_steps(command: list[str], num_workers: int = 1) -> float:
    """Run a command; return the seconds until so many workers have said that they made a step."""
    start, num_stepped, took_s = time.perf_counter(), 0, 0.0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as job:
        assert job.stdout is not None
        deadline = threading.Timer(TIMEOUT_S, job.kill)
        deadline.start()
        for line in job.stdout:
            num_stepped += "stepped" in line
            if num_stepped == num_workers and not took_s:
                took_s = time.perf_counter() - start
        job.wait(TIMEOUT_S)
        deadline.cancel()
    if num_stepped != num_workers:
        raise SystemExit(f"{num_stepped} of {num_workers} workers made a step: {' '.join(command)}")
    return took_s


def said(*words: str) -> tuple[str, float]:
    """Run Python with these arguments; return what it printed, and the seconds that it took."""
    start = time.perf_counter()
    command = [sys.executable, *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True, env=ENVIRONMENT)
    return done.stdout, time.perf_counter() - start


def job(script: Path, num_workers: int, num_servers: int) -> list[str]:
    """Return the command of a job."""
    counts = ["-n", str(num_workers), "-m", str(num_servers)]
    return [sys.executable, "-m", "paceline", "run", *counts, "--quiet", "--no-progress", str(script)]


def measure(folder: Path, num_rounds: int, *, many: bool) -> list[dict[str, object]]:
    """Return what was measured, the two sides in alternating rounds; the first round only warms up."""
    ours, plain = folder / "first_step.py", folder / "plain_step.py"
    ours.write_text(FIRST_STEP)
    plain.write_text(PLAIN_STEP)
    rounds = [
        (
            seconds_to_steps([sys.executable, str(plain)]),
            seconds_to_steps(job(ours, 2, 1), 2),
            seconds_to_steps([sys.executable, str(ours)]),
            float(said("-c", INIT)[0]),
            said("-c", "import torch")[1],
            said("-m", "paceline", "--help")[1],
        )
        for _ in range(num_rounds + 1)
    ][1:]
    plain_s, two_s, alone_s, init_s, torch_s, help_s = (median(column) for column in zip(*rounds, strict=True))
    results = [
        row("first step of 2 workers", two_s, plain_s),
        row("first step alone", alone_s, plain_s),
        row("import paceline and init", init_s, torch_s),
        row("paceline --help", help_s, torch_s),
    ]
    if many:
        results.append(row("first step of 64 workers, 4 servers", seconds_to_steps(job(ours, 64, 4), 64), plain_s))
    return results


def row(name: str, ours_s: float, torch_s: float) -> dict[str, object]:
    """Return one measurement."""
    return {"name": name, "ours_s": round(ours_s, 3), "torch_s": round(torch_s, 3), "ratio": round(ours_s / torch_s, 3)}


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--many", action="store_true", help="start 64 workers and 4 servers, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options.rounds, many=options.many)
    light = said("-c", "import sys, paceline.cli; print('torch' not in sys.modules)")[0].strip() == "True"
    print(f"{'':36}{'paceline':>10}{'torch':>10}{'ratio':>8}")
    for each in results:
        print(f"{each['name']:36}{each['ours_s']:>8} s{each['torch_s']:>8} s{each['ratio']:>8}")
    print(f"paceline --help imports torch: {not light}")
    if options.json:
        print(json.dumps({"name": "startup", "help_imports_torch": not light, "results": results}))


if __name__ == "__main__":
    main()
