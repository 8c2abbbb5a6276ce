"""What a bound that adapts costs and saves, beside fixed bounds, where stragglers come and go; on virtual time.

    python benchmarks/adaptive.py [--clocks 200] [--seeds 3] [--json]

Four workers and one server, of the real protocol; a clock computes for 50 ms within a tenth. The job has four parts of
so many clocks: all workers alike; each clock of each worker four times as long with a chance of one in ten; worker 0
always twice as slow; and all alike again. Every policy meets the same stragglers. Nothing here is measured on a clock
of this machine, so a busy one changes nothing.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Final

from measuring import print_json

from paceline.core.consistency import Consistency
from paceline.simulate.happenings import MovedBound, ReadValues
from paceline.simulate.outcome import Outcome, rehearse
from paceline.simulate.scenario import Network, Scenario, Stragglers

POLICIES: Final = ("bsp", "ssp:1", "ssp:4", "ssp:8", "asynchronous", "adaptive:0:8")
PARTS: Final = (
    ("alike", Stragglers()),
    ("slow in turns", Stragglers("transient", share=0.1, factor=4.0)),
    ("one always slow", Stragglers("persistent", factor=2.0)),
    ("alike again", Stragglers()),
)
NUM_WORKERS: Final = 4
COMPUTE_S: Final = (0.045, 0.055)


@dataclass(frozen=True, slots=True)
class Found:
    """What one policy did: milliseconds of a clock, mean and largest staleness, mean staleness by part, and moves."""

    policy: str
    clock_ms: float
    staleness: float
    most: int
    by_part: tuple[float, ...]
    num_moves: int


def computing(num_clocks: int, seed: int) -> tuple[tuple[float, ...], ...]:
    """Return the seconds that each worker computes in each clock of the job."""
    own: list[tuple[float, ...]] = []
    for rank in range(NUM_WORKERS):
        rng = Random(f"{seed}.{rank}")
        own.append(
            tuple(
                rng.uniform(*COMPUTE_S) * stragglers.slowdown(rank, rng)
                for _, stragglers in PARTS
                for _ in range(num_clocks)
            )
        )
    return tuple(own)


def play(policy: str, num_clocks: int, seed: int) -> Found:
    """Rehearse the job under a policy."""
    scenario = Scenario(
        Consistency.parse(policy),
        num_workers=NUM_WORKERS,
        num_servers=1,
        num_clocks=num_clocks * len(PARTS),
        network=Network(latency_s=(0.0002, 0.0004)),
        retry_s=1e6,
        recorded=computing(num_clocks, seed),
        seed=seed,
    )
    outcome = rehearse(scenario, keeps_happenings=True)
    clock_ms = 1e3 * outcome.seconds / scenario.num_clocks
    num_moves = sum(isinstance(each, MovedBound) for each in outcome.happenings)
    return Found(policy, clock_ms, outcome.mean_lag, outcome.max_lag, by_part(outcome, num_clocks), num_moves)


def by_part(outcome: Outcome, num_clocks: int) -> tuple[float, ...]:
    """Return the mean staleness of the reads in each part of the job."""
    seen: list[list[int]] = [[] for _ in PARTS]
    for each in outcome.happenings:
        if isinstance(each, ReadValues) and each.clock < num_clocks * len(PARTS):
            seen[each.clock // num_clocks].append(each.clock - each.value_clock)
    return tuple(map(fmean, seen))


def mean(found: Sequence[Found]) -> Found:
    """Return the means over seeds; of the largest staleness the largest."""
    return Found(
        found[0].policy,
        fmean(each.clock_ms for each in found),
        fmean(each.staleness for each in found),
        max(each.most for each in found),
        tuple(map(fmean, zip(*(each.by_part for each in found), strict=True))),
        round(fmean(each.num_moves for each in found)),
    )


def main() -> None:
    """Rehearse and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clocks", type=int, default=200, help="of each of the four parts")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    found = [mean([play(policy, options.clocks, seed) for seed in range(options.seeds)]) for policy in POLICIES]
    print(f"{'':14} ms a clock  behind  at most  " + "  ".join(f"{name:>15}" for name, _ in PARTS))
    for each in found:
        parts = "  ".join(f"{staleness:15.2f}" for staleness in each.by_part)
        print(f"{each.policy:14} {each.clock_ms:10.1f}  {each.staleness:6.2f}  {each.most:7}  {parts}")
    adaptive, fixed = found[-1], [each for each in found if each.policy.startswith("ssp")]
    best = min(fixed, key=lambda each: each.clock_ms)
    print(
        f"{adaptive.policy} takes {adaptive.clock_ms / best.clock_ms:.3f} of the time of {best.policy}, on values "
        f"{adaptive.staleness:.2f} clocks behind in place of {best.staleness:.2f}; {adaptive.num_moves} moves a job"
    )
    if options.json:
        result: dict[str, object] = {"name": "adaptive", "over_best": adaptive.clock_ms / best.clock_ms}
        for each in found:
            result[f"{each.policy}.ms"], result[f"{each.policy}.staleness"] = each.clock_ms, each.staleness
        print_json(result)


if __name__ == "__main__":
    main()
