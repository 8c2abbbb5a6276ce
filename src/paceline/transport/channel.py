"""A stream socket whose every read and write ends by a deadline.

Sockets are non-blocking and each direction polls by itself, so that a sender and a receiver in two threads do not
share a timeout. Times out with TimeoutError (without errno), ends with EOFError or OSError; the layer above names
the peer.
"""

import array
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, final

from paceline.transport.deadline import Deadline

_DESCRIPTOR_SPACE: Final = socket.CMSG_SPACE(array.array("i").itemsize)


@final
class Channel:
    """A connected stream socket, owned. One reading and one writing thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)

    def read_some(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for bytes and read them into `buffer`; returns how many, at least one."""
        while True:
            self._wait(self._readable, deadline)
            with suppress(BlockingIOError):
                return _unless_ended(self._socket.recv_into(buffer))

    def read_with_descriptors(self, buffer: memoryview, deadline: Deadline) -> tuple[int, list[int]]:
        """As `read_some`, over a Unix socket; returns also the file descriptors passed along, now ours to close."""
        while True:
            self._wait(self._readable, deadline)
            with suppress(BlockingIOError):
                num_bytes, ancillary, _, _ = self._socket.recvmsg_into(
                    [buffer], _DESCRIPTOR_SPACE, socket.MSG_CMSG_CLOEXEC
                )
                return _unless_ended(num_bytes), _descriptors(ancillary)

    def read_exactly(self, num_bytes: int, deadline: Deadline) -> bytes:
        """Read a small fixed number of bytes and not one more."""
        buffer = memoryview(bytearray(num_bytes))
        num_read = 0
        while num_read < num_bytes:
            num_read += self.read_some(buffer[num_read:], deadline)
        return bytes(buffer)

    def write_some(
        self, buffers: Sequence[memoryview | bytes], deadline: Deadline, descriptor: int | None = None
    ) -> int:
        """Wait for room and write from the buffers in turn; returns how many bytes left, at least one.

        `descriptor`, if any, goes along with the first byte.
        """
        ancillary = [] if descriptor is None else [_pass(descriptor)]
        while True:
            with suppress(BlockingIOError):
                return self._socket.sendmsg(buffers, ancillary, socket.MSG_NOSIGNAL)
            self._wait(self._writable, deadline)

    def write_all(self, data: bytes, deadline: Deadline) -> None:
        """Write all of a small message."""
        rest = memoryview(data)
        while rest:
            rest = rest[self.write_some([rest], deadline) :]

    def shut(self) -> None:
        """End the stream in both directions, at once and for both ends; wakes blocked threads. May be repeated."""
        with suppress(OSError):  # it may have ended by itself
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Free the descriptor. No thread may be inside a read or a write: `shut` first and let them return."""
        self._socket.close()

    def _wait(self, poller: select.poll, deadline: Deadline) -> None:
        if not poller.poll(deadline.remaining_ms()):
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
