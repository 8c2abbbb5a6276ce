"""Byte streams whose every read and write ends by a deadline.

They end with EOFError or OSError, or OutOfTime at the deadline; the layer above names the peer.
"""

from __future__ import annotations

import array
import math
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol, final

from paceline.transport.buffers import LentBody
from paceline.transport.deadline import Deadline

# A peer whose machine is gone is given up so long after it was last heard, whether or not anything was sent to it.
SILENCE_S: Final = 11.0
_LEAST_S: Final = 1.0  # for an answer to what was sent late
_PAUSE_S: Final = 0.25  # between two checks at least
_LOOK_MS: Final = 250  # so long a write waits for room before the line is checked
_NUM_PROBES: Final = 3  # of a closed window that went unanswered: fewer may be under way
# Of struct tcp_info: tcpi_retransmits, tcpi_probes, and tcpi_last_data_recv, tcpi_last_ack_recv: how many ms ago.
_INFO: Final = struct.Struct("2xBB48xII")


@final
class SilenceLimit:
    """Ends a connection whose peer is silent. Called by the reading and writing threads, a few times a second."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._checked_s = time.monotonic()
        self._set_s = 0.0

    def silent_s(self) -> float:
        """Return for how long nothing was heard, as the kernel tells."""
        return min(self._info()[2:]) / 1000

    def check(self) -> None:
        """Make the kernel give the connection up if the peer has been silent for too long."""
        now_s = time.monotonic()
        if now_s - self._checked_s < _PAUSE_S:
            return
        self._checked_s = now_s
        num_retransmits, num_probes, *heard_ms = self._info()
        is_silent = bool(num_retransmits) or num_probes >= _NUM_PROBES
        if is_silent == bool(self._set_s):
            return
        self._set_s = max(_LEAST_S, SILENCE_S - min(heard_ms) / 1000) if is_silent else 0.0
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._set_s * 1000))

    def _info(self) -> tuple[int, ...]:
        return _INFO.unpack(self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size))


_DESCRIPTOR_SPACE: Final = socket.CMSG_SPACE(array.array("i").itemsize)
_TIMEVAL: Final = struct.Struct("ll")
# As plain integers, which combine ten times as fast as members of an enumeration.
_NO_WAIT: Final = int(socket.MSG_DONTWAIT)
_WAIT_FOR_ALL: Final = int(socket.MSG_WAITALL)
_NO_SIGNAL: Final = int(socket.MSG_NOSIGNAL)
_CLOSE_ON_EXEC: Final = int(socket.MSG_CMSG_CLOEXEC)


class OutOfTime(Exception):
    """The deadline has passed; of what was to be written, `num_written` bytes had left (none when reading)."""

    def __init__(self, num_written: int = 0) -> None:
        super().__init__(f"the deadline has passed, {num_written} bytes had left")
        self.num_written: Final = num_written


class Channel(Protocol):
    """A connected stream, owned. One reading and one writing thread at a time."""

    def read_some(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for bytes and read them into `buffer`; returns how many, at least one."""
        ...

    def read_much(self, buffer: memoryview, deadline: Deadline) -> int:
        """As `read_some`, but prefer to wait until `buffer` is full."""
        ...

    def read_with_descriptors(self, buffer: memoryview, deadline: Deadline) -> tuple[int, list[int]]:
        """As `read_some`; also returns the file descriptors that arrived, which the caller has to close."""
        ...

    def write(self, buffers: Sequence[memoryview | bytes], deadline: Deadline, descriptor: int | None = None) -> None:
        """Write all of the buffers in turn; `descriptor`, if any, goes along with the first byte."""
        ...

    def write_lent(self, buffers: Sequence[memoryview | bytes], body: LentBody, deadline: Deadline) -> None:
        """Write these buffers and a lent body, whose lock is not held while the other end is waited for."""
        ...

    def has_room(self) -> bool:
        """Return whether tens of kilobytes can be written without waiting."""
        ...

    def fileno(self) -> int | None:
        """Return a descriptor that is readable exactly if a read would not wait; None if there is none."""
        ...

    def silent_s(self) -> float:
        """Return for how many seconds nothing has come from the other end, not even that it has what was sent."""
        ...

    def shut(self) -> None:
        """End the stream in both directions, at once and for both ends; wakes blocked threads. May be repeated."""
        ...

    def close(self) -> None:
        """Free the descriptor. No thread may be inside a read or a write: `shut` first and let them return."""
        ...


def read_exactly(channel: Channel, num_bytes: int, deadline: Deadline) -> bytes:
    """Read exactly this small number of bytes."""
    buffer = memoryview(bytearray(num_bytes))
    num_read = 0
    while num_read < num_bytes:
        num_read += channel.read_some(buffer[num_read:], deadline)
    return bytes(buffer)


