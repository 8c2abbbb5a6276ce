"""Reads of dense tables in flight, and the last values received from each server."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

from paceline.core.effects import ReadDone
from paceline.core.messages import Fetched, Pull
from paceline.errors import PacelineError
from paceline.wire.messages import PullFrame
from paceline.worker.pushes import pending_future


@dataclass(frozen=True, slots=True)
class ReadOutcome:
    """How a read ended: the clocks of reader and values, their source, and how long it waited."""

    clock: int
    value_clock: int
    source: str
    waited_s: float


@dataclass(slots=True)
class Reads:
    """Open reads by request. A newer read of a table replaces an older one, so both end together."""

    _open: dict[int, tuple[str, Future[ReadDone]]] = field(default_factory=dict[int, tuple[str, Future[ReadDone]]])
    # By (server, table): the last request whose values have arrived.
    _taken: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])

    def add(self, request: int, table: str) -> Future[ReadDone]:
        """Add a read; the future ends when it does."""
        future = pending_future(ReadDone)
        self._open[request] = table, future
        return future

    def finish(self, done: ReadDone) -> None:
        """End a read, and earlier ones of the same table."""
        ended = [request for request, (table, _) in self._open.items() if table == done.table]
        for request in ended:
            if request <= done.request:
                _, future = self._open.pop(request)
                future.set_result(done)

    def abandon(self, error: PacelineError) -> None:
        """End all open reads with an error."""
        while self._open:
            _, (_, future) = self._open.popitem()
            future.set_exception(error)

    def frame(self, server: int, pull: Pull) -> PullFrame:
        """Return the frame of a pull for this server."""
        return PullFrame(pull, self._taken.get((server, pull.table), -1))

    def note_taken(self, server: int, message: Fetched) -> None:
        """Note that values were stored or dropped: the server may reuse their memory."""
        key = server, message.table
        self._taken[key] = max(message.request, self._taken.get(key, -1))
