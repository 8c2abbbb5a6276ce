"""The send queue of one peer: frames leave in order, and those that would block are sent by a thread.

So a slow peer does not delay the others. Small frames that are sent while a `SendHold` is entered leave together. The
pieces of one push leave in one order (`SendOrder`) over all its connections, which share the line of a host alike:
without it, small parts would take the time in which the large ones are due, and a step ends with its last part.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Final, NamedTuple, final

import msgspec

from paceline.errors import PeerError, UsageError
from paceline.notices import tell
from paceline.transport.base import EMPTY, MAX_TOGETHER, Connection
from paceline.transport.buffers import LentBody, SendsLent

_AHEAD: Final = 1 / 32  # of a part: so far it may be ahead of another, so that both leave at the same time


@final
class SendOrder:
    """Has the parts of a push leave in proportion to their sizes, each in pieces and by a queue of its own.

    A part counts from its first piece on. Thread-safe.

    Example:
        >>> order = SendOrder()
        >>> large, small = (order.piece(server, 0.0, 0.5) for server in (0, 1))
        >>> next_small = order.piece(1, 0.5, 1.0)
        >>> large.may_leave(lambda: None), small.may_leave(lambda: None)
        (True, True)
        >>> small.note_left()
        >>> next_small.may_leave(lambda: print("now"))
        False
        >>> large.note_left()
        now
        >>> next_small.may_leave(lambda: None)
        True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[int, float] = {}  # by part: how much of it has left, from 0 to 1
        self._waiting: dict[int, tuple[float, Callable[[], None]]] = {}  # by part: where its next piece starts

    def piece(self, part: int, start: float, stop: float) -> OrderedPiece:
        """Return the next piece of a part, from one fraction of it to another, the last one to 1."""
        with self._lock:
            self._left.setdefault(part, 0.0)
        return OrderedPiece(self, part, start, stop)

    def may_leave(self, part: int, start: float, wake: Callable[[], None]) -> bool:
        """See `OrderedPiece.may_leave`."""
        with self._lock:
            if start > min(self._left.values()) + _AHEAD:
                self._waiting[part] = start, wake
                return False
            self._waiting.pop(part, None)
            return True

    def note_left(self, part: int, stop: float) -> None:
        """See `OrderedPiece.note_left`."""
        with self._lock:
            self._left[part] = stop
            least = min(self._left.values()) + _AHEAD
            due = [wake for start, wake in self._waiting.values() if start <= least]
        for wake in due:
            wake()


class OrderedPiece(msgspec.Struct, frozen=True):
    """A piece of a part; see `SendOrder.piece`."""

    order: SendOrder
    part: int
    start: float
    stop: float

    def may_leave(self, wake: Callable[[], None]) -> bool:
        """Return whether it is this piece's turn; if not, `wake` is called when it is, without a lock, maybe twice."""
        return self.order.may_leave(self.part, self.start, wake)

    def note_left(self) -> None:
        """Note that the piece has left, or will not, as its connection has ended: others wait for it no longer."""
        self.order.note_left(self.part, self.stop)


_TIMEOUT_S = 60.0  # for a small frame
_LEAST_BYTES_PER_S = 1e6  # a peer that receives large frames more slowly than this is disconnected
_MOST_WAITING_BYTES = 256 << 20  # for one peer; it has to request again what exceeds this
_MOST_FRAMES = 1 << 14  # waiting for one peer: more than it can have requested without reading some
_MOST_HELD_BYTES = 16 << 10  # headers and bodies; more leaves before the hold ends
_MOST_OWED = 2  # waiting frames of one subject: the one that is being sent, and the one after it
_JOIN_TIMEOUT_S = 5.0


