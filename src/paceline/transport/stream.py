"""Connections over a stream socket, shared by tcp and shm."""

import os
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, final

from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError, UsageError
from paceline.transport.base import EMPTY, AllocateBody, Frame, Limits
from paceline.transport.buffer_pool import Buffer
from paceline.transport.buffers import LentBody, destination, flat, fresh_buffer
from paceline.transport.channel import Channel, OutOfTime
from paceline.transport.deadline import Deadline, seconds
from paceline.transport.frames import PREFIX_BYTES, Kind, Prefix, decode_prefix, encode_prefix
from paceline.transport.handshake import HandshakeResult
from paceline.transport.payloads import Payloads, Placement

# What is read ahead of a body is copied once more, so it must be little beside bodies for which a copy matters.
_AHEAD_BYTES: Final = 16 * 1024
# A frame brings at most one descriptor; a few may wait while the frame before theirs is still being read.
_MAX_WAITING_DESCRIPTORS: Final = 4
# Python calls handlers of signals, which may raise anything, between two instructions: also behind a system call whose
# result is lost then. What follows in the stream would be taken for the rest of a frame.
_INTERRUPTED: Final = "a signal handler has interrupted it in the middle of a frame"


@final
class ReadAhead:
    """The next bytes of a channel, with room for the largest header that has come. One thread at a time."""

    def __init__(self, channel: Channel, bodies: Payloads) -> None:
        self._channel = channel
        self._memory = memoryview(bytearray(_AHEAD_BYTES))
        self._takes_descriptors = bodies.passes_descriptors
        # Invariant: 0 <= start <= end <= len(memory); the bytes between are not consumed yet.
        self._start = 0
        self._end = 0
        self.descriptors: deque[int] = deque()

    def wait_for(self, num_bytes: int, deadline: Deadline) -> memoryview:
        """Return the next `num_bytes` without consuming them; they stay there until the next call."""
        while self._end - self._start < num_bytes:
            self._read_more(num_bytes, deadline)
        return self._memory[self._start : self._start + num_bytes]

    def has(self, num_bytes: int) -> bool:
        """Return whether so many bytes are here."""
        return self._end - self._start >= num_bytes

    def skip(self, num_bytes: int) -> None:
        """Consume bytes."""
        self._start += num_bytes
        if self._start == self._end:
            self._start = self._end = 0

    def drain_into(self, buffer: memoryview) -> int:
        """Consume bytes into `buffer`, as many as there are and fit; returns how many."""
        num_bytes = min(len(buffer), self._end - self._start)
        buffer[:num_bytes] = self._memory[self._start : self._start + num_bytes]
        self.skip(num_bytes)
        return num_bytes

    def close(self) -> None:
        """Close the descriptors that no frame asked for."""
        while self.descriptors:
            os.close(self.descriptors.popleft())

    def _read_more(self, num_wanted: int, deadline: Deadline) -> None:
        is_short = num_wanted > len(self._memory)
        if self._start or is_short:
            waiting = bytes(self._memory[self._start : self._end])
            if is_short:  # few connections bring such a header, and there may be thousands
                self._memory = memoryview(bytearray(num_wanted))
            self._memory[: len(waiting)] = waiting
            self._start, self._end = 0, len(waiting)
        room = self._memory[self._end : max(num_wanted, _AHEAD_BYTES)]
        if not self._takes_descriptors:
            self._end += self._channel.read_some(room, deadline)
            return
        num_bytes, descriptors = self._channel.read_with_descriptors(room, deadline)
        self._end += num_bytes
        self.descriptors.extend(descriptors)
        if len(self.descriptors) > _MAX_WAITING_DESCRIPTORS:
            raise PeerError("more descriptors came than frames that use them")


_SMALL_BYTES: Final = 16 << 10  # a channel that has room takes so much at once


@dataclass(slots=True)
class _Arrival:
    """A partly received frame: the last `len(body) - num_read` bytes of its body are missing."""

    header: bytes
    body: memoryview
    num_read: int
    buffer: Buffer | None = None


