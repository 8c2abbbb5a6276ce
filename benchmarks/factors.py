"""Bytes and time of a step when factors are sent in the place of the gradients of large layers.

    python benchmarks/factors.py [--width 4096] [--batches 32] [--workers 1] [--rounds 3] [--json]

Two layers of width x width under bsp over tcp; a server and the workers are processes of this machine. The kernel
counts the bytes that worker 0 sends and receives. Runs with gradients and with factors alternate, and the median of
all steps counts. Values come back whole in both.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from measuring import Sample, machine, print_json, progress

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 600.0
ITEM_BYTES = 4
NUM_LAYERS = 2


def formula_bytes(pushes: str, width: int, batch: int) -> int:
    """Return what a worker sends in a step: two weights, or the fewer numbers of their factors, and two biases."""
    numbers = width * width if pushes == "gradients" else min(width * width, batch * 2 * width)
    return ITEM_BYTES * NUM_LAYERS * (numbers + width)


def measure(options: argparse.Namespace, pushes: str) -> list[dict[str, Any]]:
    """Run one job, and return what worker 0 has found, by batch."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(options.workers), "-m", "1", "--quiet"]
    command += ["--no-progress", "--transport", "tcp", "--consistency", "bsp", str(HERE / "factors_worker.py")]
    command += [pushes, str(options.width), str(options.steps), *map(str, options.batches)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line.partition("found ")[2] for line in done.stdout.splitlines() if "found " in line]
    if done.returncode or len(lines) != len(options.batches):
        raise SystemExit(f"the run failed:\n{done.stdout}")
    return [json.loads(line) for line in lines]


def row(options: argparse.Namespace, pushes: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median step of all runs of a batch, and the bytes of a step, which are alike in all."""
    step = Sample.of([1e3 * each for run in runs for each in run["step_s"]])
    last = runs[-1]
    return {
        "name": f"{pushes}, batch {last['batch']}",
        "pushes": pushes,
        "batch": last["batch"],
        "sent_mb": last["sent_bytes"] / 1e6,
        "formula_mb": formula_bytes(pushes, options.width, last["batch"]) / 1e6,
        "received_mb": last["received_bytes"] / 1e6,
        "step_ms": step.median,
        "from_to_ms": [step.low, step.high],
        "num_factored": last["num_factored"],
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batches", type=int, nargs="+", default=[32])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, list[list[dict[str, Any]]]] = {"gradients": [], "factors": []}
    for number in range(options.rounds):
        for pushes, runs in found.items():
            progress(f"{pushes}, round {number + 1} of {options.rounds}")
            runs.append(measure(options, pushes))
    rows = [row(options, pushes, list(runs)) for pushes, each in found.items() for runs in zip(*each, strict=True)]
    if options.json:
        print_json({"machine": machine(), "width": options.width, "workers": options.workers, "rows": rows})
        return
    print("| batch | pushes | sent a step | formula | received a step | step |\n|---|---|---|---|---|---|")
    for each in sorted(rows, key=lambda each: each["batch"]):
        low, high = each["from_to_ms"]
        sizes = f"{each['sent_mb']:.2f} MB | {each['formula_mb']:.2f} MB | {each['received_mb']:.2f} MB"
        print(f"| {each['batch']} | {each['pushes']} | {sizes} | {each['step_ms']:.0f} ms ({low:.0f} to {high:.0f}) |")


if __name__ == "__main__":
    main()
