"""The latest records of a run, bounded, and where the time of its steps went: into what, and for what."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from dataclasses import dataclass, field
from itertools import chain, pairwise
from statistics import fmean, median
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec

from paceline.observe.trace import (
    NO_SERVER,
    AppliedRecord,
    ArrivedRecord,
    Exit,
    MembershipRecord,
    MinClock,
    ReadRecord,
    Refusal,
    Resources,
    RowRead,
    Sampled,
    Serving,
    State,
    Step,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from paceline.observe.trace import TraceRecord

NUM_STEPS: Final = 10  # of each worker; what is said is of these
_NUM_BEFORE: Final = 4
_NUM_READS: Final = 8 * NUM_STEPS  # a step may read several tables
_NUM_SAMPLES: Final = 4 * NUM_STEPS
_NUM_STALENESS: Final = 256
_NUM_REFUSALS: Final = 64
_NEAR_S: Final = 0.001  # a read that waited for less did not wait
_LEAST_STEP_S: Final = 1e-9  # as shares of steps are told

Blamed = tuple[Literal["worker", "link", "server"], int]
_K = TypeVar("_K")
_V = TypeVar("_V")


@dataclass(slots=True)
class _Latest(dict[_K, "deque[_V]"]):
    """The latest values by key, `num` of each."""

    num: int = NUM_STEPS

    def __missing__(self, key: _K) -> deque[_V]:
        made = self[key] = deque(maxlen=self.num)
        return made


@dataclass(slots=True)
class Window:
    """The latest records of all processes; `add` them in any order between processes.

    window = Window()
    for record in follower.poll():
        window.add(record)
    """

    steps: _Latest[int, Step] = field(default_factory=lambda: _Latest[int, Step](NUM_STEPS + _NUM_BEFORE))
    reads: _Latest[int, ReadRecord | RowRead] = field(
        default_factory=lambda: _Latest[int, "ReadRecord | RowRead"](_NUM_READS)
    )
    staleness: _Latest[int, int] = field(default_factory=lambda: _Latest[int, int](_NUM_STALENESS))
    arrived: _Latest[tuple[int, int], ArrivedRecord] = field(  # by server and worker
        default_factory=lambda: _Latest[tuple[int, int], ArrivedRecord](2 * NUM_STEPS)
    )
    advanced: _Latest[int, MinClock] = field(default_factory=lambda: _Latest[int, MinClock](_NUM_READS))
    applied: _Latest[int, AppliedRecord] = field(default_factory=lambda: _Latest[int, AppliedRecord](_NUM_READS))
    serving: _Latest[int, Serving] = field(default_factory=lambda: _Latest[int, Serving](_NUM_SAMPLES))
    sampled: _Latest[tuple[str, int], Sampled] = field(
        default_factory=lambda: _Latest[tuple[str, int], Sampled](_NUM_SAMPLES)
    )
    refused: deque[Refusal] = field(default_factory=lambda: deque[Refusal](maxlen=_NUM_REFUSALS))
    states: dict[int, State] = field(default_factory=dict[int, State])
    gone: set[int] = field(default_factory=set[int])
    ended_servers: set[int] = field(default_factory=set[int])  # of which the launcher has told that a process ended

    def add(self, record: TraceRecord) -> None:
        """Take in a record; kinds that say nothing about the time of steps are left out."""
        match record:
            case Step():
                self.steps[record.worker].append(record)
                self.states.pop(record.worker, None)
                self.gone.discard(record.worker)
            case ReadRecord():
                self.reads[record.worker].append(record)
                self.staleness[record.worker].append(record.staleness)
            case RowRead():
                self.reads[record.worker].append(record)
                self.staleness[record.worker].extend(record.clock - clock for clock in record.num_rows)
            case ArrivedRecord():
                self.arrived[record.server, record.worker].append(record)
            case MinClock():
                self.advanced[record.server].append(record)
            case AppliedRecord():
                self.applied[record.server].append(record)
            case Serving():
                self.serving[record.server].append(record)
            case Sampled():
                self.sampled[record.role, record.rank].append(record)
            case Refusal() if record.server == NO_SERVER:
                self.refused.append(record)
            case State():
                self.states[record.worker] = record
            case Resources():
                self.gone.add(record.worker)
            case MembershipRecord() if record.event == "joined":
                self.gone.discard(record.worker)
            case MembershipRecord():
                self.gone.add(record.worker)
            case Exit(role="server"):
                self.ended_servers.add(record.rank)
            case _:
                pass

    def workers(self) -> list[int]:
        """Return the ranks of the workers that take part and have finished clocks."""
        return sorted(worker for worker, steps in self.steps.items() if steps and worker not in self.gone)

    def latest(self, worker: int) -> list[Step]:
        """Return the steps that count, the latest last; those before them are kept as what they waited for."""
        return list(self.steps[worker])[-NUM_STEPS:]

    def began_t(self) -> float:
        """Return when the oldest of the latest steps began, of the worker that has been at it for the least time."""
        firsts = [self.latest(worker)[0] for worker in self.workers()]
        return max((first.t - first.step_s for first in firsts), default=0.0)


class WorkerTime(msgspec.Struct, frozen=True):
    """Mean seconds of a step of one worker, over the latest steps.

    Args:
        worker: its rank.
        num_steps: over how many steps.
        step_s: of a whole step.
        own_s: in which the script computes.
        load_s: in which its loop waits for batches.
        waited_s: in which it waits for values, by what for.
        push_s: rest of its communication.
        own_each_s: computing and waiting for batches, of each step.
    """

    worker: int
    num_steps: int
    step_s: float
    own_s: float
    load_s: float
    waited_s: dict[Blamed, float]
    push_s: float
    own_each_s: tuple[float, ...]

    @property
    def working_s(self) -> float:
        """Return the seconds of a step in which it needs nothing of the others."""
        return self.own_s + self.load_s

    @property
    def for_workers_s(self) -> float:
        """Return the seconds of a step in which it waits for other workers."""
        return sum(seconds for (kind, _), seconds in self.waited_s.items() if kind == "worker")

    @property
    def wire_s(self) -> float:
        """Return the seconds of a step that servers and links take."""
        return self.push_s + sum(seconds for (kind, _), seconds in self.waited_s.items() if kind != "worker")

    @property
    def awaited(self) -> int | None:
        """Return the worker that it waits for most; None if it waits for none."""
        waits = {rank: seconds for (kind, rank), seconds in self.waited_s.items() if kind == "worker" and seconds > 0}
        return max(waits, key=lambda rank: waits[rank]) if waits else None


def worker_times(window: Window) -> dict[int, WorkerTime]:
    """Return where the time of each worker's latest steps went."""
    ways = _Ways(window)
    times: dict[int, WorkerTime] = {}
    for worker in window.workers():
        steps = window.latest(worker)
        since_t, until_t = steps[0].t - steps[0].step_s, steps[-1].t
        waited: defaultdict[Blamed, float] = defaultdict(float)
        for read in window.reads[worker]:
            if since_t < read.t <= until_t:
                for blamed, seconds in ways.split(read).items():
                    waited[blamed] += seconds
        comm_s, num = sum(step.comm_s for step in steps), len(steps)
        if not waited and sum(step.wait_s for step in steps) == 0.0:  # as in all-reduce, which reads no tables
            waited.update(_split_meeting(window, worker, comm_s))
        times[worker] = WorkerTime(
            worker,
            num,
            max(_LEAST_STEP_S, fmean(step.step_s for step in steps)),
            fmean(step.own_s for step in steps),
            fmean(step.load_s for step in steps),
            {blamed: seconds / num for blamed, seconds in waited.items()},
            max(0.0, comm_s - sum(waited.values())) / num,
            tuple(step.own_s + step.load_s for step in steps),
        )
    return times


