"""What `paceline advise` says of other numbers of servers over thin lines, beside runs with these.

    python benchmarks/advise_hosts.py [--mbps 100] [--size 500000] [--json]

Four workers, each on a host in a network namespace of its own, and one, two or four servers, alone on hosts or beside
the workers; the kernel limits what each line carries each way. Every worker sleeps for 50 ms a clock, and reads and
pushes `size` numbers under bsp. Each run is recorded, and says what the others take. Needs root, and `ip` and `tc`
(iproute2).
"""

import argparse
import sys
from pathlib import Path
from typing import Final

from hosted_job import HostedJob, JobFailedError, hosted_spec
from measuring import machine, print_json
from shaped_network import CannotShapeError, Line, ShapedNetwork

from paceline.tools.advise.command import advise_on
from paceline.tools.advise.recorded import RecordedRun, read_recorded

WORKER: Final = Path(__file__).resolve().with_name("simulate_worker.py")
TIMEOUT_S: Final = 300.0
START_S: Final = 200.0  # on a busy machine processes take long to start
NUM_WORKERS: Final = 4
TRUSTED: Final = 0.15
CASES: Final = ((1, False), (2, False), (4, False), (2, True), (4, True))


def run_job(num_servers: int, options: argparse.Namespace, *, is_beside: bool) -> RecordedRun:
    """Run one job over shaped lines, and read its trace."""
    workers = list(range(NUM_WORKERS))
    servers = list(range(num_servers)) if is_beside else list(range(NUM_WORKERS, NUM_WORKERS + num_servers))
    lines = [Line(options.mbps, options.mbps)] * (NUM_WORKERS + (0 if is_beside else num_servers))
    command = [sys.executable, str(WORKER), "--clocks", str(options.clocks), "--size", str(options.size)]
    command += ["--stragglers", "none"]
    with (
        ShapedNetwork(lines, queue_ms=200.0, mtu=9000, congestion="reno") as network,
        HostedJob(network, hosted_spec(NUM_WORKERS, num_servers), servers, workers, command, START_S) as job,
    ):
        job.wait(TIMEOUT_S)
        job.stop_servers()
        return read_recorded(job.folder, is_beside=is_beside)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbps", type=float, default=100.0)
    parser.add_argument("--size", type=int, default=500_000, help="numbers of the model")
    parser.add_argument("--clocks", type=int, default=25)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2, 4], help="two cases or more")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    try:
        recorded = {case: run_job(case[0], options, is_beside=case[1]) for case in CASES if case[0] in options.servers}
    except (CannotShapeError, JobFailedError) as error:
        raise SystemExit(f"cannot measure: {error}") from error
    print(f"{machine()}; {options.size} numbers, {options.mbps:g} Mbit/s")
    for case, run in recorded.items():
        found = run.scenario.lines.bytes_per_s * 8e-6
        print(f"{named(case):24} {run.clock_s * 1e3:6.1f} ms a clock, its line is found to have {found:.0f} Mbit/s")
    errors: list[float] = []
    print(f"{'what each run says of:':24} " + "  ".join(f"{named(case):>24}" for case in recorded))
    for case, run in recorded.items():
        said = [advise_on(run, run.consistency, num, is_beside=beside).clock_s for num, beside in recorded]
        own = [each / real.clock_s - 1 for each, real in zip(said, recorded.values(), strict=True)]
        errors += [error for other, error in zip(recorded, own, strict=True) if other != case]
        cells = [f"{each * 1e3:.1f} ms, {error:+.1%}" for each, error in zip(said, own, strict=True)]
        print(f"{named(case):24} " + "  ".join(f"{cell:>24}" for cell in cells))
    within = sum(abs(error) <= TRUSTED for error in errors)
    print(f"{within} of {len(errors)} within {TRUSTED:.0%}, the worst off by {max(map(abs, errors)):.1%}")
    if options.json:
        share = within / len(errors)
        print_json({"name": "advise_hosts", "worst_error": max(map(abs, errors)), "within_15_percent": share})


def named(case: tuple[int, bool]) -> str:
    """Return a number of servers and where they are, in words."""
    return f"{case[0]} servers {'beside workers' if case[1] else 'alone'}"


if __name__ == "__main__":
    main()
