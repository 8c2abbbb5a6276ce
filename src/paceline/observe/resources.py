"""Resource usage of a process: peak memory, and bytes of its TCP connections as the kernel counts them."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

_INFO_BYTES: Final = 256
# Of the kernel's `tcp_info`: bytes that the peer has acknowledged, and bytes received.
_COUNTS: Final = struct.Struct("=QQ")
_COUNTS_AT: Final = 120
# Microseconds with sent bytes that the peer had not acknowledged.
_SENDING: Final = struct.Struct("=Q")
_SENDING_AT: Final = 168
_PROCESS: Final = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Usage:
    """Resources that a process has used since its start.

    Args:
        peak_bytes: peak of resident memory, with shared memory that it has touched.
        sent_bytes: bytes that its TCP connections have sent, as acknowledged.
        received_bytes: bytes that they have received.
        sending_s: time with unacknowledged bytes, of the connection with the longest.
    """

    peak_bytes: int
    sent_bytes: int
    received_bytes: int
    sending_s: float


@dataclass(slots=True)
class ResourceUsage:
    """Totals of the TCP connections of this process; traffic over shared memory and Unix sockets is not counted.

    A closed connection counts with the values of its last `sample`: call it before peers may leave.
    """

    # Bytes sent and received, and microseconds of sending, by the kernel's number of the connection.
    _seen: dict[str, tuple[int, int, int]] = field(default_factory=dict[str, tuple[int, int, int]])

    def sample(self) -> None:
        """Read the counters of all connections; on Linux only."""
        for descriptor in _descriptors():
            with suppress(OSError):  # closed, or a socket of another kind
                name = os.readlink(_PROCESS / "fd" / descriptor)
                if name.startswith("socket:"):
                    self._seen[name] = _carried(_copied(int(descriptor)))

    def usage(self) -> Usage | None:
        """Return the usage of this process so far; None without /proc, outside of Linux."""
        self.sample()
        if not _PROCESS.exists():
            return None
        sent, received, sending = zip((0, 0, 0), *self._seen.values(), strict=True)
        return Usage(_peak_bytes(), sum(sent), sum(received), max(sending) / 1e6)


def _descriptors() -> list[str]:
    """Return the open descriptors of this process; none if there are too many to list."""
    try:
        return os.listdir(_PROCESS / "fd") if sys.platform == "linux" else []
    except OSError:
        return []


def _peak_bytes() -> int:
    """Return the peak of resident memory since the last exec."""
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _copied(descriptor: int) -> socket.socket:
    """Return a duplicate of the socket of a descriptor; raises OSError for another kind of file."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _carried(connection: socket.socket) -> tuple[int, int, int]:
    """Return the counters of a connection, zeros for one that is not TCP, and close the socket."""
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0, 0, 0
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES).ljust(_INFO_BYTES, b"\0")
    sent, received = _COUNTS.unpack_from(told, _COUNTS_AT)
    (sending,) = _SENDING.unpack_from(told, _SENDING_AT)
    return sent, received, sending