def _split_meeting(window: Window, worker: int, comm_s: float) -> dict[Blamed, float]:
    """Blame the worker that worked longest in each clock for what its work took longer than this worker's."""
    blamed: defaultdict[Blamed, float] = defaultdict(float)
    own = {step.clock: step.own_s + step.load_s for step in window.latest(worker)}
    for clock, own_s in own.items():
        others = {
            other: step.own_s + step.load_s
            for other in window.workers()
            if other != worker
            for step in window.steps[other]
            if step.clock == clock
        }
        slowest = max(others, key=lambda rank: others[rank], default=None)
        if slowest is not None and others[slowest] > own_s:
            blamed["worker", slowest] += others[slowest] - own_s
    room = comm_s / (sum(blamed.values()) or 1.0)
    return {key: seconds * min(1.0, room) for key, seconds in blamed.items()}


def _time_of(record: MinClock) -> float:
    return record.t


class _Ways:
    """Finds what a read waited for: the computing of a worker, the way of its push, the server, or the way back."""

    def __init__(self, window: Window) -> None:
        self._finished = {
            (step.worker, step.clock): step.t for steps in window.steps.values() for step in steps
        }  # before its tick was sent
        self._came: dict[tuple[int, int], dict[int, float]] = defaultdict(dict)  # by server and clock, of each worker
        for (server, worker), arrivals in window.arrived.items():
            for arrival in arrivals:
                self._came[server, arrival.clock][worker] = arrival.t
        self._last_came = {
            key: max(came, key=lambda worker: came[worker]) for key, came in self._came.items()
        }  # of each server and clock: the worker that ended it
        self._advanced: dict[str, list[MinClock]] = defaultdict(list)  # by table, in order of time
        for record in sorted((each for records in window.advanced.values() for each in records), key=_time_of):
            self._advanced[record.table].append(record)
        self._slow_links = _slow_links(self._up(), self._down(window))

    def split(self, read: ReadRecord | RowRead) -> dict[Blamed, float]:
        """Return the seconds of a read's wait, by what it waited for."""
        if read.waited_s < _NEAR_S:
            return {}
        began_t, blamed = read.t - read.waited_s, defaultdict[Blamed, float](float)
        advance = self._last_advance(read, began_t)
        if advance is None:
            blamed[self._on_way(read.worker, NO_SERVER)] += read.waited_s
            return blamed
        came = self._came.get((advance.server, advance.clock - 1), {})
        last = self._last_came.get((advance.server, advance.clock - 1))
        bounds = [began_t]
        for at in (
            self._finished.get((last, advance.clock - 1), began_t) if last is not None else began_t,
            came[last] if last is not None else began_t,
            advance.t,
            read.t,
        ):
            bounds.append(min(max(at, bounds[-1]), read.t))
        computing_s, up_s, applying_s, down_s = (after - before for before, after in pairwise(bounds))
        if last is not None:
            blamed["worker", last] += computing_s if last != read.worker else 0.0
            blamed[self._on_way(last, advance.server)] += up_s
        blamed["server", advance.server] += applying_s
        blamed[self._on_way(read.worker, advance.server)] += down_s
        return blamed

    def _last_advance(self, read: ReadRecord | RowRead, began_t: float) -> MinClock | None:
        records = self._advanced.get(read.table, ())
        place = bisect_right(records, read.t, key=_time_of)
        return records[place - 1] if place and records[place - 1].t > began_t else None

    def _on_way(self, worker: int, server: int) -> Blamed:
        """Return whose the time on a way is: the link of a worker if it is slower than others', else the server."""
        return ("link", worker) if worker in self._slow_links or server == NO_SERVER else ("server", server)

    def _up(self) -> dict[int, list[float]]:
        """Return how long the ends of clocks were on their way to the servers, by worker."""
        up: dict[int, list[float]] = defaultdict(list)
        for (_, clock), came in self._came.items():
            for worker, at in came.items():
                if (worker, clock) in self._finished:
                    up[worker].append(max(0.0, at - self._finished[worker, clock]))
        return up

    def _down(self, window: Window) -> dict[int, list[float]]:
        """Return how long values were on their way to each worker that waited for them."""
        down: dict[int, list[float]] = defaultdict(list)
        for worker, reads in window.reads.items():
            for read in reads:
                if read.waited_s >= _NEAR_S and (last := self._last_advance(read, read.t - read.waited_s)) is not None:
                    down[worker].append(read.t - last.t)
        return down


