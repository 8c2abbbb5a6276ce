"""What a process has used so far: its largest memory, and what its TCP connections carried, as the kernel counts it."""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_INFO_BYTES: Final = 256
# Of the kernel's `tcp_info`: bytes that the other side has acknowledged, and bytes that were received.
_COUNTS: Final = struct.Struct("=QQ")
_COUNTS_AT: Final = 120
_PROCESS: Final = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used since it began.

    Args:
        peak_bytes: the most memory it has had resident, shared memory that it has touched included.
        sent_bytes: what its TCP connections that are still open have sent and seen acknowledged.
        received_bytes: what these have received.
    """

    peak_bytes: int
    sent_bytes: int
    received_bytes: int


def measure() -> Usage | None:
    """Return what this process has used; None where the kernel does not tell, that is, elsewhere than on Linux.

    Shared memory and Unix sockets carry bytes too, which nobody counts.
    """
    if sys.platform != "linux":
        return None
    carried = [_carried(int(descriptor)) for descriptor in os.listdir(_PROCESS / "fd")]
    return Usage(_peak_bytes(), sum(sent for sent, _ in carried), sum(received for _, received in carried))


def _peak_bytes() -> int:
    """Return the high-water mark of the resident memory, which begins anew with each program that is run."""
    lines = (_PROCESS / "status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _carried(descriptor: int) -> tuple[int, int]:
    """Return the bytes that went out and came in over a descriptor, zeros where it is no TCP connection."""
    with suppress(OSError):  # closed by now, or a socket of another kind
        if os.readlink(_PROCESS / "fd" / str(descriptor)).startswith("socket:"):
            return _counts_of(socket.socket(fileno=os.dup(descriptor)))
    return 0, 0


def _counts_of(connection: socket.socket) -> tuple[int, int]:
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0, 0
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    sent, received = _COUNTS.unpack_from(told, _COUNTS_AT)
    return sent, received
