"""Hosts joined by lines of limited rate: what a step takes, by how many servers have a host of their own.

    python benchmarks/hosts.py [--megabytes 25] [--mbps 100] [--json]

Four workers, each on a host in a network namespace of its own with a server beside it, and up to four hosts with a
server alone; the kernel limits what each line carries each way. Shares of the model are those of BytePS, after which
a step takes 2 n (n - 1) / (n^2 + k n - 2 k) times what the model takes over a line, and before that its workers
compute, on the cores of one machine (`computing_s`). The steps are plain ones with `paceline.distributed`, one after
the other, and at last some with overlap=True. Beside them tables made by hand, of
which several steps are under way, a ring all-reduce over the same lines, and how much of a line of 1 Gbit/s a worker
and a server use. Needs root, and `ip` and `tc` (iproute2).
"""

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

from hosted_job import HostedJob, JobFailedError, hosted_spec
from measuring import machine, print_json, progress
from shaped_network import CannotShapeError, Line, ShapedNetwork

from paceline.tools.plan.estimate import colocated_bytes, ring_bytes, server_shares

HERE = Path(__file__).resolve().parent
TIMEOUT_S = 300.0
FAST_MBPS = 1000.0
QUEUE_MS = 200.0
MTU = 9000


def measure(mode: str, num_workers: int, num_dedicated: int, mbps: float, options: argparse.Namespace) -> list[float]:
    """Run one job; return what its workers wrote down, of each number the largest."""
    num_hosts = num_workers + num_dedicated
    alone, beside = server_shares(num_workers, num_dedicated)
    dedicated = list(range(num_workers, num_hosts))
    colocated = list(range(num_workers)) if beside else []
    if mode == "ring":
        colocated = [0]  # one that only has the workers meet
    shares = (alone,) * len(dedicated) + (beside,) * len(colocated)
    spec = hosted_spec(num_workers, len(shares), shares)
    command = [sys.executable, str(HERE / "hosts_worker.py"), "--mode", mode, "--out", "{folder}"]
    for name in ("megabytes", "chunks", "steps"):
        command += [f"--{name}", str(getattr(options, name))]
    with (
        ShapedNetwork([Line(mbps, mbps)] * num_hosts, queue_ms=QUEUE_MS, mtu=MTU, congestion="reno") as network,
        HostedJob(network, spec, dedicated + colocated, list(range(num_workers)), command) as job,
    ):
        job.wait(TIMEOUT_S)
        written = [(job.folder / f"seconds-{rank}").read_text().split() for rank in range(num_workers)]
    return [max(map(float, each)) for each in zip(*written, strict=True)]


def run(options: argparse.Namespace) -> dict[str, object]:
    """Measure the steps by servers alone, and what stands beside them; return what is printed as JSON."""
    bytes_per_s, size_bytes, num_workers = options.mbps * 1e6 / 8, options.megabytes * 1e6, options.workers
    predicted = [colocated_bytes(num_workers, k, size_bytes) / bytes_per_s for k in options.dedicated]
    measured: list[float] = []
    computing: list[float] = []
    first: list[float] = []
    for k, expected_s in zip(options.dedicated, predicted, strict=True):
        step_s, computing_s, first_s = measure("step", num_workers, k, options.mbps, options)
        measured.append(step_s)
        computing.append(computing_s)
        first.append(first_s)
        progress(f"{k} servers alone: {step_s:.2f} s a step, predicted {expected_s:.2f} s and {computing_s:.2f} s")
    errors = [ours / (own + lines) - 1 for ours, own, lines in zip(measured, computing, predicted, strict=True)]
    steps: dict[str, object] = {
        "name": "hosts",
        "dedicated": list(options.dedicated),
        "seconds": measured,
        "predicted_s": predicted,
        "computing_s": computing,
        "first_step_s": first,
        "worst_error": max(map(abs, errors)),
    }
    return steps if options.steps_alone else steps | run_others(options)


def run_others(options: argparse.Namespace) -> dict[str, object]:
    """Measure what stands beside the plain steps: overlap, tables by hand, a ring, and how full a fast line is."""
    bytes_per_s, size_bytes, num_workers = options.mbps * 1e6 / 8, options.megabytes * 1e6, options.workers
    last = options.dedicated[-1]
    overlap_s, chunks_s = (measure(mode, num_workers, last, options.mbps, options)[0] for mode in ("overlap", "chunks"))
    progress(
        f"{last} servers alone: {overlap_s:.2f} s with overlap, {chunks_s:.2f} s where several steps are under way"
    )
    ring_s = measure("ring", num_workers, 0, options.mbps, options)[0]
    ring_predicted_s = ring_bytes(num_workers, size_bytes) / bytes_per_s
    progress(f"ring all-reduce: {ring_s:.2f} s a step, predicted {ring_predicted_s:.2f} s")
    push_s, pull_s = measure("line", 1, 1, FAST_MBPS, options)
    line_rates = [size_bytes * 8e-6 / each / FAST_MBPS for each in (push_s, pull_s)]
    progress(f"of {FAST_MBPS:g} Mbit/s: {line_rates[0]:.3f} by pushes, {line_rates[1]:.3f} by pulls")
    return {
        "overlap_s": overlap_s,
        "chunks_s": chunks_s,
        "ring_s": ring_s,
        "ring_predicted_s": ring_predicted_s,
        "push_of_line": line_rates[0],
        "pull_of_line": line_rates[1],
    }


def _end(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit("hosts.py: ended by a signal")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--dedicated", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="servers alone, one a run")
    parser.add_argument("--megabytes", type=float, default=25.0)
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--chunks", type=int, default=8, help="into how many tables one by hand is cut")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--steps-alone", action="store_true", help="measure the plain steps and nothing beside them")
    parser.add_argument("--json", action="store_true", help="print only the line of JSON")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    progress(f"{options.workers} workers, {options.megabytes:g} MB, {options.mbps:g} Mbit/s; {machine()}")
    try:
        print_json(run(options))
    except (CannotShapeError, JobFailedError) as problem:
        sys.exit(f"hosts.py: {problem}")


if __name__ == "__main__":
    main()
