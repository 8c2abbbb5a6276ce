"""What a server writes into its trace."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal, cast, final

import msgspec

from paceline.core.effects import Apply, BoundMoved, MembershipChanged, ServerEffect
from paceline.core.messages import Message
from paceline.core.server import ServerEvent
from paceline.observe import trace as records
from paceline.observe.trace import Trace


@final
class ServerRecords(msgspec.Struct, frozen=True):
    """Writes records of the server of this rank."""

    trace: Trace
    rank: int

    def handled(self, event: ServerEvent, effects: Sequence[ServerEffect]) -> None:
        """Record an event and its effects."""
        name, done = f"server {self.rank}", [_as_data(effect) for effect in effects]
        self.trace.record(records.Handled(time.monotonic(), name, _as_data(event), done))

    def refused(self, reason: str, worker: int = -1) -> None:
        """Record that a worker, or another peer, was refused."""
        self.trace.record(records.Refusal(time.monotonic(), self.rank, worker, "", reason))

    def applied(self, effect: Apply, clock: int, began_t: float) -> None:
        """Record an update of a table that has reached this clock, and has been under way since `began_t`."""
        now, workers = time.monotonic(), tuple([push_id.worker for push_id in effect.ids])
        self.trace.record(records.AppliedRecord(now, self.rank, effect.table, workers, clock, now - began_t))

    def advanced(self, table: str, clock: int) -> None:
        """Record that every clock below this one is complete."""
        self.trace.record(records.MinClock(time.monotonic(), self.rank, table, clock))

    def moved(self, effect: BoundMoved) -> None:
        """Record that the adaptive bound of a table has moved."""
        costs = effect.waiting, effect.staleness
        now, bounds = time.monotonic(), (effect.before, effect.bound)
        self.trace.record(records.BoundRecord(now, self.rank, effect.table, *bounds, *costs))

    def changed(self, effect: MembershipChanged) -> None:
        """Record that a worker takes part, or no longer."""
        change = cast("Literal['joined', 'left', 'died']", effect.change)
        life = effect.worker, effect.incarnation
        self.trace.record(records.MembershipRecord(time.monotonic(), self.rank, *life, change))


def _as_data(value: ServerEvent | ServerEffect | Message) -> dict[str, object]:
    return {"is": type(value).__name__, **cast("dict[str, object]", msgspec.to_builtins(value))}
