"""A channel inside TLS."""

import ssl
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final, cast, final

from paceline.errors import PeerError, ProtocolBug
from paceline.transport.channel import OutOfTime, SocketChannel
from paceline.transport.deadline import Deadline

# Sixteen records of the largest size: enough that the cost of a call does not matter.
_TURN_BYTES: Final = 256 * 1024
_FIRST_BYTES: Final = 4  # say what a program is that does not speak TLS


@final
class TlsChannel:
    """A `Channel` that encrypts what it carries over another one, which it owns.

    OpenSSL may work for one thread at a time on a connection. So it never touches the socket: under a lock it turns
    bytes into records and records into bytes, and the thread that has records to send, or waits for some, does so
    without the lock.
    """

    def __init__(
        self, inner: SocketChannel, context: ssl.SSLContext, *, server_side: bool, allowance_bytes: int
    ) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=server_side)
        # Until the peer has proven itself it may say only so much more, and memory is taken for no more than that.
        self._allowance_bytes = allowance_bytes
        self._records = memoryview(bytearray(allowance_bytes))
        self.first = b""  # of what the other side has said

    def trust(self) -> None:
        """Read as much as comes from now on: the peer has proven itself."""
        self._allowance_bytes = sys.maxsize
        self._records = memoryview(bytearray(_TURN_BYTES))

    def certificate(self, *, binary: bool) -> object:
        """Return the peer's certificate, which has been checked: as a dict, or as DER."""
        return self._tls.getpeercert(binary)

    def shake_hands(self, deadline: Deadline) -> None:
        """Agree on keys, and check the other side's certificate; raises SSLError when that fails."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._take_in(deadline)
            except ssl.SSLError:
                with suppress(OSError, OutOfTime):  # the other side may be gone; if not, it learns why
                    self._flush(deadline)
                raise
            else:
                self._flush(deadline)
                return

    def read_some(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for bytes; see `Channel.read_some`."""
        while True:
            with self._lock:
                num_bytes = self._decrypt(buffer)
            if num_bytes:
                return num_bytes
            self._take_in(deadline)

    def read_much(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for bytes: what has arrived is decrypted while more arrives; see `Channel.read_much`."""
        return self.read_some(buffer, deadline)

    def read_with_descriptors(self, buffer: memoryview, deadline: Deadline) -> tuple[int, list[int]]:
        """Wait for bytes; descriptors never come."""
        return self.read_some(buffer, deadline), []

    def write(self, buffers: Sequence[memoryview | bytes], deadline: Deadline, descriptor: int | None = None) -> None:
        """Write all; see `Channel.write`."""
        if descriptor is not None:
            raise ProtocolBug("a descriptor cannot pass through TLS")
        self._inner.wait_for_room(deadline)  # once it is encrypted, a record cannot be taken back
        num_encrypted = 0
        for piece in _pieces(buffers):
            with self._lock:
                self._tls.write(piece)
            num_encrypted += len(piece)
            if self._leaving.pending >= _TURN_BYTES:
                self._flush(deadline, num_encrypted)
        self._flush(deadline, num_encrypted)

    def has_room(self) -> bool:
        """Say whether the kernel has room; see `Channel.has_room`."""
        return self._inner.has_room()

    def shut(self) -> None:
        """End the stream; see `Channel.shut`. Every frame says its length, so TLS need not say that it ends."""
        self._inner.shut()

    def close(self) -> None:
        """Free the descriptor; see `Channel.close`."""
        self._inner.close()

    def _decrypt(self, buffer: memoryview) -> int:
        """Fill `buffer` from the records that are there; returns how many bytes that gave."""
        num_bytes = 0
        with suppress(ssl.SSLWantReadError):  # what is there may end within a record
            while num_bytes < len(buffer) and (self._arrived.pending or self._tls.pending()):
                rest = buffer[num_bytes:]
                num_read = cast("int", cast("object", self._tls.read(len(rest), rest)))  # bytes only without a buffer
                if num_read == 0:
                    raise EOFError
                num_bytes += num_read
        return num_bytes

    def _take_in(self, deadline: Deadline) -> None:
        """Wait for records, or parts of them."""
        if not self._allowance_bytes:
            raise PeerError("it said more than a handshake takes before it had proven itself")
        num_bytes = self._inner.read_some(self._records[: self._allowance_bytes], deadline)
        self._allowance_bytes -= num_bytes
        self.first = self.first or bytes(self._records[: min(num_bytes, _FIRST_BYTES)])
        with self._lock:
            self._arrived.write(self._records[:num_bytes])

    def _flush(self, deadline: Deadline, num_encrypted: int = 0) -> None:
        """Send the records that are ready, which hold this many bytes of what is being written, or the last of them."""
        with self._lock:
            records = self._leaving.read()
        if not records:
            return
        try:
            self._inner.write([records], deadline)
        except OutOfTime:
            raise OutOfTime(num_encrypted) from None


def _pieces(buffers: Sequence[memoryview | bytes]) -> Iterator[memoryview]:
    for buffer in buffers:
        for start in range(0, len(buffer), _TURN_BYTES):
            yield memoryview(buffer)[start : start + _TURN_BYTES]
