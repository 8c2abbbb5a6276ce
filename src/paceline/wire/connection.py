"""Connections of a worker that are made again whenever they break: to a server, or to a process that may move.

Frames of a server are read by a thread that waits for an answer, or by the connection's own thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, final

from msgspec.structs import replace

from paceline.errors import AuthenticationFailed, DeadlineExceeded, PeerError, UsageError
from paceline.stopwatch import Stopwatch
from paceline.transport.base import EMPTY, MAX_TOGETHER, AllocateBody, Connection, Frame, NotServed, Transport
from paceline.transport.buffer_pool import Buffer
from paceline.transport.deadline import seconds
from paceline.transport.poller import Poller, receive_all
from paceline.wire.malformed import describe_error
from paceline.wire.messages import Hello, check_server, encode, is_joined, is_said_again
from paceline.wire.send_queue import OrderedPiece, SendHold, SendQueue

ASIDE_S = 0.02  # after a wait, the next one mostly follows as soon, and nothing else is worth a wake-up


class ReadByTurns(Protocol):
    """A connection that another thread may read in the place of its own."""

    def take_reading(self) -> Connection | None:
        """Keep the connection's own thread from reading until `end_reading`; None if it reads, or has to."""
        ...

    def read_ready(self) -> None:
        """Receive and handle the frames that have arrived; does not block. Between `take_reading` and `end_reading`."""
        ...

    def end_reading(self) -> None:
        """Let other threads read."""
        ...


@final
@dataclass(slots=True)
class ReadTurns:
    """Lets threads that wait for answers read the connections, so that no thread has to wake them.

    The connections' own threads stand aside meanwhile and for 20 ms after. So what comes while no thread waits is read
    that much later, and turns are enabled only where other workers do not wait for it.

    Args:
        notify: wakes waiting threads, so that one of them takes the turn.
    """

    notify: Callable[[], None]
    is_enabled: bool = False
    num_waiting: int = 0  # threads
    num_turns: int = 0
    _connections: list[ReadByTurns] = field(default_factory=list[ReadByTurns])
    _taken: list[tuple[Connection, ReadByTurns]] = field(default_factory=list[tuple[Connection, ReadByTurns]])
    is_polling: bool = False
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _poller: Poller = field(default_factory=Poller)

    def add(self, connection: ReadByTurns) -> None:
        """Add a connection."""
        self._connections.append(connection)

    @property
    def is_taken(self) -> bool:
        """Whether a thread that waits reads."""
        return bool(self._taken)

    def take(self) -> bool:
        """Take the turn to read; False if the connections' own threads read, or another thread that waits.

        `take`, `end` and `wake` are called under the lock of the worker, `read` between `take` and `end` without it.
        """
        if not self.is_enabled or not self._turn.acquire(blocking=False):
            return False
        self._taken = [(taken, each) for each in self._connections if (taken := each.take_reading()) is not None]
        if not self._taken:
            self._turn.release()
            return False
        self.num_turns += 1
        self.is_polling = True
        return True

    def read(self, timeout_s: float, asleep: AbstractContextManager[None]) -> None:
        """Wait until something has arrived, and handle it. `asleep`: see `Poller.wait`."""
        ready = self._poller.wait([connection for connection, _ in self._taken], timeout_s, asleep)
        self.is_polling = False
        for connection, each in self._taken:
            if connection in ready:
                each.read_ready()

    def end(self) -> None:
        """Let other threads read."""
        for _, each in self._taken:
            each.end_reading()
        self._taken, self.is_polling = [], False
        self._turn.release()

    def wake(self) -> None:
        """End the `read` that waits, if any: what its thread waits for may have come by another way."""
        if self.is_polling:
            self._poller.wake()

    def close(self) -> None:
        """Free what is used to wait, once no thread reads."""
        self.is_enabled = False
        with self._turn:
            self._poller.close()


