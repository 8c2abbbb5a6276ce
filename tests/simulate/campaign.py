"""Many seeded rehearsals in a row: `python -m tests.simulate.campaign --seeds 10000`.

Prints what was read, what was broken (with the seed that repeats it) and which rare things happened how often.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.simulate.swarm import draw
from tests.simulate.watching import MUST_HAPPEN, WatchedWorld

from paceline.simulate.history import Violation
from paceline.simulate.scenario import Scenario


@dataclass(slots=True)
class Totals:
    """What a campaign has seen."""

    num_runs: int = 0
    num_reads: int = 0
    num_events: int = 0
    broken: dict[int, str] = field(default_factory=dict[int, str])  # seed -> what, or the error
    marks: Counter[str] = field(default_factory=Counter[str])

    @property
    def missing(self) -> list[str]:
        """Return what should have happened at least once and did not."""
        return [name for name in MUST_HAPPEN if not self.marks[name]]


def run(seeds: Iterable[int], scenario_of: Callable[[int], Scenario] = draw) -> Totals:
    """Rehearse the scenario of every seed and gather what happened."""
    totals = Totals()
    for seed in seeds:
        world = WatchedWorld(scenario_of(seed))
        try:
            world.run()
        except Violation as error:
            totals.broken[seed] = str(error)
        totals.num_runs += 1
        totals.num_reads += sum(len(history.reads) for history in world.histories.values())
        totals.num_events += world.num_events
        totals.marks += world.marks
    return totals


def main() -> None:
    """Run a campaign and print its totals; the exit code is 1 when a rule was broken or something did not happen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    totals = run(range(options.first, options.first + options.seeds))
    print(f"{totals.num_runs} runs, {totals.num_events} events, {totals.num_reads} reads, {len(totals.broken)} broken")
    for name in MUST_HAPPEN:
        print(f"{totals.marks[name]:>9} {name}")
    for seed, what in totals.broken.items():
        print(f"seed {seed}: {what}")
    raise SystemExit(1 if totals.broken or totals.missing else 0)


if __name__ == "__main__":
    main()