@final
class SocketChannel:
    """A `Channel` over a socket as it is.

    The socket blocks, and the kernel keeps the deadline: a body of any size then costs one system call at either end,
    during which other threads run, where polling would cost two for every few kilobytes.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._reading = _KernelTimeout(sock, socket.SO_RCVTIMEO)
        self._writing = _KernelTimeout(sock, socket.SO_SNDTIMEO)
        # Unix sockets have no line that could be cut.
        self._silence = None if sock.family == socket.AF_UNIX else SilenceLimit(sock)

    def read_some(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for bytes; see `Channel.read_some`."""
        return self._read(buffer, deadline, 0)

    def read_much(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for many bytes; see `Channel.read_much`."""
        return self._read(buffer, deadline, _WAIT_FOR_ALL)

    def read_with_descriptors(self, buffer: memoryview, deadline: Deadline) -> tuple[int, list[int]]:
        """Wait for bytes and descriptors; see `Channel.read_with_descriptors`."""
        while True:
            flags = self._reading.flags(deadline)
            try:
                num_bytes, ancillary, _, _ = self._socket.recvmsg_into(
                    [buffer], _DESCRIPTOR_SPACE, flags | _CLOSE_ON_EXEC
                )
            except BlockingIOError:
                self._check_line()
                _check_time(flags)
            else:
                return _unless_ended(num_bytes), _descriptors(ancillary) if ancillary else []

    def write(self, buffers: Sequence[memoryview | bytes], deadline: Deadline, descriptor: int | None = None) -> None:
        """Write all; see `Channel.write`."""
        self._check_line()
        num_left = sum(map(len, buffers))
        ancillary = [] if descriptor is None else [_pass(descriptor)]
        num_written = 0
        while True:
            flags = self._writing.flags(deadline)
            try:
                num_sent = self._socket.sendmsg(buffers, ancillary, flags | _NO_SIGNAL)
            except BlockingIOError:
                self._check_line()
                _check_time(flags, num_written)
                continue
            if num_sent == num_left:
                return
            buffers, ancillary = _after(buffers, num_sent), []
            num_written += num_sent
            num_left -= num_sent

    def write_lent(self, buffers: Sequence[memoryview | bytes], body: LentBody, deadline: Deadline) -> None:
        """Write all; see `Channel.write_lent`."""
        self._check_line()
        num_left, num_written = sum(map(len, buffers)) + len(body.memory), 0
        while num_left:
            try:
                with body.lock:
                    rest = _after([*buffers, body.memory], num_written)
                    num_sent = self._socket.sendmsg(rest, [], _NO_WAIT | _NO_SIGNAL)
            except BlockingIOError:
                self._check_line()
                if not self._is_writable(min(deadline.remaining_ms(), _LOOK_MS)) and not deadline.remaining_ms():
                    raise OutOfTime(num_written) from None
            else:
                num_written += num_sent
                num_left -= num_sent

    def has_room(self) -> bool:
        """Return whether the kernel has room, which it reports once a third of its buffer is free."""
        return self._is_writable(within_ms=0)

    def fileno(self) -> int | None:
        """Return the socket's descriptor, None once it is closed."""
        descriptor = self._socket.fileno()
        return None if descriptor < 0 else descriptor

    def wait_for_room(self, deadline: Deadline) -> None:
        """Wait until something can be written."""
        if not self._is_writable(deadline.remaining_ms()):
            raise OutOfTime

    def shut(self) -> None:
        """End the stream; see `Channel.shut`."""
        with suppress(OSError):  # it may have ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor; see `Channel.close`."""
        self._socket.close()

    def _is_writable(self, within_ms: int) -> bool:
        number = self._socket.fileno()
        if number < 0:
            return True  # it is closed, as a write will say
        poll = select.poll()  # of this call alone: another thread may be waiting in one
        poll.register(number, select.POLLOUT)
        return bool(poll.poll(within_ms))

    def _read(self, buffer: memoryview, deadline: Deadline, how: int) -> int:
        while True:
            flags = self._reading.flags(deadline)
            try:
                return _unless_ended(self._socket.recv_into(buffer, 0, flags | how))
            except BlockingIOError:
                self._check_line()
                _check_time(flags)

    def silent_s(self) -> float:
        """Return how long the other end has been silent; see `Channel.silent_s`."""
        return 0.0 if self._silence is None else self._silence.silent_s()

    def _check_line(self) -> None:
        """Check for a silent peer; see `SilenceLimit`."""
        if self._silence is not None:
            self._silence.check()


@final
class _KernelTimeout:
    """The timeout of the kernel in one direction of a socket: set anew only if need be, as that is a system call."""

    def __init__(self, sock: socket.socket, option: int) -> None:
        self._socket = sock
        self._option = option
        self._set_ms = math.inf

    def flags(self, deadline: Deadline) -> int:
        """Make the next call end by the deadline; returns the flags for it.

        The call may end long before the deadline with BlockingIOError; then the caller repeats it.
        """
        left_ms = deadline.remaining_ms()
        if left_ms == 0:
            return _NO_WAIT
        if not left_ms / 2 < self._set_ms <= left_ms:
            timeout = _TIMEVAL.pack(left_ms // 1000, left_ms % 1000 * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, self._option, timeout)
            self._set_ms = left_ms
        return 0


def _check_time(flags: int, num_written: int = 0) -> None:
    """Raise OutOfTime when the call that these flags were for was the last one before the deadline."""
    if flags & _NO_WAIT:
        raise OutOfTime(num_written)


def _after(buffers: Sequence[memoryview | bytes], num_bytes: int) -> list[memoryview]:
    """Return the rest of the buffers after their first `num_bytes`."""
    rest: list[memoryview] = []
    for buffer in buffers:
        if num_bytes < len(buffer):
            rest.append(memoryview(buffer)[num_bytes:])
        num_bytes = max(0, num_bytes - len(buffer))
    return rest


def _unless_ended(num_bytes: int) -> int:
    if num_bytes == 0:
        raise EOFError
    return num_bytes


def _pass(descriptor: int) -> tuple[int, int, array.array[int]]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
