"""How long a job on Ray takes to its first step, against what Ray needs alone for as many processes.

    python benchmarks/ray_startup.py [--workers 2] [--servers 1] [--rounds 5] [--json]

Ours: from the start of `paceline run --engine ray`, which starts a cluster, until every worker has made a step. Ray's
own: from the start of a Python that calls `ray.init` with the same settings, until one actor for each of these
processes has answered once that it has imported what any worker or server needs before it can do anything: torch, and
for workers an optimizer, which imports as much again. Both are measured in turn; the ratio is that of the medians.
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

from startup import FIRST_STEP

TIMEOUT_S = 180.0
READY = "ready"
STEPPED = "stepped"

RAY_ALONE = """
import os, sys
from paceline.ray.engine import OBJECT_STORE_BYTES, OWN_CLUSTER
os.environ.update(OWN_CLUSTER, RAY_AUTH_TOKEN="0" * 64)
import ray
workers, servers = map(int, sys.argv[1:])
ray.init(address="local", num_cpus=max(os.cpu_count(), workers + servers), object_store_memory=OBJECT_STORE_BYTES,
         include_dashboard=False, log_to_driver=False, logging_level="ERROR")

@ray.remote(num_cpus=1)
class Worker:
    def answer(self):
        import torch
        torch.optim.SGD([torch.zeros(1)], lr=0.1)

@ray.remote(num_cpus=1)
class Server:
    def answer(self):
        import torch

actors = [Worker.remote() for _ in range(workers)] + [Server.remote() for _ in range(servers)]
ray.get([actor.answer.remote() for actor in actors])
print("ready\\n" * workers, flush=True)
"""


def seconds_until(command: list[str], word: str, times: int) -> float:
    """Run a command; return the seconds until a word has come up in so many lines of its output."""
    start, took_s, found = time.perf_counter(), 0.0, 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        overdue = threading.Timer(TIMEOUT_S, process.kill)
        overdue.start()
        try:
            for line in process.stdout:
                found += word in line
                took_s = took_s or (time.perf_counter() - start if found == times else 0.0)
            process.wait()
        finally:
            overdue.cancel()
    if found < times:
        raise SystemExit(f"{word!r} came up {found} times instead of {times}: {command}")
    return took_s


def main() -> None:
    """Measure and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "first_step.py"
        script.write_text(FIRST_STEP)
        size = [str(options.workers), str(options.servers)]
        alone = [sys.executable, "-c", RAY_ALONE, *size]
        job = [sys.executable, "-m", "paceline", "run", "--engine", "ray", "-n", size[0], "-m", size[1], "--quiet"]
        rounds = [
            (
                seconds_until(alone, READY, options.workers),
                seconds_until([*job, str(script)], STEPPED, options.workers),
            )
            for _ in range(options.rounds)
        ]
    ray_s, job_s = (median(column) for column in zip(*rounds, strict=True))
    print(f"Ray alone, and torch in {options.workers} + {options.servers} actors {ray_s:6.2f} s")
    print(f"a job on Ray, to the first step of all workers   {job_s:6.2f} s, {job_s / ray_s:.2f} times that")
    if options.json:
        result = {"name": "ray_startup", "workers": options.workers, "servers": options.servers}
        result |= {"rounds": options.rounds, "ray_s": round(ray_s, 3), "first_step_s": round(job_s, 3)}
        print(json.dumps(result | {"ratio": round(job_s / ray_s, 3)}))


if __name__ == "__main__":
    main()
