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
# Of the kernel's `tcp_info`: bytes that the other side has acknowledged, and bytes that were received.
_COUNTS: Final = struct.Struct("=QQ")
_COUNTS_AT: Final = 120
# And microseconds in which it had something to send that the other side had yet to acknowledge.
_SENDING: Final = struct.Struct("=Q")
_SENDING_AT: Final = 168
_PROCESS: Final = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used since it began.

    Args:
        peak_bytes: the most memory it has had resident, shared memory that it has touched included.
        sent_bytes: what its TCP connections have sent and seen acknowledged.
        received_bytes: what they have received.
        sending_s: for how long the one of them that had so for longest had something to send.
    """

    peak_bytes: int
    sent_bytes: int
    received_bytes: int
    sending_s: float


@dataclass(slots=True)
class ResourceUsage:
    """Totals of the TCP connections of this process; traffic over shared memory and Unix sockets is not counted.

    A closed connection counts with the values of its last `look`: call that before peers may leave.
    """

    # Sent, received and microseconds of sending, by what the kernel calls the connection.
    _seen: dict[str, tuple[int, int, int]] = field(default_factory=dict[str, tuple[int, int, int]])

    def sample(self) -> None:
        """Read the counters of all connections; on Linux only."""
        for descriptor in _descriptors():
            with suppress(OSError):  # closed by now, or a socket of another kind
                name = os.readlink(_PROCESS / "fd" / descriptor)
                if name.startswith("socket:"):
                    self._seen[name] = _carried(_copied(int(descriptor)))

    def usage(self) -> Usage | None:
        """Return the usage of this process so far; None without /proc, that is outside of Linux."""
        self.sample()
        if not _PROCESS.exists():
            return None
        sent, received, sending = zip((0, 0, 0), *self._seen.values(), strict=True)
        return Usage(_peak_bytes(), sum(sent), sum(received), max(sending) / 1e6)


def _descriptors() -> list[str]:
    """Return the open descriptors of this process; none when there are too many to list them."""
    try:
        return os.listdir(_PROCESS / "fd") if sys.platform == "linux" else []
    except OSError:
        return []


def _peak_bytes() -> int:
    """Return the high-water mark of the resident memory, which begins anew with each program that is run."""
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _copied(descriptor: int) -> socket.socket:
    """Return a duplicate of the socket of a descriptor; raises OSError if that is another kind of file by now."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _carried(connection: socket.socket) -> tuple[int, int, int]:
    """Return what went out and came in over a connection, and for how long; zeros where it is not of TCP; closes it."""
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0, 0, 0
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES).ljust(_INFO_BYTES, b"\0")
    sent, received = _COUNTS.unpack_from(told, _COUNTS_AT)
    (sending,) = _SENDING.unpack_from(told, _SENDING_AT)
    return sent, received, sending
