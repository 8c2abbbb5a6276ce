"""Reads of a worker that are under way, and what it has taken in of the values sent to it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from paceline.core.effects import ReadDone
from paceline.core.messages import Fetched, Pull
from paceline.errors import PacelineError
from paceline.wire.messages import PullFrame
from paceline.worker.pushes import promise


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """How a read ended: the clock of the reader and of the values, where they came from, how long it waited."""

    clock: int
    value_clock: int
    source: str
    waited_s: float


@dataclass(slots=True)
class Reads:
    """Open reads by request. A newer read of a table takes the place of an older one, so both end together."""

    _open: dict[int, tuple[str, Future[ReadDone]]] = field(default_factory=dict[int, tuple[str, Future[ReadDone]]])
    # By (server, table): the last request whose values were taken in.
    _taken: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])

    def begin(self, request: int, table: str) -> Future[ReadDone]:
        """Note a read that begins; the future ends when it does."""
        future = promise(ReadDone)
        self._open[request] = table, future
        return future

    def finish(self, done: ReadDone) -> None:
        """End a read, and those of the same table before it."""
        ended = [request for request, (table, _) in self._open.items() if table == done.table]
        for request in ended:
            if request <= done.request:
                _, future = self._open.pop(request)
                future.set_result(done)

    def abandon(self, error: PacelineError) -> None:
        """End all open reads with an error: nothing will come any more."""
        while self._open:
            _, (_, future) = self._open.popitem()
            future.set_exception(error)

    def frame(self, server: int, pull: Pull) -> PullFrame:
        """Return a pull as it is sent to this server."""
        return PullFrame(pull, self._taken.get((server, pull.table), -1))

    def note_taken(self, server: int, message: Fetched) -> None:
        """Note that values have been taken in, or were of no use: their memory may be written to again."""
        key = server, message.table
        self._taken[key] = max(message.request, self._taken.get(key, -1))
