"""A connection over a stream socket: what tcp and shm have in common."""

import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar, final

from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError, UsageError
from paceline.transport.base import EMPTY, Frame, Limits, Place
from paceline.transport.bodies import Bodies, Placement
from paceline.transport.buffers import destination, flat, fresh_buffer
from paceline.transport.channel import Channel
from paceline.transport.deadline import Deadline
from paceline.transport.frames import PREFIX_BYTES, Kind, Prefix, decode_prefix, encode_prefix

T = TypeVar("T")

# A frame brings at most one descriptor; a few may wait while the frame before theirs is still being read.
_MAX_WAITING_DESCRIPTORS: Final = 4
_MIN_INBOX_BYTES: Final = 16 * 1024


@dataclass(slots=True)
class _Arrival:
    """A frame under way: everything but the last `len(body) - num_read` bytes of its body has come."""

    header: bytes
    body: memoryview
    num_read: int


@final
class _Inbox:
    """Bytes read ahead of what is wanted, so that small frames cost one read, or less. Room for one whole header."""

    def __init__(self, channel: Channel, limits: Limits, bodies: Bodies) -> None:
        self._channel = channel
        self._memory = memoryview(bytearray(max(_MIN_INBOX_BYTES, PREFIX_BYTES + limits.max_header_bytes)))
        self._takes_descriptors = bodies.passes_descriptors
        # Invariant: 0 <= start <= end <= len(memory); the bytes between are not consumed yet.
        self._start = 0
        self._end = 0
        self.descriptors: deque[int] = deque()

    def wait_for(self, num_bytes: int, deadline: Deadline) -> bytes:
        """Return the next `num_bytes` without consuming them."""
        while self._end - self._start < num_bytes:
            self._read_more(deadline)
        return bytes(self._memory[self._start : self._start + num_bytes])

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

    def _read_more(self, deadline: Deadline) -> None:
        if self._start:
            waiting = bytes(self._memory[self._start : self._end])
            self._memory[: len(waiting)] = waiting
            self._start, self._end = 0, len(waiting)
        room = self._memory[self._end :]
        if not self._takes_descriptors:
            self._end += self._channel.read_some(room, deadline)
            return
        num_bytes, descriptors = self._channel.read_with_descriptors(room, deadline)
        self._end += num_bytes
        self.descriptors.extend(descriptors)
        if len(self.descriptors) > _MAX_WAITING_DESCRIPTORS:
            raise PeerError("more descriptors came than frames that use them")


