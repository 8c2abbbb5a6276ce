"""Bytes and time of a step when factors are sent in the place of the gradients of large layers.

    python benchmarks/factors.py [--width 4096] [--batch 32] [--workers 1] [--rounds 3] [--json]

Two layers of width x width under bsp over tcp, with a server and a worker as processes of this machine, `--workers` of
them. The kernel counts the bytes that a worker sends and receives. Steps with factors and with gradients alternate in
pairs of runs, and the median of all steps counts. Values travel whole in both, so of the bytes of a step one half can
be saved.
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


def measure(options: argparse.Namespace, *, factors: bool) -> dict[str, Any]:
    """Run one job, and return what worker 0 has found."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(options.workers), "-m", "1", "--quiet"]
    command += ["--no-progress", "--transport", "tcp", "--consistency", "bsp", str(HERE / "factors_worker.py")]
    command += [str(options.width), str(options.batch), str(options.steps), str(int(factors))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line.partition("found ")[2] for line in done.stdout.splitlines() if "found " in line]
    if done.returncode or not lines:
        raise SystemExit(f"the run failed:\n{done.stdout}")
    return json.loads(lines[0])


def combined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median step of all runs, and the bytes of a step, which are alike in all."""
    steps = Sample.of([each for run in runs for each in run["step_s"]])
    return {
        "sent_mb": runs[-1]["sent_bytes"] / 1e6,
        "received_mb": runs[-1]["received_bytes"] / 1e6,
        "step_ms": 1e3 * steps.median,
        "from_to_ms": [1e3 * steps.low, 1e3 * steps.high],
        "factored": runs[-1]["num_factored"],
        "loss": runs[-1]["loss"],
    }


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {"gradients": [], "factors": []}
    for number in range(options.rounds):
        for name, runs in found.items():
            progress(f"{name}, round {number + 1} of {options.rounds}")
            runs.append(measure(options, factors=name == "factors"))
    rows = {name: combined(runs) for name, runs in found.items()}
    if options.json:
        print_json({"machine": machine(), "width": options.width, "batch": options.batch, **rows})
        return
    print("| pushes | sent a step | received a step | step | loss |\n|---|---|---|---|---|")
    for name, row in rows.items():
        low, high = row["from_to_ms"]
        times = f"{row['step_ms']:.0f} ms ({low:.0f} to {high:.0f})"
        print(f"| {name} | {row['sent_mb']:.2f} MB | {row['received_mb']:.2f} MB | {times} | {row['loss']:.6f} |")


if __name__ == "__main__":
    main()