class _Frame(NamedTuple):
    """A frame to send; the fields are the arguments of `SendQueue.send`. A tuple, as these are made faster.

    `name`: the header that a repetition has.
    """

    header: bytes
    body: memoryview
    urgent: bool
    owed: str
    lent: LentBody | None
    on_sent: Callable[[], None] | None
    name: bytes
    piece: OrderedPiece | None

    @property
    def bytes(self) -> memoryview:
        """The body, wherever it is by now."""
        return self.body if self.lent is None else self.lent.memory


@final
class SendHold:
    """Has queues hold small frames while it is entered, so that the frames to each peer leave together at its end.

    It may be entered again inside. A thread that waits inside suspends it meanwhile: what it waits for may need frames
    of other threads. Not thread-safe: enter, leave, suspend and send under one lock.

    Example:
        >>> hold = SendHold()
        >>> with hold:
        ...     hold.is_entered
        True
    """

    def __init__(self) -> None:
        self.is_entered = False  # frames are held
        self._depth = 0
        self._queues: list[SendQueue] = []  # those that hold frames

    def __enter__(self) -> None:
        """Hold frames from now on."""
        self._depth += 1
        self.is_entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Send the frames that are held, whatever has happened."""
        self._depth -= 1
        if not self._depth:
            self.is_entered = False
            if self._queues:
                self.release()

    def add(self, queue: SendQueue) -> None:
        """Note that a queue holds frames."""
        self._queues.append(queue)

    @contextmanager
    def suspended(self) -> Generator[None]:
        """Send the frames that are held so far, and hold none inside this block."""
        depth = self.suspend()
        try:
            yield
        finally:
            self.resume(depth)

    def suspend(self) -> int:
        """Send the frames that are held so far, and hold none until `resume` is called with what this returns."""
        depth, self._depth, self.is_entered = self._depth, 0, False
        if self._queues:
            self.release()
        return depth

    def resume(self, depth: int) -> None:
        """Hold frames again, if they were held."""
        self._depth += depth
        self.is_entered = self._depth > 0

    def release(self) -> None:
        """Send the frames that are held so far."""
        while self._queues:
            self._queues.pop(0).release()


@dataclass(slots=True)
class SendQueue:
    """Sends frames over one connection. Only one thread may call `send` at a time, unless the queue was opened.

    A frame that would block is left to a thread, as are all later ones until it has left. The thread starts when it is
    first needed, or by `open`: then it sends all frames.

    Args:
        connection: to the peer; the queue closes it.
        on_broken: called when the connection is found to be over, on any thread; frames still in the queue are lost.
        bounded: disconnect a peer with too many waiting frames, and drop frames whose bodies need too much memory.
        copies: keep a copy of a body that waits, for callers that change it; without, a body must not change.
        hold: while it is entered, small frames are held, until it ends or they are many.
    """

    connection: Connection
    on_broken: Callable[[], None]
    bounded: bool = False
    copies: bool = False
    hold: SendHold | None = None
    # Invariant: the frame being sent stays the first of its queue until it has left.
    _urgent: deque[_Frame] = field(default_factory=deque[_Frame])
    _waiting: deque[_Frame] = field(default_factory=deque[_Frame])
    # Of all waiting frames, so that one costs the same however many wait: headers, bytes of bodies, number by `owed`.
    _names: set[bytes] = field(default_factory=set[bytes])
    _num_waiting_bytes: int = 0
    _num_owed: Counter[str] = field(default_factory=Counter[str])
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _thread: threading.Thread | None = None
    _is_open: bool = False
    _held: list[_Frame] = field(default_factory=list[_Frame])
    _num_held_bytes: int = 0
    _closed: bool = False

    def open(self) -> None:
        """Start the thread, and have it send every frame: for callers that go on computing, on any thread.

        Raises:
            PeerError: the system refuses another thread.
        """
        try:
            self._start()
        except RuntimeError:
            raise PeerError("the system refuses a thread to answer it") from None
        self._is_open = True

    def send(
        self,
        header: bytes,
        body: memoryview = EMPTY,
        *,
        urgent: bool = False,
        owed: str = "",
        lent: LentBody | None = None,
        on_sent: Callable[[], None] | None = None,
        last_of: bytes = b"",
        piece: OrderedPiece | None = None,
    ) -> None:
        """Send one frame, or leave it to the thread; does not wait for the peer.

        An urgent frame passes all waiting ones that are not urgent. A repetition of a waiting frame is dropped, and so
        is the frame with the header `last_of`, of which this is the last piece. A queue that copies bodies
        does not copy `lent` ones, whose owner says when they change; then `body` is their memory. `on_sent` is called,
        on the thread that sends, once the transport has taken the frame, or when it is dropped; not when the connection
        has ended.
        The frame of a `piece` waits for its turn, and those behind it with it.

        A bounded queue drops a frame with a body while too many bytes wait: the peer requests it again. Frames that a
        peer never requests are not dropped; `owed` names their subject. A peer with more waiting frames than it can
        have requested, or more than 2 of one `owed` subject, is disconnected.
        """
        frame = _Frame(header, body, urgent, owed, lent, on_sent, last_of or header, piece)
        if self._closed:
            _end(frame)
        elif self.hold is not None and self.hold.is_entered:
            self._hold(frame, self.hold)
        elif not self._has_sent([frame]):
            self._queue(frame)

    def release(self) -> None:
        """Send the frames that are held, together if none has to wait."""
        held, self._held, self._num_held_bytes = self._held, [], 0
        if self._closed:
            for frame in held:
                _end(frame)
        elif held and not self._has_sent(held):
            for frame in held:
                if self._closed or len(held) == 1 or not self._has_sent([frame]):
                    self._queue(frame)

    @property
    def is_over(self) -> bool:
        """Whether the connection has ended: nothing is sent any more."""
        return self._closed

    @property
    def num_waiting(self) -> int:
        """Number of frames that have not left, the one that is being sent included."""
        return len(self._urgent) + len(self._waiting)

    def close(self) -> None:
        """End the connection, and the thread if there is one; waiting frames are lost. May be repeated."""
        self._drop_all()
        self.connection.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_TIMEOUT_S)

    def _hold(self, frame: _Frame, hold: SendHold) -> None:
        is_first = not self._held
        self._num_held_bytes += len(frame.header) + frame.body.nbytes
        if self._num_held_bytes > _MOST_HELD_BYTES or len(self._held) + 1 == MAX_TOGETHER:
            self._held.append(frame)
            self.release()
            return
        self._held.append(self._kept(frame) if self.copies and frame.body.nbytes else frame)
        if is_first:
            hold.add(self)

    def _queue(self, frame: _Frame) -> None:
        """Leave a frame to the thread, or drop it."""
        problem = ""
        with self._changed:
            may_wait = not self.bounded or not frame.body.nbytes or bool(frame.owed) or self._has_room()
            is_over = self._closed
            is_dropped = not may_wait or frame.header in self._names
            if not is_over and not is_dropped:
                problem = self._put(self._kept(frame), self._urgent if frame.urgent else self._waiting)
            is_flooded = self.bounded and self._is_flooded(frame.owed)
        if problem:
            tell(f"{self.connection.peer} loses its connection, as what it waits for needs a thread: {problem}")
        if is_flooded or problem:
            self._give_up()
        if is_over or (is_flooded and is_dropped):
            _end(frame)
        elif is_dropped:
            _note_sent(frame)

    def _has_sent(self, frames: list[_Frame]) -> bool:
        """Send frames if none waits and none of these would; return whether they need no further care."""
        if self._is_open or self._urgent or self._waiting:  # without the lock: only the calling thread adds to them
            return False
        try:
            if not self.connection.try_send([(frame.header, frame.bytes) for frame in frames], timeout_s=_TIMEOUT_S):
                return False
        except (PeerError, UsageError):  # see `_send`
            self._give_up()
            for frame in frames:
                _end(frame)
            return True
        for frame in frames:
            _note_sent(frame)
        return True

    def _is_flooded(self, owed: str) -> bool:
        return len(self._names) > _MOST_FRAMES or (bool(owed) and self._num_owed[owed] > _MOST_OWED)

    def _kept(self, frame: _Frame) -> _Frame:
        """Return the frame with a body that does not change while it waits."""
        if not self.copies or not frame.body.nbytes:
            return frame
        if frame.lent is not None and isinstance(self.connection, SendsLent):
            return frame
        body = memoryview(bytes(frame.bytes))
        if frame.lent is not None:
            frame.lent.note_left()
        return frame._replace(body=body, lent=None)

    def _put(self, frame: _Frame, queue: deque[_Frame]) -> str:
        """Leave a frame to the thread; return why a bounded queue has none, and "" if it has."""
        queue.append(frame)
        self._names.add(frame.name)
        self._num_waiting_bytes += frame.body.nbytes
        if frame.owed:
            self._num_owed[frame.owed] += 1
        self._changed.notify_all()
        try:
            if self._thread is None:
                self._start()
        except RuntimeError as error:  # the system has none left: one peer must not end a process that serves others
            if not self.bounded:
                raise
            return str(error)
        return ""

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=f"paceline-post-{self.connection.peer}", daemon=True)
        thread.start()
        self._thread = thread

    def _has_room(self) -> bool:
        return self._num_waiting_bytes < _MOST_WAITING_BYTES

    def _remove_first(self, queue: deque[_Frame]) -> None:
        """Remove the first frame of a queue, which has left."""
        frame = queue.popleft()
        self._names.discard(frame.name)
        self._num_waiting_bytes -= frame.body.nbytes
        if frame.owed:
            self._num_owed[frame.owed] -= 1
            if not self._num_owed[frame.owed]:
                del self._num_owed[frame.owed]

    def _work(self) -> None:
        """Send the waiting frames until closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent or self._is_due() or self._closed)
                if self._closed:
                    return
                queue = self._urgent or self._waiting
                frame = queue[0]
            self._send(frame)
            with self._changed:
                is_over = self._closed
                if not is_over:
                    self._remove_first(queue)
                self._changed.notify_all()
            if not is_over:
                _note_sent(frame)
            del frame  # frees its memory while the thread waits for the next one

    def _is_due(self) -> bool:
        """Return whether the first of the frames that wait may leave; if not, the thread is woken when it may."""
        if not self._waiting:
            return False
        piece = self._waiting[0].piece
        return piece is None or piece.may_leave(self._wake)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _send(self, frame: _Frame) -> None:
        timeout_s = _TIMEOUT_S + frame.body.nbytes / _LEAST_BYTES_PER_S
        try:
            if frame.lent is not None and isinstance(self.connection, SendsLent):
                self.connection.send_lent(frame.header, frame.lent, timeout_s=timeout_s)
            else:
                self.connection.send(frame.header, frame.bytes, timeout_s=timeout_s)
        except (PeerError, UsageError):  # the peer is gone, or its request makes a frame over the limits
            self._give_up()

    def _drop_all(self) -> None:
        with self._changed:
            self._closed = True
            dropped = [*self._waiting, *self._urgent, *self._held]
            self._urgent.clear()
            self._waiting.clear()
            self._names.clear()
            self._num_owed.clear()
            self._num_waiting_bytes = 0
            self._held = []
            self._changed.notify_all()
        for frame in dropped:
            _end(frame)

    def _give_up(self) -> None:
        self._drop_all()
        self.on_broken()


def _note_sent(frame: _Frame) -> None:
    """Let the sender of a frame know that it has left, or is not needed."""
    if frame.on_sent is not None:
        frame.on_sent()
    _end(frame)


def _end(frame: _Frame) -> None:
    """Note that a frame has left, or will not; called once for each."""
    if frame.piece is not None:
        frame.piece.note_left()
    if frame.lent is not None:
        frame.lent.note_left()