@final
class StreamConnection:
    """A `Connection` over a channel whose handshake is done."""

    def __init__(self, greeted: HandshakeResult, peer: str, limits: Limits, bodies: Payloads) -> None:
        channel = greeted.channel
        self.peer: Final = peer
        self.identity: Final = greeted.identity
        self.peer_identity: Final = greeted.peer_identity
        self._channel = channel
        self._limits = limits
        self._bodies = bodies
        self._ahead = ReadAhead(channel, bodies)
        self._prefix: Prefix | None = None  # of the next frame, once it is here
        self._arrival: _Arrival | None = None
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._closing = threading.Lock()
        # The threads that have one of these locks or wait for it, once for each of their calls. A handler of signals
        # runs within any call of its thread; where it closes the connection, it cannot wait for what it interrupts.
        self._inside: list[int] = []
        self._left_to: int | None = None  # the thread that frees the descriptor when its call is over
        # Freed segments that the peer does not know about yet, as encoded prefixes.
        self._retirements = b""
        # Why the connection is over, once it is. Written once by the first thread that notices, read by all.
        self._ended: str | None = None
        # After a send failed, what the peer had said before may still be read; then `_readable` becomes False.
        self._readable = True
        self._closed = False

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        """Send one frame; see `Connection.send`."""
        frame = header, self._checked(header, body)
        with self._turn_to_send(timeout_s) as deadline:
            self._send_frames([frame], deadline, timeout_s)

    def send_lent(self, header: bytes, body: LentBody, *, timeout_s: float) -> None:
        """Send one frame, whose body travels in the stream; see `SendsLent.send_lent`."""
        whole = self._checked(header, body.memory)
        with self._turn_to_send(timeout_s) as deadline:
            self._write([_prefix_of(header, whole, None) + header], None, deadline, timeout_s, body)

    @contextmanager
    def _turn_to_send(self, timeout_s: float) -> Generator[Deadline]:
        deadline, thread = Deadline.after(timeout_s), self._enter()
        try:
            if not self._sending.acquire(timeout=deadline.remaining_s()):
                raise DeadlineExceeded(
                    f"waited {seconds(timeout_s)} for other threads to finish sending to {self.peer}"
                )
            try:
                self._check_open()
                yield deadline
            except BaseException as error:
                self._note_failed(error)
                raise
            finally:
                self._sending.release()
        finally:
            self._leave(thread)

    def _note_failed(self, error: BaseException) -> None:
        """End the connection after an error in the middle of sending, unless that has said already how it stands."""
        if not isinstance(error, PeerError | UsageError):
            self._end(_INTERRUPTED)

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        """Send frames by one system call; see `Connection.try_send`."""
        checked = [(header, self._checked(header, body)) for header, body in frames]
        for _, body in checked:
            if body.nbytes > _SMALL_BYTES and self._bodies.place(body) is None:
                return False
        thread = self._enter()
        try:
            return self._send_if_free(checked, timeout_s)
        finally:
            self._leave(thread)

    def _send_if_free(self, checked: Sequence[tuple[bytes, memoryview]], timeout_s: float) -> bool:
        """Send frames unless another thread sends, or there is no room."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            self._check_open()
            if not self._channel.has_room():
                return False
            self._send_frames(checked, Deadline.after(timeout_s), timeout_s)
        except DeadlineExceeded:
            self._end(f"frames could be sent only in part within {seconds(timeout_s)}")
            raise
        except BaseException as error:
            self._note_failed(error)
            raise
        finally:
            self._sending.release()
        return True

    def has_room(self, body: memoryview) -> bool:
        """Return whether a frame would leave at once: a small one, or one in shared memory; see `Connection`."""
        is_light = body.nbytes <= _SMALL_BYTES or self._bodies.place(flat(body)) is not None
        return is_light and self._channel.has_room()

    def receive(self, *, timeout_s: float, place: AllocateBody | None = None) -> Frame:
        """Wait for the next frame; see `Connection.receive`."""
        thread = self._enter()
        try:
            with self._receiving:
                return self._receive(timeout_s, place)
        finally:
            self._leave(thread)

    def _receive(self, timeout_s: float, place: AllocateBody | None) -> Frame:
        if not self._readable:
            self._check_open()
        deadline = Deadline.after(timeout_s)
        try:
            return self._read_frame(deadline, place)
        except OutOfTime:
            raise DeadlineExceeded(f"waited {seconds(timeout_s)} for a frame from {self.peer}; none came") from None
        except PeerError as error:
            self._end(str(error))
            self._readable = False
            raise
        except (EOFError, OSError) as error:
            self._readable = False
            raise self._loss(error) from None
        except (UsageError, MemoryError):  # of the place for a body, before any of it was taken
            raise
        except BaseException:
            self._end(_INTERRUPTED)
            self._readable = False
            raise

    def has_frame(self) -> bool:
        """Return whether the next frame was read ahead; see `Connection.has_frame`."""
        if self._arrival is not None or not self._ahead.has(PREFIX_BYTES):
            return False
        try:
            prefix = self._next_prefix(Deadline.after(0.0))
        except PeerError:
            return True  # `receive` raises it
        body_bytes = prefix.body_bytes if prefix.kind is Kind.INLINE else 0
        return self._ahead.has(PREFIX_BYTES + prefix.header_bytes + body_bytes)

    def fileno(self) -> int | None:
        """Return the channel's descriptor; see `Connection.fileno`."""
        return self._channel.fileno()

    def silent_s(self) -> float:
        """Return how long the other machine has been silent; see `MeasuresSilence`."""
        try:
            return self._channel.silent_s()
        except OSError:  # it has just been closed, which `receive` tells
            return 0.0

    def close(self) -> None:
        """End the connection; see `Connection.close`."""
        self._end("it was closed here")
        self._readable = False
        thread = threading.get_ident()
        if thread in self._inside:
            self._left_to = thread
        else:
            self._free()

    def _free(self) -> None:
        """Free the descriptor and what else is held."""
        # The shut channel has woken both directions; once they are out, no thread can touch a reused descriptor.
        thread = self._enter()
        try:
            with self._closing, self._sending, self._receiving:
                if not self._closed:
                    self._closed = True
                    self._channel.close()
                    self._ahead.close()
                    self._bodies.close()
        finally:
            self._leave(thread)

    def _enter(self) -> int:
        """Note that this thread is in a call, and return which thread it is; `_leave` is due then."""
        thread = threading.get_ident()
        self._inside.append(thread)
        return thread

    def _leave(self, thread: int) -> None:
        """Note that a call is over; free the descriptor where that was left to its thread."""
        self._inside.remove(thread)
        if self._left_to == thread and thread not in self._inside:
            self._left_to = None
            self._free()

    def _checked(self, header: bytes, body: memoryview) -> memoryview:
        """Return a body as flat bytes; raises UsageError for a frame over the limits."""
        body = flat(body) if body.nbytes else EMPTY
        limits = self._limits
        if len(header) > limits.max_header_bytes or body.nbytes > limits.max_body_bytes:
            raise UsageError(
                f"a frame with a header of {len(header)} and a body of {body.nbytes} bytes is over the limits of "
                f"{limits.max_header_bytes} and {limits.max_body_bytes}: send it in parts"
            )
        return body

    def _check_open(self) -> None:
        if self._ended is not None:
            raise ConnectionLost(f"the connection to {self.peer} is over: {self._ended}")

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        self._channel.shut()

    def _loss(self, error: EOFError | OSError) -> ConnectionLost:
        """End the connection after an error of its channel."""
        if isinstance(error, EOFError):
            self._end("the other side closed it or died")
        elif isinstance(error, TimeoutError):
            self._end("the other side fell silent")
        else:
            self._end(error.strerror or str(error))
        return ConnectionLost(f"the connection to {self.peer} is over: {self._ended}")

    def _send_frames(self, frames: Sequence[tuple[bytes, memoryview]], deadline: Deadline, timeout_s: float) -> None:
        """Write frames by one system call, and one more for each that brings a descriptor."""
        for segment in self._bodies.take_retired():
            self._retirements += encode_prefix(Prefix(Kind.RETIRED, 0, 0, segment))
        buffers: list[bytes | memoryview] = [self._retirements] if self._retirements else []
        for header, body in frames:
            placement = self._bodies.place(body) if body.nbytes else None
            buffers.append(_prefix_of(header, body, placement) + header)
            if placement is None and body.nbytes:
                buffers.append(body)
            elif placement is not None and placement.descriptor is not None:
                self._write(buffers, placement.descriptor, deadline, timeout_s)
                self._bodies.passed(placement.region)
                buffers = []
        if buffers:
            self._write(buffers, None, deadline, timeout_s)

    def _write(
        self,
        buffers: Sequence[bytes | memoryview],
        descriptor: int | None,
        deadline: Deadline,
        timeout_s: float,
        lent: LentBody | None = None,
    ) -> None:
        try:
            if lent is None:
                self._channel.write(buffers, deadline, descriptor)
            else:
                self._channel.write_lent(buffers, lent, deadline)
            self._retirements = b""
        except OutOfTime as late:
            if late.num_written:
                self._end(f"a frame could be sent only in part within {seconds(timeout_s)}")
            raise DeadlineExceeded(
                f"waited {seconds(timeout_s)} for {self.peer} to take a frame; sent {late.num_written} of "
                f"{sum(map(len, buffers)) + (0 if lent is None else len(lent.memory))} bytes"
            ) from None
        except (EOFError, OSError) as error:
            raise self._loss(error) from None

    def _read_frame(self, deadline: Deadline, place: AllocateBody | None) -> Frame:
        arrival = self._arrival
        while arrival is None:
            arrival = self._arrival = self._start_arrival(deadline, place)
            if arrival is None and not deadline.remaining_s():
                raise OutOfTime  # though more may be here: any number of notices may not delay other connections
        size_bytes = len(arrival.body)
        while arrival.num_read < size_bytes:
            arrival.num_read += self._channel.read_much(arrival.body[arrival.num_read :], deadline)
            if arrival.num_read < size_bytes and not deadline.remaining_s():
                raise OutOfTime  # though more may be here: a body of any size may not delay other connections
        self._arrival = None
        return Frame(arrival.header, arrival.body, arrival.buffer)

    def _start_arrival(self, deadline: Deadline, place: AllocateBody | None) -> _Arrival | None:
        """Read prefix and header and allocate the body; None when the frame only retires a segment."""
        ahead = self._ahead
        prefix = self._prefix or self._next_prefix(deadline)
        start = ahead.wait_for(PREFIX_BYTES + prefix.header_bytes, deadline)
        header = bytes(start[PREFIX_BYTES:])
        if prefix.kind is not Kind.INLINE:
            self._prefix = None
            ahead.skip(len(start))
            body = self._bodies.view(prefix, ahead.descriptors, self.peer)
            return None if prefix.kind is Kind.RETIRED else _Arrival(header, body, len(body))
        body, buffer = self._memory_for(header, prefix.body_bytes, place)
        self._prefix = None
        ahead.skip(len(start))
        return _Arrival(header, body, ahead.drain_into(body) if prefix.body_bytes else 0, buffer)

    def _next_prefix(self, deadline: Deadline) -> Prefix:
        if self._prefix is None:
            self._prefix = decode_prefix(self._ahead.wait_for(PREFIX_BYTES, deadline), self._limits, self.peer)
        return self._prefix

    def _memory_for(
        self, header: bytes, size_bytes: int, place: AllocateBody | None
    ) -> tuple[memoryview, Buffer | None]:
        if not size_bytes:
            return EMPTY, None
        found = destination(place, header, size_bytes)
        return (fresh_buffer(size_bytes), None) if found is None else found


def _prefix_of(header: bytes, body: memoryview, placement: Placement | None) -> bytes:
    if placement is None:
        return encode_prefix(Prefix(Kind.INLINE, len(header), body.nbytes))
    kind = Kind.SHARED if placement.descriptor is None else Kind.SHARED_FIRST
    region = placement.region
    return encode_prefix(Prefix(kind, len(header), body.nbytes, region.number, placement.offset, region.size_bytes))