_TIMES_SLOWER: Final = 3.0
_LEAST_WAY_S: Final = 0.002


def _slow_links(*ways: dict[int, list[float]]) -> set[int]:
    """Return the workers whose ways take several times as long as those of the others."""
    typical = {
        worker: sum(median(way[worker]) for way in ways if way.get(worker))
        for worker in {worker for way in ways for worker in way}
    }
    slow: set[int] = set()
    for worker, own_s in typical.items():
        others = [seconds for other, seconds in typical.items() if other != worker]
        if others and own_s >= max(_LEAST_WAY_S, _TIMES_SLOWER * median(others)):
            slow.add(worker)
    return slow


def increase(samples: Sequence[Sampled], since_t: float, of: Callable[[Sampled], float]) -> float:
    """Return by how much a total of a process has grown a second since a time; 0 with fewer than two samples.

    The last sample before that time counts, as samples are rarer than short steps.
    """
    before = [sample for sample in samples if sample.t <= since_t][-1:]
    used = [*before, *(sample for sample in samples if sample.t > since_t)]
    used = [sample for sample in used if sample.pid == used[-1].pid]  # of another life, totals began anew
    if len(used) < 2 or used[-1].t <= used[0].t:
        return 0.0
    return max(0.0, of(used[-1]) - of(used[0])) / (used[-1].t - used[0].t)


def staleness_of(*reads: Iterable[int]) -> tuple[int, int] | None:
    """Return how many clocks old the reads of some workers were, at the median and the 99th percentile."""
    seen = sorted(chain.from_iterable(reads))
    return (_percentile(seen, 0.5), _percentile(seen, 0.99)) if seen else None


def latest_life(records: Iterable[Serving]) -> list[Serving]:
    """Return those of the latest process that was this server: in another one's place, totals began anew."""
    life: list[Serving] = []
    for record in records:
        if life and record.in_use_s < life[-1].in_use_s:
            life.clear()
        life.append(record)
    return life


def _percentile(ordered: Sequence[int], share: float) -> int:
    """Return the value that this share of ordered values do not exceed.

    >>> _percentile([0, 0, 1, 5], 0.5), _percentile([0, 0, 1, 5], 0.99)
    (0, 5)
    """
    return ordered[min(len(ordered) - 1, int(share * len(ordered) - 1e-9))]
