"""The replica of a server: a process on another machine that does what the server does, and serves once it is gone.

The process that serves, the head, sends in order what it is told: each event of its core with its time, the tensors of
pushes, and requests that change tables. No answer leaves before the replica has received all that it rests on, so what
a worker was told is never lost with the head; or, where the replica lags, workers say it again (`replica_lag.py`).
Which of the two goes on when their connection breaks is decided by the first of them to write the next view
(`job/views.py`); the other one ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

from paceline.core.server import ServerCore
from paceline.errors import DeadlineExceeded, PeerError
from paceline.server.connections import Stop
from paceline.server.line_watch import LOOK_S, SILENT, LineWatch
from paceline.server.recovery import Recovery
from paceline.server.replay import Replay
from paceline.server.replica_messages import (
    ANSWER_TIMEOUT_S,
    ANSWERS,
    CODEC,
    ROLE,
    Attached,
    Ended,
    Leaving,
    Noted,
    Pushed,
    Received,
    Restored,
)
from paceline.server.replica_place import Promotion, Superseded, wait_decided
from paceline.server.tables import ServedTables
from paceline.stopwatch import Stopwatch
from paceline.transport.base import Connection, Listener
from paceline.wire.messages import Hello, decode

_MOST_BEATS: Final = 3600  # in a row, as the head reads them with its next answer
_END_TIMEOUT_S: Final = 10.0
_HANDED_OVER: Final = "the process before it has handed over"


@final
@dataclass(slots=True)
class Follower:
    """The replica's end: takes in what the head says, until that ends.

    Args:
        rank: of the server.
        promotion: asked when the head is gone.
        listener: where the head connects, and workers once this process serves.
        patience_s: for the head to connect.
        tell: called with a line for the user when this process begins to serve.
        name: of what is served, for messages; by default the server with its rank.
        noted: called with what is kept of the server beside its node, each time the head says it.
        ended: called when this process is not to serve, with what it has, and the view in which it was the replica, 0
            where more may have been acknowledged.
        begins: called when this process is to serve, before it waits for workers.
        lag: by how many clocks of each worker answers may have been ahead of this process.
    """

    rank: int
    promotion: Promotion
    listener: Listener
    patience_s: float
    tell: Callable[[str], None]
    name: str = ""
    noted: Callable[[bytes], None] = lambda _: None
    ended: Callable[[ServerCore, ServedTables, int], None] | None = None
    begins: Callable[[], None] = lambda: None
    lag: int = 0
    _view: int = 0
    _counts: bool = False  # as the replica: what it was given is whole, and in a view
    _has_all: bool = False  # the head has ended, and said so

    @property
    def _served(self) -> str:
        return self.name or f"server {self.rank}"

    def follow(self, replay: Replay, next_item: Callable[[float], object | None]) -> Recovery | None:
        """Block while the head serves; return what is left to do before this process serves, or None if told to stop.

        Raises:
            Superseded: this process is not to serve, as the head goes on without it.
            DeadlineExceeded: the head has not connected.
        """
        items: list[object] = []

        def is_stopped() -> bool:
            while (item := next_item(0.0)) is not None:
                if isinstance(item, Stop):
                    return True
                items.append(item)
            return False

        connection = self._accept_head(is_stopped)
        if connection is None:
            return None
        try:
            lost = self._take_all(connection, replay, is_stopped)
            if lost is not None:
                self._take_over(lost)
        except Superseded:
            self._leave(replay)
            raise
        finally:
            connection.close()  # last: a head that leaves goes on where its replica is gone before it serves
        if lost is None:
            self._leave(replay)
            return None
        replay.drop_fresh()
        return Recovery(postponed=items, lag=self.lag, served=self._served)

    def _leave(self, replay: Replay) -> None:
        """Tell with what this process ends, if it was the replica."""
        if self.ended is not None and self._counts:
            replay.drop_fresh()
            self.ended(replay.parts.core, replay.tables, self._view if self._has_all or not self.lag else 0)

    def _accept_head(self, is_stopped: Callable[[], bool]) -> Connection | None:
        watch = Stopwatch(2 * LOOK_S)
        while not is_stopped():
            try:
                connection = self.listener.accept(timeout_s=LOOK_S)
            except DeadlineExceeded:
                if watch.elapsed_s() > self.patience_s:
                    raise DeadlineExceeded(
                        f"{self._served} did not connect to its replica within {self.patience_s:g} s"
                    ) from None
                continue
            if self._is_head(connection):
                return connection
            connection.close()
        return None

    def _is_head(self, connection: Connection) -> bool:
        try:
            hello = decode(connection.identity)
        except PeerError:
            return False
        is_head = isinstance(hello, Hello) and (hello.role, hello.rank) == (ROLE, self.rank)
        return is_head and connection.peer_identity.permit("server", self.rank)

    def _take_all(self, connection: Connection, replay: Replay, is_stopped: Callable[[], bool]) -> str | None:
        """Do what the head says until it is lost; return how, or None if this process is to end."""
        num_frames, since_stop, line = 0, None, LineWatch(connection)
        while since_stop is None or since_stop.elapsed_s() < _END_TIMEOUT_S:
            try:
                frame = connection.receive(timeout_s=LOOK_S, place=replay.place)
                message = CODEC.decode(frame.header)
            except DeadlineExceeded:
                if since_stop is None and is_stopped():
                    since_stop = Stopwatch(2 * LOOK_S)  # the head is told the same, and says that it ends
                if line.is_silent():
                    return SILENT
                if line.num_looks < _MOST_BEATS:
                    _answer(connection, num_frames)
                continue
            except PeerError as error:
                return None if since_stop is not None or is_stopped() else str(error)
            if isinstance(message, Ended):
                self._has_all = True
                return None
            if isinstance(message, Leaving):
                return _HANDED_OVER
            if isinstance(message, Attached):
                self._view = message.view
            elif isinstance(message, Noted):
                self.noted(message.content)
            elif not isinstance(message, Restored):  # what comes behind all tables comes to the replica
                self._counts = True
            line.note_heard()
            num_frames += 1
            if not isinstance(message, Pushed):  # its event follows
                _answer(connection, num_frames)
            replay.take(message, frame)
        return None

    def _take_over(self, lost: str) -> None:
        try:
            serves = self._view > 0 and wait_decided(
                lambda: self.promotion.promote(self._view), f"the replica of {self._served}", self.tell
            )
        except OSError as error:
            raise Superseded(f"the replica of {self._served} cannot tell whether it serves: {error}") from error
        if not serves:
            raise Superseded(f"{self._served} goes on without its replica, or had not begun: {lost}")
        self.begins()
        self.tell(f"{self._served} is served by its replica from now on: {lost}")


def _answer(connection: Connection, num_frames: int) -> None:
    """Acknowledge to the head what has arrived; it counts even if the head has ended."""
    with suppress(PeerError):
        connection.send(ANSWERS.encode(Received(num_frames)), timeout_s=ANSWER_TIMEOUT_S)
