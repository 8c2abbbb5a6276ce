"""Training on virtual time: the simulator says when each worker read what, and real gradients are computed along that.

The protocol, its waits and what each read contains are those of the real cores; computing and messages take virtual
seconds; gradients, updates and losses are real numbers. Two runs under one seed meet the same delays.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from paceline.core.consistency import Consistency
from paceline.core.messages import PushId
from paceline.simulate.history import SeenRead
from paceline.simulate.scenario import Network, Scenario, Stragglers
from paceline.simulate.world import TABLE, World

Floats = NDArray[np.float64]
_LOST = 1e6  # a loss so many times the first counts as diverged, and training ends


class LearningProblem(Protocol):
    """What is learned: a loss over flat parameters, and the gradient of one worker's samples of one clock."""

    def start(self) -> Floats:
        """Return the first parameters, (n,)."""
        ...

    def gradient(self, values: Floats, worker: int, clock: int, part: int = 0, of: int = 1) -> Floats:
        """Return the gradient, (n,), of what this worker has in one of equal parts of this clock."""
        ...

    def loss(self, values: Floats) -> float:
        """Return the loss over all samples."""
        ...


class PushRule(Protocol):
    """What a server does with one push; a new one for each run, as it may have a state."""

    def step(self, values: Floats, gradient: Floats, seen: int) -> None:
        """Change the values by one push, which was computed when `seen` pushes had been applied."""
        ...


@dataclass(slots=True)
class FixedStep:
    """Plain descent at one rate."""

    rate: float

    def step(self, values: Floats, gradient: Floats, seen: int) -> None:
        """Take one step."""
        del seen
        values -= self.rate * gradient


class SimulatedRun(msgspec.Struct, frozen=True):
    """One table on one server through one simulation: applied pushes in order, and the reads of each worker.

    Args:
        order: the applied pushes with their clocks.
        reads: the reads of each worker in the order of their clocks.
        finished: when each worker finished each of its clocks.
        deliveries: when servers' unasked values arrived, and how many pushes they contained; empty if none were sent.
        seconds: until the last worker was done.
        wait_share: the share of the workers' time that they waited.
    """

    order: list[tuple[PushId, int]]
    reads: dict[int, list[SeenRead]]
    finished: dict[int, dict[int, float]]
    deliveries: tuple[tuple[float, int], ...]
    seconds: float
    wait_share: float

    def length_at(self, worker: int, clock: int, share: float) -> int:
        """Return how many pushes the values contain that a worker reads when this share of its clock is over."""
        read = self.read_of(worker, clock)
        moment = read.time + share * (self.finished[worker][clock] - read.time)
        place = bisect_right(self.deliveries, moment, key=lambda delivery: delivery[0])
        return max(read.parts[0].length, self.deliveries[place - 1][1] if place else 0)

    def ages(self, parts: int = 20) -> dict[int, float]:
        """Return the share of the time of computing at each clock differential, of values read all through a clock."""
        found: list[int] = []
        for worker, reads in self.reads.items():
            for read in reads:
                moments = [self.length_at(worker, read.clock, (part + 0.5) / parts) for part in range(parts)]
                found += [self._differential(read, length) for length in moments]
        return {each: found.count(each) / len(found) for each in sorted(set(found))}

    def _differential(self, read: SeenRead, length: int) -> int:
        complete = length // len(self.reads) if length > read.parts[0].length else read.value_clock
        return min(-1, max(read.value_clock, complete) - 1 - read.clock)

    def read_of(self, worker: int, clock: int) -> SeenRead:
        """Return the read that a worker's push of this clock was computed on."""
        reads = self.reads[worker]
        return reads[bisect_right(reads, clock, key=lambda read: read.clock) - 1]

    def differentials(self) -> dict[int, float]:
        """Return the share of reads at each clock differential."""
        found = [min(-1, read.differential) for reads in self.reads.values() for read in reads]
        return {each: found.count(each) / len(found) for each in sorted(set(found))}


def scenario(
    policy: str,
    *,
    seed: int,
    workers: int = 8,
    clocks: int = 100,
    stragglers: str = "none",
    spread: float = 0.1,
    is_lazy: bool = False,
    latency_s: float = 0.01,
) -> Scenario:
    """Return a scenario in which a clock takes a second within `spread`, and a message `latency_s` within a half.

    Args:
        policy: as in `paceline run --consistency`.
        seed: of all delays.
        workers: their number.
        clocks: of each worker.
        stragglers: as in `paceline simulate --stragglers`.
        spread: of the time of a clock, half of it each way.
        is_lazy: whether values are only fetched when the bound demands it.
        latency_s: of a message.
    """
    consistency = Consistency.parse(policy)
    slow = Stragglers.parse(stragglers)
    return Scenario(
        consistency,
        num_workers=workers,
        num_servers=1,
        num_clocks=clocks,
        compute_s=(1 - spread, 1 + spread),
        stragglers=slow,
        network=Network(latency_s=(latency_s / 2, latency_s * 3 / 2)),
        refresh=0.0 if is_lazy or consistency.deliver == "on_clock" else 1.0,
        lease_s=50.0,
        retry_s=1000.0 * slow.factor,
        seed=seed,
    )


