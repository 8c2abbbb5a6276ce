"""Pushes of a worker that are under way, and the memory in which they travel."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from paceline.core.effects import Release
from paceline.core.messages import Push, PushId
from paceline.errors import PacelineError
from paceline.node.outgoing import Outgoing, PushOutcome, Slots, promise
from paceline.node.wire import PushFrame
from paceline.tensors.table import Hyper

_NOBODY = Push(PushId(0, 0, 0, 0), "", 0, 0)


@dataclass(slots=True)
class Pushes:
    """All that is between a push and its last answer. Used under the lock of the worker node."""

    _slots: dict[tuple[str, int], Slots] = field(default_factory=dict[tuple[str, int], Slots])
    _under_way: dict[PushId, Outgoing] = field(default_factory=dict[PushId, Outgoing])
    _next: Outgoing | None = None

    def __len__(self) -> int:
        """Count the pushes under way."""
        return len(self._under_way)

    def open(self, table: str, server: int, slots: Slots) -> None:
        """Have memory for pushes of a table to a server."""
        self._slots[table, server] = slots

    def slots(self, table: str, server: int) -> Slots:
        """Return the memory for pushes of a table to a server."""
        return self._slots[table, server]

    def has_slot(self, table: str, server: int, clock: int) -> bool:
        """Say whether there is memory for one more push during this clock, without waiting for earlier ones."""
        slots = self._slots[table, server]
        return slots.available or (slots.held and not any(made < clock for made in self._clocks_of(table)))

    def held_at(self, clock: int) -> str:
        """Return a table that has pushes which are applied when this clock is finished, or nothing."""
        held = (table for (table, _), slots in self._slots.items() if slots.held and clock in self._clocks_of(table))
        return next(held, "")

    def prepare(
        self, bodies: dict[int, memoryview], count: float, absent: tuple[int, ...], hyper: tuple[Hyper, ...]
    ) -> Future[PushOutcome]:
        """Have a push ready that is given its identity by the next call of `outgoing`."""
        self._next = Outgoing(PushFrame(_NOBODY, count, absent, hyper), bodies, promise(PushOutcome))
        return self._next.future

    def outgoing(self, push: Push) -> Outgoing | None:
        """Return what a push consists of; None when it is answered or was given up."""
        if self._next is not None:
            self._next.frame = replace(self._next.frame, push=push)
            self._under_way[push.id], self._next = self._next, None
        return self._under_way.get(push.id)

    def release(self, effect: Release) -> Outgoing | None:
        """Reuse the memory of a part that is answered; return the push when all its parts are."""
        outgoing = self._under_way.get(effect.id)
        if outgoing is None:
            return None
        self._slots[outgoing.frame.push.table, effect.server].give(outgoing.bodies.pop(effect.server))
        outgoing.refused = outgoing.refused or effect.refused
        if outgoing.bodies:
            return None
        return self._under_way.pop(effect.id)

    def abandon(self, error: PacelineError) -> None:
        """End all pushes with an error: whether they were applied will not be known."""
        while self._under_way:
            _, outgoing = self._under_way.popitem()
            outgoing.future.set_exception(error)

    def _clocks_of(self, table: str) -> list[int]:
        pushes = [outgoing.frame.push for outgoing in self._under_way.values()]
        return [push.clock for push in pushes if push.table == table]
