"""What comes to a worker from one server, on that connection's reader thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.events import Arrived, Connected
from paceline.core.messages import Fetched, Ticked
from paceline.core.worker import WorkerCore, WorkerEvent
from paceline.errors import PeerError, Refused
from paceline.node.calls import Calls
from paceline.node.mirror import Mirror
from paceline.node.mishaps import MISHAPS, story
from paceline.node.reads import Reads
from paceline.node.requests import Done, Failed
from paceline.node.rows.client import RowClient
from paceline.node.waiting import Waiting
from paceline.node.wire import KeysWanted, decode
from paceline.transport.base import EMPTY, Frame


def _refuse(reason: str) -> None:
    raise PeerError(reason)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Takes in the frames of one server, under the lock of the worker whose parts these are.

    `fail` is told why the worker cannot go on, where a frame makes no sense; without it that is raised.
    """

    server: int
    waiting: Waiting
    core: WorkerCore
    calls: Calls
    reads: Reads
    rows: RowClient
    mirrors: dict[str, Mirror]
    handle: Callable[[WorkerEvent, memoryview], None]
    fail: Callable[[str], None] = _refuse

    def on_frame(self, frame: Frame) -> None:
        """Take in a frame; whoever waits is told."""
        message = decode(frame.header)
        with self.waiting.changed:
            try:
                self._take_in(message, frame)
            except MISHAPS as error:
                self.fail(
                    f"server {self.server} sent a {type(message).__name__} that makes no sense here ({story(error)}): "
                    f"{str(message)[:500]}"
                )
            self.waiting.changed.notify_all()

    def _take_in(self, message: object, frame: Frame) -> None:
        if isinstance(message, Done):
            self.calls.answered(message.number, frame.body)
        elif isinstance(message, Failed):
            self.calls.failed(message.number, Refused(f"server {self.server} refused: {message.reason}"))
        elif isinstance(message, KeysWanted):
            self.rows.on_keys_wanted(self.server, message)
        elif not self.waiting.failure:
            self.handle(Arrived(self.server, message), frame.body)
        if isinstance(message, Ticked):
            self.rows.on_ticked(self.server, message.clock)
        elif isinstance(message, Fetched):
            self.reads.note_taken(self.server, message)

    def place(self, header: bytes, size_bytes: int) -> memoryview | None:
        """Return where the body of a frame goes: the values that a read waits for into the copy of their table.

        Without the lock: who holds it may be waiting for this thread to leave the connection. What is asked here
        about this server changes only on this thread, but for a read that begins, which then waits as well.
        """
        message = decode(header)
        if isinstance(message, Fetched) and self.core.awaits(self.server, message):
            return self.mirrors[message.table].landing(self.server, size_bytes)
        return None

    def on_reconnected(self, use: Callable[[], None]) -> None:
        """Say again, over the connection that `use` takes into use, what may have been lost with the one before.

        Under one lock, under which everything is sent: a new push may not go before an older one (E7).
        """
        with self.waiting.changed:
            use()
            self.rows.on_reconnected(self.server)
            self.handle(Connected(self.server), EMPTY)
            self.calls.repeat(self.server)