def simulate_run(of: Scenario) -> SimulatedRun:
    """Run a scenario of one dense table on one server.

    Raises:
        Violation: the core broke a promise.
    """
    world = World(replace(of, num_servers=1))
    history = world.run()
    reads: dict[int, list[SeenRead]] = {worker: [] for worker in range(of.num_workers)}
    for read in history.reads:
        reads[read.life[0]].append(read)
    finished = {
        worker: {read.clock - 1: read.time - read.waited_s for read in mine[1:]}
        | {of.num_clocks - 1: actor.finished_at}
        for (worker, mine), actor in zip(sorted(reads.items()), map(world.actors.get, sorted(reads)), strict=True)
        if actor is not None
    }
    order = world.histories[TABLE].shards[0].order
    busy_s = sum(actor.finished_at for actor in world.actors.values())
    waited_s = sum(actor.waited_s for actor in world.actors.values())
    seconds = max(actor.finished_at for actor in world.actors.values())
    sent = _deliveries(of, finished, order) if of.consistency.deliver == "on_clock" else ()
    return SimulatedRun(order, reads, finished, sent, seconds, waited_s / busy_s)


def _deliveries(
    of: Scenario, finished: dict[int, dict[int, float]], order: Sequence[tuple[PushId, int]]
) -> tuple[tuple[float, int], ...]:
    """Return when values of each clock arrive: one way after the last push has come, with all that is applied then."""
    one_way_s = sum(of.network.latency_s) / 2
    arrived = [finished[push.worker][clock] + one_way_s for push, clock in order]
    ends = [max(mine[clock] for mine in finished.values()) + one_way_s for clock in range(of.num_clocks)]
    return tuple((end + one_way_s, sum(time <= end for time in arrived)) for end in ends)


class LearningCurve(msgspec.Struct, frozen=True):
    """Losses of one run, by virtual seconds and by applied pushes; the last one is infinite if it diverged."""

    seconds: tuple[float, ...]
    pushes: tuple[int, ...]
    losses: tuple[float, ...]

    def seconds_to(self, target: float) -> float:
        """Return the virtual seconds until the loss is at the target for the first time; infinite if it never is."""
        return next((s for s, loss in zip(self.seconds, self.losses, strict=True) if loss <= target), np.inf)


def learn_along(
    run: SimulatedRun, problem: LearningProblem, rule: PushRule, *, looks: int = 50, parts: int = 1
) -> LearningCurve:
    """Compute along a simulated run what its workers would have learned.

    A worker reads what the servers had applied, and its own pushes that they had not. Losses are those of the servers'
    values, at the times when the fastest worker reads.

    Args:
        run: when was read, and what it contained.
        problem: what is learned.
        rule: what a push does.
        looks: how many losses to compute.
        parts: how often a worker reads in a clock. Later reads see what servers have sent meanwhile.
    """
    values = problem.start()
    versions = [values.copy()]
    gradients: dict[PushId, Floats] = {}
    due = _looks(run, looks)
    seconds, pushes, losses = [0.0], [0], [problem.loss(values)]
    with np.errstate(over="ignore", invalid="ignore"):
        for count, (push, clock) in enumerate(run.order, start=1):
            part = run.read_of(push.worker, clock).parts[0]
            gradients = {own: kept for own, kept in gradients.items() if not _is_old(own, push, part.own)}
            gradient = np.zeros_like(values)
            for number in range(parts):
                length = run.length_at(push.worker, clock, number / parts) if number else part.length
                seen = versions[length].copy()
                for own in gradients if length == part.length else ():
                    if own.worker == push.worker and own.seq < push.seq and isinstance(rule, FixedStep):
                        seen -= rule.rate * gradients[own]  # as a worker adds its own pushes to what it has read
                gradient += problem.gradient(seen, push.worker, clock, number, parts)
            gradients[push] = gradient
            rule.step(values, gradient, part.length)
            versions.append(values.copy())
            if count in due:
                loss = problem.loss(values)
                seconds.append(due[count])
                pushes.append(count)
                losses.append(loss if np.isfinite(loss) and loss < _LOST * losses[0] else np.inf)
                if not np.isfinite(losses[-1]):
                    break
    return LearningCurve(tuple(seconds), tuple(pushes), tuple(losses))


def _is_old(own: PushId, push: PushId, included: frozenset[int]) -> bool:
    """Return whether an own push was contained in what its worker has read, so that later reads contain it as well."""
    return own.worker == push.worker and own.seq in included


def _looks(run: SimulatedRun, looks: int) -> dict[int, float]:
    """Return the numbers of applied pushes at which to compute a loss, with the virtual time of each."""
    times = sorted(
        (read.time, part.length) for reads in run.reads.values() for read in reads for part in read.parts.values()
    )
    reached: dict[int, float] = {}
    for time, length in times:
        reached.setdefault(length, time)
    lengths = sorted(reached)
    reached[len(run.order)] = min(reached.get(len(run.order), run.seconds), run.seconds)
    step = max(1, len(lengths) // looks)
    return {length: reached[length] for length in (*lengths[::step], len(run.order)) if length}


RATES: Final = (0.05, 0.1, 0.2, 0.4)


def rate_for(problem: LearningProblem, run: SimulatedRun, target: float, rates: Sequence[float] = RATES) -> float:
    """Return the rate whose run is at the target first."""
    return min(rates, key=lambda rate: learn_along(run, problem, FixedStep(rate), looks=30).seconds_to(target))