@final
class StreamConnection:
    """A `Connection` over a channel whose handshake is done."""

    def __init__(self, channel: Channel, peer: str, identity: bytes, limits: Limits, bodies: Bodies) -> None:
        self.peer: Final = peer
        self.identity: Final = identity
        self._channel = channel
        self._limits = limits
        self._bodies = bodies
        self._inbox = _Inbox(channel, limits, bodies)
        self._arrival: _Arrival | None = None
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._closing = threading.Lock()
        # Segments the peer has yet to be told of that they are gone, as encoded prefixes.
        self._retirements = b""
        # Why the connection is over, once it is. Written once by whoever finds out first, read by all.
        self._ended: str | None = None
        # After a send failed, what the peer had said before may still be read; then `_readable` becomes False.
        self._readable = True
        self._closed = False

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        """Send one frame; see `Connection.send`."""
        deadline = Deadline.after(timeout_s)
        body = flat(body)
        self._check_sizes(header, body)
        if not self._sending.acquire(timeout=deadline.remaining_s()):
            raise DeadlineExceeded(f"waited {timeout_s} s for other threads to finish sending to {self.peer}")
        try:
            self._check_open()
            self._send_frame(header, body, deadline, timeout_s)
        finally:
            self._sending.release()

    def receive(self, *, timeout_s: float, place: Place | None = None) -> Frame:
        """Wait for the next frame; see `Connection.receive`."""
        with self._receiving:
            if not self._readable:
                self._check_open()
            deadline = Deadline.after(timeout_s)
            try:
                return self._ending_if_lost(lambda: self._read_frame(deadline, place))
            except TimeoutError:
                raise DeadlineExceeded(f"waited {timeout_s} s for a frame from {self.peer}; none came") from None
            except PeerError:
                self._readable = False
                raise

    def close(self) -> None:
        """End the connection; see `Connection.close`."""
        self._end("it was closed here")
        self._readable = False
        # The shut channel has woken both directions; once they are out, nobody can touch a reused descriptor.
        with self._closing, self._sending, self._receiving:
            if not self._closed:
                self._closed = True
                self._channel.close()
                self._inbox.close()
                self._bodies.close()

    def _check_sizes(self, header: bytes, body: memoryview) -> None:
        limits = self._limits
        if len(header) > limits.max_header_bytes or body.nbytes > limits.max_body_bytes:
            raise UsageError(
                f"a frame with a header of {len(header)} and a body of {body.nbytes} bytes is over the limits of "
                f"{limits.max_header_bytes} and {limits.max_body_bytes}: send it in parts"
            )

    def _check_open(self) -> None:
        if self._ended is not None:
            raise ConnectionLost(f"the connection to {self.peer} is over: {self._ended}")

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
        self._channel.shut()

    def _ending_if_lost(self, step: Callable[[], T]) -> T:
        """Do one step of reading or writing; whatever ends the stream ends the connection, with its reason."""
        try:
            return step()
        except TimeoutError as error:
            if error.errno is None:  # our deadline; the kernel's verdict that the peer fell silent has a number
                raise
            self._end("the other side fell silent")
        except PeerError as error:
            self._end(str(error))
            raise
        except EOFError:
            self._end("the other side closed it or died")
        except OSError as error:
            self._end(error.strerror or str(error))
        raise ConnectionLost(f"the connection to {self.peer} is over: {self._ended}")

    def _send_frame(self, header: bytes, body: memoryview, deadline: Deadline, timeout_s: float) -> None:
        self._retirements += b"".join(map(_retirement, self._bodies.take_retired()))
        placement = self._bodies.place(body)
        start = self._retirements + _prefix_of(header, body, placement) + header
        if placement is None:
            self._write([start, body], None, deadline, timeout_s)
        else:
            self._write([start], placement.descriptor, deadline, timeout_s)
        self._retirements = b""
        if placement is not None and placement.descriptor is not None:
            self._bodies.passed(placement.region)

    def _write(
        self, buffers: list[bytes | memoryview], descriptor: int | None, deadline: Deadline, timeout_s: float
    ) -> None:
        pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
        total = num_left = sum(map(len, pending))
        while num_left:
            try:
                num_sent = self._write_some(pending, deadline, descriptor if num_left == total else None)
            except TimeoutError:
                if num_left < total:
                    self._end(f"a frame could be sent only in part within {timeout_s} s")
                raise DeadlineExceeded(
                    f"waited {timeout_s} s for {self.peer} to take a frame; sent {total - num_left} of {total} bytes"
                ) from None
            num_left -= num_sent
            pending = _after(pending, num_sent)

    def _write_some(self, pending: list[memoryview], deadline: Deadline, descriptor: int | None) -> int:
        return self._ending_if_lost(lambda: self._channel.write_some(pending, deadline, descriptor))

    def _read_frame(self, deadline: Deadline, place: Place | None) -> Frame:
        arrival = self._arrival
        while arrival is None:
            arrival = self._arrival = self._start_arrival(deadline, place)
        size_bytes = len(arrival.body)
        while arrival.num_read < size_bytes:
            arrival.num_read += self._channel.read_some(arrival.body[arrival.num_read :], deadline)
        self._arrival = None
        return Frame(arrival.header, arrival.body)

    def _start_arrival(self, deadline: Deadline, place: Place | None) -> _Arrival | None:
        """Read prefix and header and take memory for the body; None when it was but the end of a segment."""
        inbox = self._inbox
        prefix = decode_prefix(inbox.wait_for(PREFIX_BYTES, deadline), self._limits, self.peer)
        start = inbox.wait_for(PREFIX_BYTES + prefix.header_bytes, deadline)
        header = start[PREFIX_BYTES:]
        if prefix.kind is not Kind.INLINE:
            inbox.skip(len(start))
            body = self._bodies.view(prefix, inbox.descriptors, self.peer)
            return None if prefix.kind is Kind.RETIRED else _Arrival(header, body, len(body))
        body = self._memory_for(header, prefix.body_bytes, place)
        inbox.skip(len(start))
        return _Arrival(header, body, inbox.drain_into(body) if prefix.body_bytes else 0)

    def _memory_for(self, header: bytes, size_bytes: int, place: Place | None) -> memoryview:
        if not size_bytes:
            return EMPTY
        memory = destination(place, header, size_bytes)
        return fresh_buffer(size_bytes) if memory is None else memory


def _prefix_of(header: bytes, body: memoryview, placement: Placement | None) -> bytes:
    if placement is None:
        return encode_prefix(Prefix(Kind.INLINE, len(header), body.nbytes))
    kind = Kind.SHARED if placement.descriptor is None else Kind.SHARED_FIRST
    region = placement.region
    return encode_prefix(Prefix(kind, len(header), body.nbytes, region.number, placement.offset, region.size_bytes))


def _retirement(segment: int) -> bytes:
    return encode_prefix(Prefix(Kind.RETIRED, 0, 0, segment))


def _after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return what is left of the buffers after their first `num_bytes`."""
    while buffers and num_bytes >= len(buffers[0]):
        num_bytes -= len(buffers[0])
        buffers = buffers[1:]
    return [buffers[0][num_bytes:], *buffers[1:]] if buffers else []
