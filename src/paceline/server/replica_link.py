"""The link of a server to its replica: what it sends, and how it waits for acknowledgements; see `replica.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, final

from paceline.core.work_queue import Life
from paceline.errors import DeadlineExceeded, PacelineError, PeerError
from paceline.server.journal import Asked, Entry, Written, encode_written
from paceline.server.line_watch import LOOK_S, SILENT, LineWatch
from paceline.server.record_file import RecordFile
from paceline.server.recovery import ServerParts
from paceline.server.replica_lag import ReplicaLag
from paceline.server.replica_messages import (
    ANSWER_TIMEOUT_S,
    ANSWERS,
    CODEC,
    FOLDER,
    ROLE,
    Attached,
    Checked,
    Ended,
    Happened,
    HeadMessage,
    Idled,
    Leaving,
    Looked,
    Noted,
    Proved,
    Pushed,
    Restored,
)
from paceline.server.replica_place import HandedOver, ReplicaPlace, Superseded, wait_decided
from paceline.server.tables import ServedTables
from paceline.stopwatch import Stopwatch
from paceline.transport.base import EMPTY, Connection
from paceline.wire.messages import Hello, PushFrame, RowPullFrame, RowPushFrame, RowsUsed, check_server, encode
from paceline.wire.requests import Request, WholeTable
from paceline.wire.send_queue import SendQueue

_CONNECT_TIMEOUT_S: Final = 5.0
_IDLE_LOOK_S: Final = 1.0  # between two looks of the head at its replica, or for one
_BUSY_S: Final = 10.0  # in which something always waits, until that is told to be why there is no replica yet
_LEAST_BYTES_PER_S: Final = 1e6
_RECORD_BEHIND: Final = 4096  # frames at the end of a record, among which are those of a journal


@final
@dataclass(slots=True)
class ReplicaLink:
    """The head's end: tells the replica, and waits until it has received what answers rest on. Used by one thread.

    Without a place there is no replica, and without a record besides, all calls do nothing.

    Args:
        place: of the replica that there is from the start.
        find: returns the places of processes that have come to be the replica.
        hands_over: returns whether this process is to have its replica serve, and to end.
        record: gets all that a replica is told, or would be.
        lag: how far the replica may be behind answers to workers; by default not at all.
        beside: returns what is kept of the server beside its node, for a process that comes to be the replica.
        replaces: whether such a process also takes the place of the replica that there is.
    """

    place: ReplicaPlace | None = None
    find: Callable[[], list[ReplicaPlace]] | None = None
    hands_over: Callable[[], bool] | None = None
    record: RecordFile | None = None
    lag: ReplicaLag | None = None
    beside: Callable[[], bytes] | None = None
    replaces: bool = True
    _look_s: float = 0.0  # when to look next at the one that there is
    _find_s: float = 0.0  # when to look next for another
    _busy_since_s: float | None = None  # since when something always waits
    _tried: set[str] = field(default_factory=set[str])  # addresses of those that were not to be reached
    _told: str = ""  # the last reason why there is none yet
    _connection: Connection | None = None
    _queue: SendQueue | None = None  # of a replica that lags
    _num_sent: int = 0
    _num_received: int = 0  # of these, by the replica
    _superseded: str = ""
    _is_ending: bool = False
    _is_handing_over: bool = False

    def open(self, state: bytes) -> None:
        """Connect, and give the replica the state to begin with; raises as `Transport.connect` does."""
        if self.record is not None and self.record.open():
            self.record.append(CODEC.encode(Attached(0)), memoryview(state))
        if self.place is not None:
            self._connection = self._connect(self.place)
            self._send(Attached(self.place.view), memoryview(state))
            self.wait_received()
            self._let_lag()

    def patience_s(self, patience_s: float | None) -> float | None:
        """Return for how long to wait for the next item at most, if it is so long otherwise (None: for ever)."""
        if not self.is_connected and self.find is None:
            return patience_s
        return _IDLE_LOOK_S if patience_s is None else min(patience_s, _IDLE_LOOK_S)

    def look(self) -> None:
        """Notice that the replica is gone, also while nothing is told to it; called between two items.

        It looks once a second, and does not wait, unless this process is to hand over.

        Raises:
            Superseded: the replica serves in the place of this process; `HandedOver` where it was asked to.
        """
        if not self.is_connected or time.monotonic() < self._look_s:
            return
        self._look_s = time.monotonic() + _IDLE_LOOK_S
        if self.hands_over is not None and self.hands_over():
            self._hand_over()
        self.check()  # what is sent is what shows that a machine confirms nothing
        self._hear_all()

    def _hand_over(self) -> None:
        """Have the replica serve; raises HandedOver once it does, and goes on where it is gone."""
        self.wait_received()  # first: the rest of a frame may be on its way
        self._is_handing_over = True
        self._send(Leaving())
        self.wait_received()  # which does not come: the replica closes the connection once it serves
        self._is_handing_over = False

    def take_replicated(self) -> dict[Life, list[int]]:
        """Return by worker the pushes that the replica has received since the last call; all, where there is none.

        Nothing where replicas do not lag: there workers know it from answers. Does not block; raises as `look`.
        """
        if self.lag is None:
            return {}
        if self._num_received < self._num_sent:
            self._hear_all()
        return self.lag.take_received(self._num_received if self.is_connected else None)

    def _hear_all(self) -> None:
        """Note what the replica has received, as far as it has said so by now; raises Superseded."""
        try:
            while self.is_connected:
                self._hear(timeout_s=0.0)
        except DeadlineExceeded:
            pass
        except PeerError as error:
            self._go_on_alone(str(error))

    def repair(self, parts: ServerParts, tables: ServedTables) -> None:
        """Give all that there is to a process that has come to be the replica; called between two items.

        That is possible while no push waits. Blocks until it has all of it, which counts from then on; until then the
        replica that there may be is the one that counts.

        Raises:
            Superseded: that replica serves in the place of this process, or this process cannot tell.
        """
        if self.find is None or (self.is_connected and not self.replaces) or time.monotonic() < self._find_s:
            return
        is_quiet = not any(table.num_waiting or not table.has_values for table in tables.values())
        if not is_quiet or parts.calls.has_waiting:
            self._note_busy()
            return
        self._busy_since_s = None
        self._find_s = time.monotonic() + _IDLE_LOOK_S
        if self._untried() is None:
            return
        self.wait_received()  # by the one that there may be: nothing is on its way to it then, or it is gone
        place, connection = self._untried(), None
        if place is None:
            return
        if not place.is_tried_again:
            self._tried.add(place.address())
        try:
            connection = self._connect(place)
            num_told = self._give_all(connection, place, parts, tables)
        except (PacelineError, OSError) as error:
            if connection is not None:
                connection.close()
            if str(error) != self._told:
                place.tell(f"{place.served} has no replica yet: {error}")
            self._told = str(error)
            return
        self._told = ""
        self._enlist(place, connection, num_told)

    def _note_busy(self) -> None:
        """Tell that a process waits to be given all for as long as something else always waits, once."""
        now = time.monotonic()
        self._busy_since_s = now if self._busy_since_s is None else self._busy_since_s
        if now < self._busy_since_s + _BUSY_S:
            return
        self._busy_since_s = now
        place = None if self.is_connected else self._untried()
        why = "pushes that wait for their clock, or calls, have left no moment to give it all; it is tried again"
        if place is not None and self._told != why:
            place.tell(f"{place.served} has no replica yet: {why}")
            self._told = why

    def _untried(self) -> ReplicaPlace | None:
        """Return the place of the newest process that has come to be the replica, and was not tried before."""
        assert self.find is not None
        try:
            return next((place for place in self.find() if place.address() not in self._tried), None)
        except (PeerError, OSError):  # it does not listen yet
            return None

    def _enlist(self, place: ReplicaPlace, connection: Connection, num_told: int) -> None:
        """Have a process that has been told all, in so many frames, be the replica, in the place of one before it."""
        replaced, queue = self._connection, self._queue
        self.place, self._connection, self._queue = place, connection, None
        self._num_sent = self._num_received = num_told
        self._let_lag()
        try:
            is_replica = wait_decided(
                lambda: place.promotion.enlist(place.view - 1, place.process), place.served, place.tell
            )
        except OSError as error:  # it may be in the view, and serve once this process is silent
            self._superseded = f"{place.served} cannot tell whether it has a replica: {error}"
            raise Superseded(self._superseded) from error
        if replaced is not None:
            _let_go(replaced, queue, is_over=is_replica)
        if is_replica:
            again = f"{place.served} has a replica" if place.name else f"{place.served} has a replica again"
            place.tell(again if replaced is None else f"{place.served} has another replica")
            self.check()  # by which the replica knows that it is one
            return
        self.close()
        if replaced is not None:
            self._superseded = f"{place.served} is served by the replica that was to be replaced"
            raise Superseded(self._superseded)

    def _connect(self, place: ReplicaPlace) -> Connection:
        hello = encode(Hello(ROLE, place.rank, 0, place.generation))
        connection = place.transport.connect(place.address(), hello, timeout_s=_CONNECT_TIMEOUT_S)
        check_server(connection, place.rank)
        return connection

    def _give_all(self, connection: Connection, place: ReplicaPlace, parts: ServerParts, tables: ServedTables) -> int:
        """Send the state of the server, and wait until it has come; return the number of frames."""
        told: list[tuple[HeadMessage, bytes]] = [(Attached(place.view), parts.dump())]
        if self.beside is not None:
            told.append((Noted(self.beside()), b""))
        with TemporaryDirectory(prefix=FOLDER) as folder:
            for name, table in tables.items():
                clock = parts.core.clock_of(name)
                table.save(Path(folder) / "table", clock)
                state = (Path(folder) / "table").read_bytes()
                told.append((Restored(name, clock, table.version, table.hyper), state))
        for message, body in told:
            timeout_s = ANSWER_TIMEOUT_S + len(body) / _LEAST_BYTES_PER_S
            connection.send(CODEC.encode(message), memoryview(body), timeout_s=timeout_s)
        num_received, watch = 0, Stopwatch(2 * LOOK_S)
        while num_received < len(told):
            try:
                num_received = ANSWERS.decode(connection.receive(timeout_s=LOOK_S).header).num_frames
            except DeadlineExceeded:
                if watch.elapsed_s() > ANSWER_TIMEOUT_S:
                    raise
        return len(told)

    def _let_lag(self) -> None:
        """Send from now on without waiting for the replica to receive, if it may lag."""
        if self.lag is not None and self._connection is not None:
            self._queue = SendQueue(self._connection, self._connection.close, copies=True)
            self.lag.restart()

    @property
    def is_connected(self) -> bool:
        """Whether there is a replica by now, and still."""
        return self._connection is not None

    @property
    def num_behind(self) -> int | None:
        """By how many clocks the replica lags, as `ReplicaLag` counts; None where there is none."""
        if not self.is_connected:
            return None
        return 0 if self.lag is None else self.lag.num_behind(self._num_received)

    @property
    def is_there(self) -> bool:
        """Whether there is a replica by now, and still, or a record."""
        return self.is_connected or self.record is not None

    @property
    def is_wanted(self) -> bool:
        """Whether there is to be one, be it that none is there now."""
        return self.place is not None or self.find is not None or self.record is not None

    def note_push(self, frame: PushFrame | RowPushFrame, body: memoryview) -> None:
        """Tell of a push that was accepted, before its event."""
        if self.is_there:
            self._send(Pushed(encode(frame)), body)

    def note_look(self, frame: RowPullFrame | RowsUsed, ids: memoryview) -> None:
        """Tell of rows that a worker reads or has read, where that decides how long they stay."""
        if self.is_there:
            self._send(Looked(encode(frame)), ids)

    def note(self, written: Written, now: float) -> None:
        """Tell what is about to have an effect."""
        if self.is_there:
            self._send(Happened(now, encode_written(written)))
        if self.lag is not None:
            self.lag.note_told(written, self._num_sent)

    def note_request(self, life: Life, request: Request | WholeTable, body: memoryview, now: float) -> None:
        """Tell of a request that is about to change a table by what is beside it, or runs once."""
        if self.is_there:
            self._send(Happened(now, encode_written(Asked(*life, encode(request)))), body)

    def note_beside(self, content: bytes) -> None:
        """Tell what is kept of the server beside its node from now on."""
        if self.is_there:
            self._send(Noted(content))

    def note_idle(self) -> None:
        """Tell that requests about tables without pushes are about to be looked for."""
        if self.is_there:
            self._send(Idled())

    def check(self) -> None:
        """Have the next answer wait until it is known that this process still serves."""
        if self.is_there:
            self._send(Checked())

    def complete_record(self, entries: Sequence[Entry]) -> None:
        """Have the record go on after the process before, which may not have written the last of its entries there."""
        if self.record is None or self.record.open():
            return
        told = [CODEC.encode(Happened(entry.now, encode_written(entry.written))) for entry in entries]
        known = set(self.record.last_headers(_RECORD_BEHIND + 4 * len(told)))
        for header in told[max((at + 1 for at, header in enumerate(told) if header in known), default=0) :]:
            self.record.append(header)

    def prove(self, digests: Callable[[], dict[str, str]]) -> None:
        """Have the record end with digests of all tables."""
        if self.record is not None:
            self.record.append(CODEC.encode(Proved(digests())))

    def wait_received(self, *, may_lag: bool = False) -> bool:
        """Block until the replica has all that it was told; called before an answer leaves, and returns True.

        `may_lag`: or until it has what must not be behind an answer, where it lags.

        Raises:
            Superseded: the replica serves in the place of this process.
        """
        if self._superseded:
            raise Superseded(self._superseded)
        watch = Stopwatch(2 * LOOK_S)
        line = None if self._connection is None else LineWatch(self._connection)
        while self._connection is not None and not self.has_received(may_lag=may_lag):
            try:
                self._hear(LOOK_S)
            except DeadlineExceeded:
                self.check()
                if self._queue is not None and self._queue.num_waiting:  # which has deadlines of its own
                    watch = Stopwatch(2 * LOOK_S)
                if watch.elapsed_s() > ANSWER_TIMEOUT_S:
                    self._go_on_alone(f"it has not answered for {ANSWER_TIMEOUT_S:g} s")
                elif line is not None and line.is_silent():
                    self._go_on_alone(SILENT)
            except PeerError as error:
                self._go_on_alone(str(error))
        return True

    def has_received(self, *, may_lag: bool) -> bool:
        """Return whether the replica has received what `wait_received` waits for, as far as it has said so."""
        needed = self._num_sent if self.lag is None or not may_lag else self.lag.num_needed
        return self._num_received >= needed or self._connection is None

    def _hear(self, timeout_s: float) -> None:
        """Note what the replica, which is there, has by now; raises as `Connection.receive`."""
        assert self._connection is not None
        answer = ANSWERS.decode(self._connection.receive(timeout_s=timeout_s).header)
        self._num_received = max(self._num_received, min(answer.num_frames, self._num_sent))

    def end(self, reason: str) -> None:
        """Have the replica end, if it has not, instead of serving in the place of this process."""
        self._is_ending = True
        with suppress(Superseded):
            if self._connection is not None:
                self.wait_received()  # first: frames that lie behind one that cannot be answered may be lost
                self._send(Ended(reason))
        self.close()

    def dismiss(self, reason: str) -> None:
        """Go on without a replica, for good; raises Superseded if a replica serves by now. A record goes on."""
        self.find = None
        if self._queue is not None:
            self.wait_received()  # first: the rest of a frame may be on its way
        if self._connection is not None:
            self._send(Ended(reason))
            self._go_on_alone(reason)

    def close(self) -> None:
        """Let go of the connection: a replica that was not told to end takes over."""
        if self.record is not None:
            self.record.close()
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _send(self, message: HeadMessage, body: memoryview = EMPTY) -> None:
        header, connection = CODEC.encode(message), self._connection
        if self.record is not None and not isinstance(message, Attached):
            self.record.append(header, body)
        if connection is None:
            return
        self._num_sent += 1
        if self._queue is not None and not isinstance(message, Ended | Leaving):
            # By number: what is told twice, in the same words, counts twice.
            self._queue.send(header, body, last_of=b"%d" % self._num_sent)
            return
        try:
            timeout_s = ANSWER_TIMEOUT_S + body.nbytes / _LEAST_BYTES_PER_S
            connection.send(header, body, timeout_s=timeout_s)
        except PeerError as error:
            self._go_on_alone(str(error))

    def _go_on_alone(self, reason: str) -> None:
        """Serve without a replica, unless it serves already."""
        is_over, place = self._connection is None, self.place
        self.close()
        if is_over or place is None or self._is_ending:
            return
        try:
            is_head = wait_decided(lambda: place.promotion.dismiss(place.view), place.served, place.tell)
        except OSError as error:
            self._superseded = f"{place.served} has lost its replica, and cannot tell whether that serves: {error}"
            raise Superseded(self._superseded) from error
        if not is_head and self._is_handing_over:
            self._superseded = f"{place.served} is handed over, to its replica on another machine"
            raise HandedOver(self._superseded)
        if not is_head:
            self._superseded = f"the replica of {place.served} serves in its place: {reason}"
            raise Superseded(self._superseded)
        place.tell(f"{place.without}: {reason}")


def _let_go(connection: Connection, queue: SendQueue | None, *, is_over: bool) -> None:
    """Close the connection to a process that is the replica no longer; it ends, if what it could do is over."""
    if is_over:
        with suppress(PeerError):  # it has ended by itself
            connection.send(CODEC.encode(Ended("another process is the replica")), timeout_s=ANSWER_TIMEOUT_S)
    if queue is not None:
        queue.close()
    connection.close()