_POLL_S = 0.5
_ATTEMPT_S = 2.0  # a handshake under TLS takes four round trips, and a host may have several addresses
_FIRST_PAUSE_S = 0.02  # after an attempt that has failed, or a connection that broke before it was of use
_HASTE_S = 1.0  # so long, pauses stay as the first: a server that was killed has a successor by then
_LONGEST_PAUSE_S = 1.0
_START_S = 60.0  # while its socket takes connections, another process may be about to serve, and import torch first
_JOIN_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 5.0
NUM_FRUITLESS: Final = 3
# On a path that passes small packets and drops large ones, the kernel gives a connection up after 10 to 25 s.
SOON_S: Final = 30.0
SMALL_BYTES: Final = 500  # frames of this size pass on every path
_MOST_SAID: Final = 1 << 13
LARGE_BYTES: Final = 256 << 10  # of a body that the transport copies
SMALL_IN_A_ROW: Final = 64  # frames: about as many as come in twenty steps of a small model


@dataclass(slots=True)
class LargeBodies:
    """Whether a connection brings large bodies, which its own thread receives beside other connections.

    It does from the first one, until a number of frames in a row have none: one table that is loaded or read whole
    does not make every later step wake a thread.
    """

    num_left: int = 0  # small frames until large bodies are expected no more

    def note_body(self, size_bytes: int) -> None:
        """Note a body that is about to be received."""
        if size_bytes > LARGE_BYTES:
            self.num_left = SMALL_IN_A_ROW

    def note_frames(self, num: int) -> None:
        """Note frames that have been received together.

        After as many as can be, more may be read ahead, which waiting for the connection would not find.
        """
        if num < MAX_TOGETHER:
            self.num_left = max(0, self.num_left - num)


@dataclass(slots=True)
class Progress:
    """The results of the last connections to one server, to find one that breaks each time before an answer.

    A connection is fruitless if it breaks within 30 s without an answer, apart from that to the join and from those
    that came over an earlier one, too: small pushes that wait for their clock are repeated, and pass ahead of a large
    one that does not. A connection that lives longer shows that the path works: its worker may only have waited for
    other workers.

    Args:
        patience_s: how long to continue with fruitless connections.
    """

    patience_s: float
    now: Callable[[], float] = time.monotonic
    _made_s: float = 0.0
    is_answered: bool = False  # the connection has brought an answer
    _largest_bytes: int = 0  # of the frames sent since the last answer
    _said: set[bytes] = field(default_factory=set[bytes])  # answers that may be repeated, since the last other one
    _num_fruitless: int = 0  # in a row
    _fruitless_since_s: float = 0.0

    def note_connected(self) -> None:
        """Note that the connection is made, its handshake done."""
        self._made_s, self.is_answered, self._largest_bytes = self.now(), False, 0

    def note_sent(self, size_bytes: int) -> None:
        """Note a frame on its way over the connection."""
        if size_bytes > self._largest_bytes:
            self._largest_bytes = size_bytes

    def note_arrived(self, header: bytes) -> None:
        """Note a frame that has come over the connection."""
        if is_joined(header) or header in self._said:
            return
        if not is_said_again(header) or len(self._said) >= _MOST_SAID:
            self._said.clear()
        if is_said_again(header):
            self._said.add(header)
        self.is_answered, self._largest_bytes, self._num_fruitless = True, 0, 0

    def note_broken(self) -> None:
        """Note that the connection has broken."""
        if self.is_answered or self.now() - self._made_s > SOON_S:
            self._num_fruitless = 0
            return
        if not self._num_fruitless:
            self._fruitless_since_s = self._made_s
        self._num_fruitless += 1

    @property
    def was_fruitless(self) -> bool:
        """Whether the last connection broke before an answer."""
        return self._num_fruitless > 0

    def objection(self) -> str:
        """Return why not to reconnect, or an empty text."""
        is_over = self.now() - self._fruitless_since_s >= self.patience_s
        if self._num_fruitless < NUM_FRUITLESS or not is_over:
            return ""
        told = f"was accepted {self._num_fruitless} times, and broke each time before"
        if self._largest_bytes > SMALL_BYTES:
            return f"{told} a frame of {self._largest_bytes:,} bytes was answered"
        return f"{told} anything was answered"


