"""Catching up: a replica that lagged first has workers repeat what it has not seen (upstream backup).

It serves no worker until each of those that take part has repeated its pushes, or has gone: what a worker has read
before may contain any of them. Until then pushes alone are handled, and all else waits: neither a tick nor a death may
complete a clock for which pushes are missing. Then these come first: what a worker has read has the clocks that they
complete, and it ignores values that are older, with its own pushes in them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

from paceline.core.events import Died
from paceline.core.messages import Clock, Join, Repeated
from paceline.core.server import ServerCore
from paceline.core.work_queue import Life
from paceline.server.connections import Stop, said_by
from paceline.server.line_watch import LOOK_S
from paceline.stopwatch import Stopwatch
from paceline.wire.messages import PushFrame, RowPushFrame


@final
@dataclass(slots=True)
class CatchUp:
    """Which workers have not repeated the pushes that they keep, and which of their messages are handled meanwhile.

    Args:
        served: what is served, for messages.
        num_servers: of the job.
        core: of the server, as its replica knows it.
        lag: by how many clocks of each worker this process may be behind.
        postponed: items that have come before; and then all that are to be handled after this, in order.

    Attributes:
        completing: of those the ones to be handled before all others: ticks that workers repeat, and deaths.
    """

    served: str
    num_servers: int
    core: ServerCore
    lag: int
    postponed: list[object]
    completing: list[object] = field(default_factory=list[object])
    _awaited: set[Life] = field(default_factory=set[Life])
    _gone: set[Life] = field(default_factory=set[Life])  # without having repeated anything
    _reached: int = -1  # the clock below which a worker has read all updates

    def __post_init__(self) -> None:
        """Await all that take part."""
        lives = self.core.lives.incarnations(self.core.members)
        self._awaited = {life for life in lives if self._has_joined(life)}

    def _has_joined(self, life: Life) -> bool:
        known = self.core.lives.current(life[0])
        return known is not None and known.joined_at is not None

    def run(self, get: Callable[[float], object | None], handle: Callable[[object], object], patience_s: float) -> None:
        """Block until each worker has repeated what it keeps, has died, or did not come, or the server is told to stop.

        Args:
            get: returns the next item of the server's queue, or None after so many seconds.
            handle: handles an item.
            patience_s: how long to wait for a worker of which nothing is known.
        """
        watch = Stopwatch(2 * LOOK_S)
        for item in self.postponed:
            self._note_death(item)
        while self._awaited and watch.elapsed_s() < patience_s:
            item = get(LOOK_S)
            found = said_by(item, self.num_servers)
            if found is not None and self._admits(*found):
                handle(item)
            elif self._note_death(item) or (found is not None and self._is_repeated_tick(*found)):
                self.completing.append(item)
            elif item is not None:
                self.postponed.append(item)
            if isinstance(item, Stop):  # what was asked for before comes first: a namespace that ends is saved
                return

    def _note_death(self, item: object) -> bool:
        """Do not wait for a worker that has died; return whether this is the death of one that was waited for."""
        if not isinstance(item, Died) or (item.worker, item.incarnation) not in self._awaited:
            return False
        self._awaited.discard((item.worker, item.incarnation))
        self._gone.add((item.worker, item.incarnation))
        return True

    def _is_repeated_tick(self, life: Life, message: object) -> bool:
        """Return whether a worker says again which clocks it has finished, whose pushes it has repeated before."""
        return isinstance(message, Clock) and life in self._awaited

    def _admits(self, life: Life, message: object) -> bool:
        """Return whether a message of a worker is handled now; notes that it has repeated all."""
        match message:
            case Join(sender):
                return not self.core.lives.objection(sender)
            case PushFrame() | RowPushFrame():
                return life in self._awaited
            case Repeated():
                self._awaited.discard(life)
                self._reached = max(self._reached, message.reached)
                return True
            case _:
                return False

    def losses(self) -> list[str]:
        """Return what is lost of each worker that has not repeated its pushes; called at the end."""
        return [self._loss(*life) for life in sorted(self._gone | self._awaited)]

    def _loss(self, worker: int, incarnation: int) -> str:
        clock = self.core.finished(worker)
        seen = f"; others have read values with its clocks {clock} to {self._reached - 1}"
        return (
            f"worker {worker} (incarnation {incarnation}) did not come back to {self.served}, whose replica "
            f"serves: what it had pushed there from clock {clock} on, of {self.lag} clocks and the open one at most, "
            f"is lost as far as the replica had not received it{seen if self._reached > clock else ''}"
        )
