"""Bytes and time of a step when factors are sent in the place of the gradients of large layers.

    python benchmarks/factors.py [--width 4096] [--batches 32] [--workers 1] [--rounds 3] [--mbps 1000] [--json]

Two layers of width x width under bsp over tcp. A server and the workers are processes of this machine; with `--mbps`
each is in a network namespace of its own whose line the kernel limits both ways, which needs root, `ip` and `tc`. The
kernel counts the bytes that worker 0 sends and receives. Runs with gradients and with factors alternate, and the
median of all steps counts. Values come back whole in both.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hosted_job import HostedJob, hosted_spec
from measuring import Sample, machine, print_json, progress
from shaped_network import Line, ShapedNetwork

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
    with tempfile.TemporaryDirectory(prefix="paceline-") as folder:
        found = Path(folder) / "found"
        script = [str(HERE / "factors_worker.py"), str(found), pushes, str(options.width), str(options.steps)]
        script += map(str, options.batches)
        if options.mbps:
            run_over_lines(options, script)
        else:
            run_over_loopback(options, script)
        return [json.loads(line) for line in found.read_text().splitlines()]


def run_over_loopback(options: argparse.Namespace, script: list[str]) -> None:
    """Run a job whose processes meet on this machine."""
    command = [sys.executable, "-m", "paceline", "run", "-n", str(options.workers), "-m", "1", "--quiet"]
    command += ["--no-progress", "--transport", "tcp", "--consistency", "bsp", *script]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode:
        raise SystemExit(f"the run failed:\n{done.stdout}")


def run_over_lines(options: argparse.Namespace, script: list[str]) -> None:
    """Run a job whose processes have a line each, the server as well, as other machines have."""
    line = Line(options.mbps, options.mbps)
    spec, workers = hosted_spec(options.workers, 1), range(options.workers)
    with (
        ShapedNetwork([line] * (options.workers + 1), queue_ms=200.0, mtu=9000, congestion="reno") as network,
        HostedJob(network, spec, [options.workers], workers, [sys.executable, *script]) as job,
    ):
        job.wait(TIMEOUT_S)


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
    parser.add_argument("--mbps", type=float, default=0.0, help="what each line carries; 0: loopback")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, list[list[dict[str, Any]]]] = {"gradients": [], "factors": []}
    for number in range(options.rounds):
        for pushes, runs in found.items():
            progress(f"{pushes}, round {number + 1} of {options.rounds}")
            runs.append(measure(options, pushes))
    rows = [row(options, pushes, list(runs)) for pushes, each in found.items() for runs in zip(*each, strict=True)]
    if options.json:
        print_json({"machine": machine(), "width": options.width, "mbps": options.mbps, "rows": rows})
        return
    print("| batch | pushes | sent a step | formula | received a step | step |\n|---|---|---|---|---|---|")
    for each in sorted(rows, key=lambda each: each["batch"]):
        low, high = each["from_to_ms"]
        sizes = f"{each['sent_mb']:.2f} MB | {each['formula_mb']:.2f} MB | {each['received_mb']:.2f} MB"
        print(f"| {each['batch']} | {each['pushes']} | {sizes} | {each['step_ms']:.0f} ms ({low:.0f} to {high:.0f}) |")


if __name__ == "__main__":
    main()