@dataclass(slots=True)
class ReconnectingConnection:
    """Sends frames to one server, and receives its frames: on a thread of its own, the reader thread, or in turn.

    Args:
        server: the rank of the server; its certificate, if it has one, must name it.
        address: where the server listens.
        hello: the introduction of this process; the number of the connection is filled in here.
        transport: makes the connections.
        patience_s: how long to try to reconnect.
        on_frames: called with the frames that have arrived together, on the reader thread.
        place: returns where to put bodies that the transport copies; called on the reader thread.
        on_reconnected: called on the reader thread after a reconnect, with a function that makes `send` use the new
            connection. It must call that function, and repeat all unanswered messages before other threads may send,
            so that these do not overtake them.
        on_lost: called with the reason once the server is given up.
        how_ended: returns how the server has ended, or an empty text; a server that has ended is not tried again.
        where: returns where the server listens now, as another process may serve elsewhere; "" for the same address.
        hold: gathers the small frames that are sent while it is entered.
        turns: lets threads that wait for answers call `on_frames` and `place` in the place of the reader thread.
    """

    server: int
    address: str
    hello: Hello
    transport: Transport
    patience_s: float
    on_frames: Callable[[list[Frame]], None]
    place: AllocateBody
    on_reconnected: Callable[[Callable[[], None]], None]
    on_lost: Callable[[str], None]
    how_ended: Callable[[], str]
    where: Callable[[], str] = lambda: ""
    hold: SendHold | None = None
    turns: ReadTurns = field(default_factory=lambda: ReadTurns(lambda: None))
    _post: SendQueue = field(init=False)
    _progress: Progress = field(init=False)
    _closing: threading.Event = field(default_factory=threading.Event)
    _reader: threading.Thread = field(init=False)
    _reading: threading.Lock = field(default_factory=threading.Lock)  # held until the frames are handled, in order
    _called: threading.Event = field(default_factory=threading.Event)  # the reader thread has to read
    _problem: BaseException | None = None  # with which another thread has stopped to read
    _large: LargeBodies = field(default_factory=LargeBodies)  # while they come, the reader thread reads
    _num_turns_seen: int = 0

    def open(self, timeout_s: float) -> None:
        """Connect and start the reader thread. Blocks until connected; raises as `Transport.connect` does.

        A server that is not there is tried again, as another process may be about to take its place.
        """
        self._progress = Progress(self.patience_s)
        self._post = self._connect_first(timeout_s)
        self.turns.add(self)
        self._reader = threading.Thread(target=self._read, name=f"paceline-link-{self.address}", daemon=True)
        self._reader.start()

    def send(
        self,
        header: bytes,
        body: memoryview = EMPTY,
        *,
        urgent: bool = False,
        last_of: bytes = b"",
        piece: OrderedPiece | None = None,
    ) -> None:
        """Send one frame without waiting for the server; see `SendQueue`.

        On a broken connection the frame is lost; the protocol repeats it after a reconnect. The body must not change
        until the frame is answered.
        """
        if not self._progress.is_answered:
            self._progress.note_sent(len(header) + body.nbytes)
        self._post.send(header, body, urgent=urgent, last_of=last_of, piece=piece)

    def follow(self) -> None:
        """Give the connection up if the server listens elsewhere by now: where it was, it may be silent for long."""
        address = self.where()
        if address and address != self.address:
            self._on_broken(self._post.connection)

    def close(self) -> None:
        """End the connection and its thread."""
        self._closing.set()
        self._called.set()
        self._post.close()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=_JOIN_TIMEOUT_S)

    # -- reading by threads that wait --------------------------------------------------------------------------------

    def take_reading(self) -> Connection | None:
        """Keep the reader thread from reading; see `ReadByTurns.take_reading`."""
        if not self._reading.acquire(blocking=False):
            return None
        if self._may_stand_aside():
            return self._post.connection
        self._reading.release()
        return None

    def read_ready(self) -> None:
        """Handle what has arrived; what goes wrong is left to the reader thread."""
        try:
            self._receive(0.0)
        except DeadlineExceeded:
            pass
        except BaseException as error:
            self._problem = error
            if not isinstance(error, Exception):
                raise
        if self._large.num_left or self._problem is not None:  # a connection that is closed says so itself
            self._called.set()

    def end_reading(self) -> None:
        """Let other threads read."""
        self._reading.release()

    def _may_stand_aside(self) -> bool:
        is_able = self._problem is None and not self._large.num_left and not self._closing.is_set()
        return is_able and self._post.connection.fileno() is not None

    def _stand_aside(self) -> None:
        """Return when the reader thread has to read: a while after the last thread that waits has done so."""
        turns = self.turns
        while turns.is_enabled and (turns.is_taken or turns.num_turns != self._num_turns_seen):
            if not self._may_stand_aside():
                return
            self._num_turns_seen = turns.num_turns
            self._called.wait(ASIDE_S)

    def _offer_turn(self) -> None:
        """Stand aside for a while if threads wait, and wake one to read."""
        turns = self.turns
        if turns.is_enabled and turns.num_waiting and self._may_stand_aside():
            self._num_turns_seen = -1
            turns.notify()

    # -- the reader thread -------------------------------------------------------------------------------------------

    def _connect_first(self, timeout_s: float) -> SendQueue:
        watch, pause_s = Stopwatch(_LONGEST_PAUSE_S + _POLL_S), _FIRST_PAUSE_S
        while True:
            try:
                return self._connect(timeout_s)
            except (AuthenticationFailed, DeadlineExceeded):
                raise
            except PeerError:
                if watch.elapsed_s() >= self.patience_s or self.how_ended() or self._closing.wait(pause_s):
                    raise
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def _connect(self, timeout_s: float) -> SendQueue:
        self.address = self.where() or self.address
        connection = self.transport.connect(self.address, encode(self.hello), timeout_s=timeout_s)
        check_server(connection, self.server)
        self._progress.note_connected()
        self.hello = replace(self.hello, connection=self.hello.connection + 1)
        return SendQueue(connection, partial(self._on_broken, connection), hold=self.hold)

    def _on_broken(self, connection: Connection) -> None:
        connection.close()
        self._called.set()

    def _read(self) -> None:
        """Read frames until closed or lost; call `on_lost` unless closed, even after an unexpected error."""
        problem = "is over: its reader thread failed; the traceback is on stderr"
        try:
            problem = self._read_on()
        finally:
            self._post.close()
            if not self._closing.is_set():
                self.on_lost(f"server {self.server} is lost: the connection to {self.address} {problem}")

    def _read_on(self) -> str:
        """Read frames until closed or lost; return the reason for the loss."""
        problem = ""
        while not self._closing.is_set() and not problem:
            self._stand_aside()
            with self._reading:
                problem = self._read_or_reconnect()
            self._offer_turn()
        return problem

    def _read_or_reconnect(self) -> str:
        """Wait for frames and handle them; return why the server is given up, "" while it is not."""
        try:
            if self._problem is not None and not isinstance(self._problem, Exception):
                return "is over: a signal handler has interrupted the thread that handled its frames"
            if self._problem is not None:
                raise self._problem
            self._receive(_POLL_S)
        except DeadlineExceeded:
            pass
        except PeerError as error:
            self._progress.note_broken()
            made = self._reconnect(str(error))
            if isinstance(made, str):
                return made
            self._problem = None
            self._called.clear()
            self.on_reconnected(partial(self._use, made))
        return ""

    def _receive(self, timeout_s: float) -> None:
        frames = receive_all(self._post.connection, timeout_s=timeout_s, place=self._place)
        if not self._progress.is_answered:
            for frame in frames:
                self._progress.note_arrived(frame.header)
        if self._large.num_left:
            self._large.note_frames(len(frames))
            if not self._large.num_left:
                self._called.clear()  # whatever else it was set for is found out within `ASIDE_S`
        self.on_frames(frames)

    def _place(self, header: bytes, size_bytes: int) -> Buffer | memoryview | None:
        self._large.note_body(size_bytes)
        return self.place(header, size_bytes)

    def _use(self, post: SendQueue) -> None:
        self._post = post
        if self._closing.is_set():  # `close` has closed only the queue before this one
            post.close()

    def _reconnect(self, problem: str) -> SendQueue | str:
        """Try until connected or out of patience; return the new send queue, or the reason for giving up."""
        self._post.close()
        objection = self._progress.objection()
        if objection:
            advice = "check the MTU of the path, and look at what the server wrote"
            return f"{objection}; {advice} (it broke as follows: {problem})"
        watch, pause_s = Stopwatch(_LONGEST_PAUSE_S + _POLL_S), _FIRST_PAUSE_S * self._progress.was_fruitless
        patience_s = self.patience_s
        while watch.elapsed_s() < patience_s and not self._closing.wait(pause_s):
            pause_s = max(_FIRST_PAUSE_S, pause_s)
            if watch.elapsed_s() >= _HASTE_S:
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            how = self.how_ended()
            if how:
                return f"is over: the server {how}"
            try:
                return self._connect(max(_POLL_S, min(_ATTEMPT_S, patience_s - watch.elapsed_s())))
            except AuthenticationFailed as error:
                return f"was refused when it was made again: {error}"
            except NotServed as error:
                problem, patience_s = str(error), max(_START_S, self.patience_s)
            except PeerError as error:
                problem, patience_s = str(error), self.patience_s
        return f"did not come back within {seconds(patience_s)} ({problem})"


