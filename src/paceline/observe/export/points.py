"""Reported values as points over clocks: of each worker, and merged over the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import nan
from typing import TYPE_CHECKING, Final

import msgspec

from paceline.observe.averages import mean
from paceline.observe.trace import (
    Evaluated,
    Exit,
    MembershipRecord,
    ReadRecord,
    Reported,
    ReportedValues,
    Resources,
    RowRead,
    Step,
)

if TYPE_CHECKING:
    from paceline.observe.trace import TraceRecord

MOST_NAMES: Final = 256  # of values of a script's; more are left out
MOST_WORKERS: Final = 64  # that have points of their own; those of others are only merged
_MOST_OPEN: Final = 1024  # clocks that wait for the slowest worker


class Point(msgspec.Struct, frozen=True):
    """A value at a clock; `t` is monotonic, as in records."""

    name: str
    clock: int
    t: float
    value: float


@dataclass(slots=True)
class PointMaker:
    """Makes points from records: `worker-0/loss` of each worker as it comes, and `loss`, merged, clock by clock.

    The merged value of a clock is the mean of all that workers reported in it. It is given out when every worker that
    takes part is past that clock, so that it does not change any more; or when 1,024 later ones are open. What comes
    even later is left out.

    maker = PointMaker()
    points = [point for record in follower.poll() for point in maker.add(record)] + maker.pop_merged()
    """

    _names: set[str] = field(default_factory=set[str])
    _finished: dict[int, int] = field(default_factory=dict[int, int])  # clocks, of each worker that takes part
    _open: dict[int, dict[str, list[float]]] = field(default_factory=dict[int, dict[str, list[float]]])
    _next: int = 0  # the first clock that was not given out
    _t: float = 0.0

    def add(self, record: TraceRecord) -> list[Point]:
        """Take in a record; return the points of its worker."""
        match record:
            case Step(t, worker, clock):
                self._finished[worker] = clock + 1
                self._merge(clock, t, {"paceline/step_s": record.step_s, "paceline/wait_s": record.wait_s})
                return [] if record.loss is None else self._note(worker, clock, t, {"loss": record.loss})
            case ReadRecord(t, worker, _, clock):
                self._finished.setdefault(worker, clock)
                self._merge(clock, t, {"paceline/staleness": record.staleness})
            case RowRead(t, worker, _, clock, num_rows) if num_rows:
                self._finished.setdefault(worker, clock)
                self._merge(clock, t, {"paceline/staleness": clock - min(num_rows)})
            case Reported(t, worker, clock, loss):
                return self._note(worker, clock, t, {"loss": _number(record.text or loss)})
            case ReportedValues(t, worker, clock, values):
                return self._note(worker, clock, t, {name: _number(value) for name, value in values.items()})
            case Evaluated(t, worker, clock, loss, accuracy):
                measured = {"evaluation/loss": _number(loss), "evaluation/accuracy": _number(accuracy)}
                return self._note(worker, clock, t, measured)
            case MembershipRecord(_, _, worker) if record.event != "joined":
                self._finished.pop(worker, None)
            case Resources(_, worker):
                self._finished.pop(worker, None)
            case Exit() if record.role == "worker":
                self._finished.pop(record.rank, None)
            case _:
                pass
        return []

    def pop_merged(self, *, is_over: bool = False) -> list[Point]:
        """Return the merged points of the clocks that are complete; of all, when the run `is_over`."""
        done = min(self._finished.values(), default=0)
        ready = [clock for clock in sorted(self._open) if is_over or clock < done]
        ready = ready or sorted(self._open)[: max(0, len(self._open) - _MOST_OPEN)]
        points: list[Point] = []
        for clock in ready:
            values = self._open.pop(clock)
            points += [Point(name, clock, self._t, mean(found)) for name, found in sorted(values.items())]
            self._next = clock + 1
        return points

    def _note(self, worker: int, clock: int, t: float, values: Mapping[str, float]) -> list[Point]:
        new = [name for name in values if name not in self._names]
        self._names.update(new[: MOST_NAMES - len(self._names)])
        values = {name: value for name, value in values.items() if name in self._names}
        self._merge(clock, t, values)
        if worker >= MOST_WORKERS:
            return []
        return [Point(f"worker-{worker}/{name}", clock, t, value) for name, value in values.items()]

    def _merge(self, clock: int, t: float, values: Mapping[str, float]) -> None:
        self._t = max(self._t, t)
        if clock < self._next:
            return
        merged = self._open.setdefault(clock, {})
        for name, value in values.items():
            merged.setdefault(name, []).append(value)


def _number(value: float | str | None) -> float:
    """Return a value of a record as a number; None is one that is not finite."""
    return nan if value is None else float(value)
