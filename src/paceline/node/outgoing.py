"""Pushes on their way: the memory that carries them, and who has yet to answer."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from paceline.node.wire import PushFrame


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """How a push ended: applied everywhere, or refused with a reason."""

    applied: bool
    reason: str = ""


@dataclass(slots=True)
class Outgoing:
    """One push between the user's call and the last server's answer."""

    frame: PushFrame
    bodies: dict[int, memoryview]  # by server. Invariant: holds exactly the servers that have not answered
    future: Future[PushOutcome]
    refused: str = ""


@dataclass(slots=True)
class Slots:
    """Memory for pushes of one table to one server: at most `limit` pushes are under way at a time."""

    limit: int
    size_bytes: int
    _free: list[memoryview] = field(default_factory=list[memoryview])
    _num_made: int = 0

    @property
    def available(self) -> bool:
        """Say whether `take` gives memory at once."""
        return bool(self._free) or self._num_made < self.limit

    def take(self) -> memoryview | None:
        """Return free memory, or None if it has yet to be allocated (and given back by `give`)."""
        if self._free:
            return self._free.pop()
        self._num_made += 1
        return None

    def give(self, memory: memoryview) -> None:
        """Take memory back: its content is no longer needed."""
        self._free.append(memory)
