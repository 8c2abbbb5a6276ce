"""Results of a simulation: speed, waiting time, and staleness of the values read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from paceline.core.consistency import Consistency
from paceline.simulate.actor import SimulatedWorker
from paceline.simulate.history import History
from paceline.simulate.scenario import Scenario
from paceline.simulate.world import World


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of one rehearsal. A clock counts for throughput when its update was applied everywhere.

    `differentials` counts the reads by clock differential: -1 is as fresh as can be, -(bound + 1) as old as allowed.
    """

    consistency: Consistency
    clocks_per_s: float
    clocks_per_s_by_worker: tuple[float, ...]
    wait_share: float
    differentials: dict[int, int]

    @property
    def mean_lag(self) -> float:
        """Return by how many clocks the values lagged behind the freshest possible ones, on average."""
        lags = sum((-1 - differential) * count for differential, count in self.differentials.items())
        return lags / sum(self.differentials.values())

    @property
    def max_lag(self) -> int:
        """Return by how many clocks the oldest values lagged."""
        return -1 - min(self.differentials)


def rehearse(scenario: Scenario) -> Outcome:
    """Run a scenario and measure it.

    Raises:
        Violation: the run broke a rule, which means that the core does.
    """
    world = World(scenario)
    history = world.run()
    rates = tuple(_rate(actor, history) for _, actor in sorted(world.actors.items()))
    busy_s = sum(actor.finished_at for actor in world.actors.values())
    return Outcome(
        consistency=scenario.consistency,
        clocks_per_s=sum(rates),
        clocks_per_s_by_worker=rates,
        wait_share=sum(actor.waited_s for actor in world.actors.values()) / busy_s,
        # A late worker of a quorum may read values newer than its clock; it then goes on from there.
        differentials=dict(sorted(Counter(min(-1, read.differential) for read in history.reads).items())),
    )


def _rate(actor: SimulatedWorker, history: History) -> float:
    """Return the clocks a second of one worker, by its own time: who finishes early does not idle in this number."""
    made = history.made[actor.worker, actor.incarnation]
    refused = {push_id for _, push_id in history.refused}
    return sum(push_id not in refused for push_id, _ in made) / actor.finished_at
