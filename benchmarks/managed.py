"""Managed communication over lines of limited rate: which rows go first, and what that does for the loss.

    python benchmarks/managed.py [--seeds 3] [--seconds 26] [--json]

Matrix factorization by four workers and a server, each in a network namespace of its own; the kernel limits what each
end of a line may send. A worker's line carries less than pushing every row in every clock takes. `clock_only` does that
and has all of the line, `random` and `relative_magnitude` are managed, within the budget. What counts is when the loss
reaches the target, in seconds, clocks, and bytes that the kernel counted, headers included. At the step of the managed
policies `clock_only` does not converge, so it has a smaller one. Needs root, and `ip` and `tc` (iproute2).
"""

import argparse
import json
import signal
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NoReturn

from hosted_job import HostedJob, JobFailedError, hosted_spec
from msgspec.structs import replace
from shaped_network import CannotShapeError, Line, ShapedNetwork

HERE = Path(__file__).resolve().parent
POLICIES = ("clock_only", "random", "relative_magnitude")
NUM_WORKERS = 4
START_S, END_S = 300.0, 120.0  # beyond the training itself
SAMPLE_S = 0.5
WINDOW_S = 4.0  # over which a rate as low as this one has to stay within the budget, see `paceline.managed`

Curve = list[tuple[float, int, float]]  # when, clock, loss
Counts = list[tuple[float, int]]  # when, bytes sent by then


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to. `seconds`, `clock` and `megabytes` are those at the target; None if it was not reached."""

    seconds: float | None
    clock: int | None
    megabytes: float | None
    loss: float
    num_clocks: int
    mbps: float  # of the worker that sent most, over the whole training
    peak_mbps: float  # the same in its busiest window


def run(policy: str, seed: int, options: argparse.Namespace) -> Outcome:
    """Run one job and measure it; nothing of it is left, whatever happens."""
    command = [sys.executable, str(HERE / "managed_worker.py"), "--policy", policy, "--seed", str(seed)]
    command += ["--out", "{folder}", "--lr", str(options.clock_only_lr if policy == "clock_only" else options.lr)]
    for name in ("budget_mbps", "seconds", "clock_ms", "bound"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    lines = [Line(options.line_mbps, options.down_mbps)] * NUM_WORKERS
    spec = replace(hosted_spec(NUM_WORKERS, 1), join_timeout_s=START_S)
    with (
        ShapedNetwork([*lines, Line()]) as network,
        HostedJob(network, spec, [NUM_WORKERS], range(NUM_WORKERS), command, start_s=START_S) as job,
    ):
        counts = _count(network, job, time.monotonic() + START_S + options.seconds + END_S)
        curves = [_curve(job.folder / f"curve-{rank}") for rank in range(NUM_WORKERS)]
    return outcome(curves, counts, options.target)


def _count(network: ShapedNetwork, job: HostedJob, deadline: float) -> list[Counts]:
    """Count what the workers send until they have ended; return the counts of each."""
    counts: list[Counts] = [[] for _ in job.workers]
    while job.running():
        _check(time.monotonic() < deadline, "the workers did not end in time")
        for rank, own in enumerate(counts):
            own.append(network.sent_bytes(rank))
        time.sleep(SAMPLE_S)
    return counts


def _curve(path: Path) -> Curve:
    """Read what a worker has written down."""
    points = [line.split() for line in path.read_text().splitlines()]
    return [(float(when), int(clock), float(loss)) for when, clock, loss in points]


def outcome(curves: list[Curve], counts: list[Counts], target: float) -> Outcome:
    """Sum a run up: the loss of all is the mean of what each worker found last."""
    start, end = min(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    events = sorted((when, rank, clock, loss) for rank, curve in enumerate(curves) for when, clock, loss in curve)
    latest = dict[int, tuple[int, float]]()
    reached: tuple[float, int] | None = None
    loss = float("nan")
    for when, rank, clock, own in events:
        latest[rank] = clock, own
        if len(latest) == len(curves) and when <= end:
            loss = sum(each for _, each in latest.values()) / len(curves)
            if reached is None and loss <= target:
                reached = when, min(each for each, _ in latest.values())
    sent = [_between(own, start, reached[0]) for own in counts] if reached else []
    inside = [[(when, num) for when, num in own if start <= when <= end] for own in counts]
    return Outcome(
        reached[0] - start if reached else None,
        reached[1] if reached else None,
        sum(sent) / 1e6 if reached else None,
        loss,
        min(len(curve) for curve in curves),
        max(_mbps(own[0], own[-1]) for own in inside),
        max(_peak(own) for own in inside),
    )


def _between(counts: Counts, start: float, end: float) -> float:
    """Return the bytes sent from start to end, on straight lines between the counts."""

    def at(moment: float) -> float:
        for (before, low), (after, high) in pairwise(counts):
            if before <= moment <= after:
                return low + (high - low) * (moment - before) / (after - before)
        return float(counts[-1][1])

    return at(end) - at(start)


def _mbps(first: tuple[float, int], last: tuple[float, int]) -> float:
    return (last[1] - first[1]) * 8e-6 / (last[0] - first[0])


def _peak(counts: Counts) -> float:
    """Return the highest rate between a count and the first that came a window later."""
    windows = [(first, [last for last in counts if last[0] - first[0] >= WINDOW_S]) for first in counts]
    return max(_mbps(first, later[0]) for first, later in windows if later)


def _check(fine: bool, problem: str) -> None:
    if not fine:
        raise SystemExit(f"managed.py: {problem}")


def summary(outcomes: dict[str, list[Outcome]], options: argparse.Namespace) -> dict[str, object]:
    """Return what is printed as JSON; seconds to the target are null where a seed did not reach it."""
    managed = [each for policy in POLICIES[1:] for each in outcomes[policy]]
    pairs = zip(outcomes["random"], outcomes["relative_magnitude"], strict=True)
    result: dict[str, object] = {
        "name": "managed",
        "budget_mbps": options.budget_mbps,
        "highest_rate_over_budget": round(max(each.mbps for each in managed) / options.budget_mbps, 3),
        "busiest_window_over_budget": round(max(each.peak_mbps for each in managed) / options.budget_mbps, 3),
        "no_later_than_random": all(_no_later(ours.megabytes, theirs.megabytes) for theirs, ours in pairs),
    }
    for policy, each in outcomes.items():
        result[policy] = {
            "seconds": [_rounded(one.seconds) for one in each],
            "clock": [one.clock for one in each],
            "megabytes": [_rounded(one.megabytes) for one in each],
            "last_loss": [_rounded(one.loss) for one in each],
            "mbps": round(median(one.mbps for one in each), 3),
        }
    return result


def _no_later(ours: float | None, theirs: float | None) -> bool:
    return ours is not None and (theirs is None or ours <= theirs)


def _rounded(number: float | None) -> float | None:
    return None if number is None or number != number else round(number, 3)


def _end(_signal: int, _frame: object) -> NoReturn:
    raise SystemExit("managed.py: ended by a signal")


def main() -> None:
    """Run every policy with every seed, in turn, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=26.0, help="of training, of each run")
    parser.add_argument("--budget-mbps", type=float, default=1.25)
    parser.add_argument("--line-mbps", type=float, default=1.35, help="what a worker's line carries")
    parser.add_argument("--down-mbps", type=float, default=6.0, help="what the server's end of a line carries")
    parser.add_argument("--clock-ms", type=float, default=300.0)
    parser.add_argument("--lr", type=float, default=0.05, help="of the managed policies")
    parser.add_argument("--clock-only-lr", type=float, default=0.04, help="with 0.05 its loss overflows")
    parser.add_argument("--bound", type=int, default=16)
    parser.add_argument("--target", type=float, default=0.5, help="mean squared error")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, _end)
    outcomes: dict[str, list[Outcome]] = {policy: [] for policy in POLICIES}
    try:
        for seed in range(options.seeds):
            for policy, own in outcomes.items():
                own.append(run(policy, seed, options))
                print(f"seed {seed}, {policy}: {own[-1]}", file=sys.stderr)
    except (CannotShapeError, JobFailedError) as problem:
        print(f"managed.py: skipped, since {problem}", file=sys.stderr)
        print(json.dumps({"name": "managed", "skipped": str(problem)}))
        return
    for policy, own in outcomes.items():
        times = ", ".join("not reached" if each.seconds is None else f"{each.seconds:.1f} s" for each in own)
        print(
            f"{policy:19} loss {options.target} after {times}; {median(each.mbps for each in own):.2f} Mbit/s a worker"
        )
    if options.json:
        print(json.dumps(summary(outcomes, options)))


if __name__ == "__main__":
    main()
