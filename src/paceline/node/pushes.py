"""Pushes of a worker that are under way, and the memory in which they travel."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from paceline.core.effects import Release
from paceline.core.messages import Push, PushId
from paceline.errors import PacelineError
from paceline.node.outgoing import Outgoing, PushBuffer, PushOutcome, Slots, UnderWay, promise
from paceline.node.wire import PushFrame

# In the place of an identity that is not known yet.
NO_PUSH = Push(PushId(0, 0, 0, 0), "", 0, 0)


@dataclass(slots=True)
class Pushes:
    """All that is between a push and its last answer. Used under the lock of the worker node."""

    _slots: dict[str, Slots] = field(default_factory=dict[str, Slots])
    _under_way: dict[PushId, Outgoing] = field(default_factory=dict[PushId, Outgoing])
    _counts: UnderWay = field(default_factory=UnderWay)
    _next: Outgoing | None = None

    def __len__(self) -> int:
        """Count the pushes under way."""
        return len(self._under_way)

    def open(self, table: str, slots: Slots) -> None:
        """Have memory for pushes of a table."""
        self._slots[table] = slots

    def take(self, table: str, *, shown: bool) -> PushBuffer:
        """Return memory for one more push of a table; see `Slots.take`."""
        return self._slots[table].take(shown=shown)

    def give(self, table: str, buffer: PushBuffer) -> None:
        """Take back memory for pushes of a table that was not used."""
        self._slots[table].give(buffer)

    def has_slot(self, table: str, clock: int) -> bool:
        """Say whether there is memory for one more push during this clock, without waiting for earlier ones."""
        slots = self._slots[table]
        return slots.available or (slots.held and not self._counts.is_older(table, clock))

    def held_at(self, clock: int) -> dict[str, int]:
        """Return how many pushes each table has that are applied when this clock is finished, of tables with any."""
        nums = {table: self._counts.num(table, clock) for table, slots in self._slots.items() if slots.held}
        return {table: num for table, num in nums.items() if num}

    def prepare(self, buffer: PushBuffer, bodies: dict[int, memoryview], frame: PushFrame) -> Future[PushOutcome]:
        """Have a push ready that is given its identity by the next call of `outgoing`."""
        self._next = Outgoing(frame, buffer, bodies, promise(PushOutcome))
        return self._next.future

    def outgoing(self, push: Push) -> Outgoing | None:
        """Return what a push consists of; None when it is answered or was given up."""
        if self._next is not None:
            self._next.frame = replace(self._next.frame, push=push)
            self._under_way[push.id], self._next = self._next, None
            self._counts.add(push)
        return self._under_way.get(push.id)

    def release(self, effect: Release) -> Outgoing | None:
        """Note that a server has answered; when all have, reuse the memory and return the push."""
        outgoing = self._under_way.get(effect.id)
        if outgoing is None:
            return None
        outgoing.bodies.pop(effect.server)
        outgoing.answers.note(effect)
        if outgoing.bodies:
            return None
        self._slots[outgoing.frame.push.table].give(outgoing.buffer)
        self._counts.remove(outgoing.frame.push)
        return self._under_way.pop(effect.id)

    def abandon(self, error: PacelineError) -> None:
        """End all pushes with an error: whether they were applied will not be known."""
        while self._under_way:
            _, outgoing = self._under_way.popitem()
            outgoing.future.set_exception(error)
        self._counts.clear()
