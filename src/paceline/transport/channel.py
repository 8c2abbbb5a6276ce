"""Byte streams whose every read and write ends by a deadline.

They time out with TimeoutError (without errno), end with EOFError or OSError; the layer above names the peer.
"""

import array
import math
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Protocol, final

from paceline.transport.deadline import Deadline

_DESCRIPTOR_SPACE: Final = socket.CMSG_SPACE(array.array("i").itemsize)
_TIMEVAL: Final = struct.Struct("ll")


class Channel(Protocol):
    """A connected stream, owned. One reading and one writing thread at a time."""

    def read_some(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for bytes and read them into `buffer`; returns how many, at least one."""
        ...

    def read_much(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for all of `buffer` to be filled; returns how many bytes came by the deadline, at least one."""
        ...

    def read_with_descriptors(self, buffer: memoryview, deadline: Deadline) -> tuple[int, list[int]]:
        """As `read_some`; returns also the file descriptors that came along, now ours to close."""
        ...

    def write_some(
        self, buffers: Sequence[memoryview | bytes], deadline: Deadline, descriptor: int | None = None
    ) -> int:
        """Write the buffers in turn; returns how many bytes left by the deadline, at least one.

        `descriptor`, if any, goes along with the first byte.
        """
        ...

    def shut(self) -> None:
        """End the stream in both directions, at once and for both ends; wakes blocked threads. May be repeated."""
        ...

    def close(self) -> None:
        """Free the descriptor. No thread may be inside a read or a write: `shut` first and let them return."""
        ...


def read_exactly(channel: Channel, num_bytes: int, deadline: Deadline) -> bytes:
    """Read a small fixed number of bytes and not one more."""
    buffer = memoryview(bytearray(num_bytes))
    num_read = 0
    while num_read < num_bytes:
        num_read += channel.read_some(buffer[num_read:], deadline)
    return bytes(buffer)


def write_all(channel: Channel, data: bytes, deadline: Deadline) -> None:
    """Write all of a small message."""
    rest = memoryview(data)
    while rest:
        rest = rest[channel.write_some([rest], deadline) :]


@final
class SocketChannel:
    """A `Channel` over a socket as it is.

    The socket blocks, and the kernel keeps the deadline: a body of any size then costs one system call at either end,
    during which other threads run, where polling would cost two for every few kilobytes.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._reading = _Patience(sock, socket.SO_RCVTIMEO)
        self._writing = _Patience(sock, socket.SO_SNDTIMEO)

    def read_some(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for bytes; see `Channel.read_some`."""
        return self._read(buffer, deadline, 0)

    def read_much(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for many bytes; see `Channel.read_much`."""
        return self._read(buffer, deadline, socket.MSG_WAITALL)

    def read_with_descriptors(self, buffer: memoryview, deadline: Deadline) -> tuple[int, list[int]]:
        """Wait for bytes and descriptors; see `Channel.read_with_descriptors`."""
        while True:
            flags = self._reading.flags(deadline)
            try:
                num_bytes, ancillary, _, _ = self._socket.recvmsg_into(
                    [buffer], _DESCRIPTOR_SPACE, flags | socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                _check_time(flags)
            else:
                return _unless_ended(num_bytes), _descriptors(ancillary) if ancillary else []

    def write_some(
        self, buffers: Sequence[memoryview | bytes], deadline: Deadline, descriptor: int | None = None
    ) -> int:
        """Write as much as goes; see `Channel.write_some`."""
        ancillary = [] if descriptor is None else [_pass(descriptor)]
        while True:
            flags = self._writing.flags(deadline)
            try:
                return self._socket.sendmsg(buffers, ancillary, flags | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                _check_time(flags)

    def shut(self) -> None:
        """End the stream; see `Channel.shut`."""
        with suppress(OSError):  # it may have ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor; see `Channel.close`."""
        self._socket.close()

    def _read(self, buffer: memoryview, deadline: Deadline, how: int) -> int:
        while True:
            flags = self._reading.flags(deadline)
            try:
                return _unless_ended(self._socket.recv_into(buffer, 0, flags | how))
            except BlockingIOError:
                _check_time(flags)


@final
class _Patience:
    """How long the kernel waits in one direction of a socket: set anew only if need be, as that is a system call."""

    def __init__(self, sock: socket.socket, option: int) -> None:
        self._socket = sock
        self._option = option
        self._set_ms = math.inf

    def flags(self, deadline: Deadline) -> int:
        """Have the next call end by the deadline; returns the flags to make it with.

        It may end long before the deadline, as BlockingIOError; then it is to be made again.
        """
        left_ms = deadline.remaining_ms()
        if left_ms == 0:
            return socket.MSG_DONTWAIT
        if not left_ms / 2 < self._set_ms <= left_ms:
            timeout = _TIMEVAL.pack(left_ms // 1000, left_ms % 1000 * 1000)
            self._socket.setsockopt(socket.SOL_SOCKET, self._option, timeout)
            self._set_ms = left_ms
        return 0


def _check_time(flags: int) -> None:
    """Raise TimeoutError when the call that these flags were for was the last one before the deadline."""
    if flags & socket.MSG_DONTWAIT:
        raise TimeoutError


def _unless_ended(num_bytes: int) -> int:
    if num_bytes == 0:
        raise EOFError
    return num_bytes


def _pass(descriptor: int) -> tuple[int, int, "array.array[int]"]:
    return socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor])


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