@dataclass(slots=True)
class PersistentConnection:
    """Receives frames from a process that may be started again elsewhere, and reconnects until closed.

    Args:
        role: of that process, "data" for a data server; its certificate, if it has one, must name it.
        rank: of that process.
        address: returns the address, before each attempt: a restarted server has a new one.
        greeting: header and body of the first frame on each connection.
        on_frame: called with each frame; ends the connection by raising a PeerError.
        on_lost: called with the reason when a connection has ended or failed, before the next attempt.
    """

    role: str
    rank: int
    address: Callable[[], str]
    hello: Hello
    transport: Transport
    greeting: tuple[bytes, memoryview]
    on_frame: Callable[[Frame], None]
    on_lost: Callable[[str], None]
    _post: SendQueue | None = None
    _has_heard: bool = False  # whether the current or the previous connection has received a frame
    _closing: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def open(self) -> None:
        """Start the thread; does not wait for the connection."""
        self._thread = threading.Thread(target=self._run, name=f"paceline-{self.role}-{self.rank}", daemon=True)
        self._thread.start()

    def send(self, header: bytes, body: memoryview = EMPTY) -> None:
        """Send one frame, without waiting for the other end; a broken connection loses it."""
        if self._post is not None:
            self._post.send(header, body)

    def close(self) -> None:
        """End the connection and the thread."""
        self._closing.set()
        if self._post is not None:
            self._post.close()
        self._thread.join(2 * _CONNECT_TIMEOUT_S)

    def _run(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._closing.is_set():
            self._has_heard = False
            self.on_lost(self._be_connected())
            pause_s = _FIRST_PAUSE_S if self._has_heard else min(_LONGEST_PAUSE_S, 2 * pause_s)
            self._closing.wait(pause_s)

    def _be_connected(self) -> str:
        """Connect, and pass on frames until the connection ends; return the reason."""
        try:
            post = self._connect()
            try:
                return self._read_on(post.connection)
            finally:
                post.close()
        except (PeerError, UsageError) as error:
            return str(error)
        except (OSError, MemoryError, RuntimeError) as error:  # too many open files, or no room for a batch
            return describe_error(error)

    def _connect(self) -> SendQueue:
        address = self.address()
        connection = self.transport.connect(address, encode(self.hello), timeout_s=_CONNECT_TIMEOUT_S)
        check_server(connection, self.rank, self.role)
        self.hello = replace(self.hello, connection=self.hello.connection + 1)
        post = self._post = SendQueue(connection, on_broken=connection.close)
        if self._closing.is_set():  # `close` may have come before the connection was stored
            post.close()
        post.send(*self.greeting)
        return post

    def _read_on(self, connection: Connection) -> str:
        while not self._closing.is_set():
            try:
                self.on_frame(connection.receive(timeout_s=_POLL_S))
                self._has_heard = True
            except DeadlineExceeded:
                continue
            except PeerError as error:
                return str(error)
        return "it was closed here"
