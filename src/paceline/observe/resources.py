"""Resource usage of a process: memory, cores and pauses, and its TCP connections as the kernel counts them."""

from __future__ import annotations

import gc
import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from paceline.observe.trace import Sampled, Trace
from paceline.observe.verdict import ProcessState

_INFO_BYTES: Final = 256
# Of the kernel's `tcp_info`: bytes that the peer has acknowledged, and bytes received.
_COUNTS: Final = struct.Struct("=QQ")
_COUNTS_AT: Final = 120
# Microseconds with sent bytes that the peer had not acknowledged.
_SENDING: Final = struct.Struct("=Q")
_SENDING_AT: Final = 168
_RESENT: Final = struct.Struct("=I")  # segments that were sent again
_RESENT_AT: Final = 100
_PROCESS: Final = Path("/proc/self")


class Usage(msgspec.Struct, frozen=True):
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
    num_resent: int = 0


@dataclass(slots=True)
class ResourceUsage:
    """Totals of the TCP connections of this process; traffic over shared memory and Unix sockets is not counted.

    A closed connection counts with the values of its last `sample`: call it before peers may leave.
    """

    # Bytes sent and received, microseconds of sending, segments sent again, by the kernel's number of the connection.
    _seen: dict[str, tuple[int, int, int, int]] = field(default_factory=dict[str, tuple[int, int, int, int]])

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
        sent, received, sending, resent = zip((0, 0, 0, 0), *self._seen.values(), strict=True)
        return Usage(_peak_bytes(), sum(sent), sum(received), max(sending) / 1e6, sum(resent))

    def num_resent(self) -> int:
        """Return how many segments were sent again so far."""
        self.sample()
        return sum(counts[3] for counts in self._seen.values())


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


def _carried(connection: socket.socket) -> tuple[int, int, int, int]:
    """Return the counters of a connection, zeros for one that is not TCP, and close the socket."""
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return 0, 0, 0, 0
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES).ljust(_INFO_BYTES, b"\0")
    sent, received = _COUNTS.unpack_from(told, _COUNTS_AT)
    (sending,) = _SENDING.unpack_from(told, _SENDING_AT)
    (resent,) = _RESENT.unpack_from(told, _RESENT_AT)
    return sent, received, sending, resent


def _delayed_s() -> float:
    """Return how long this thread had no core although it could have run; 0 outside of Linux."""
    try:
        return int((_PROCESS / "task" / str(threading.get_native_id()) / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


SAMPLE_INTERVAL_S: Final = 0.25
_RESENT_EVERY: Final = 8  # samples, as reading all connections takes longer


@dataclass(slots=True)
class ProcessSamples:
    """Records what the process uses, at most once in `SAMPLE_INTERVAL_S`; one thread calls `sample`, and is measured.

    Attributes:
        connections: of the process.
    """

    trace: Trace
    role: Literal["worker", "server"]
    rank: int
    connections: ResourceUsage
    _due_t: float = 0.0
    _number: int = 0
    _num_resent: int = 0
    _gc_s: float = 0.0
    _gc_began_s: float = 0.0
    _is_open: bool = False

    def sample(self, now: float) -> None:
        """Record what is used so far, if it is due."""
        if now < self._due_t or not self.trace.is_kept:
            return
        if not self._is_open:
            self._is_open = True
            gc.callbacks.append(self._note_collection)
        self._due_t = now + SAMPLE_INTERVAL_S
        if self._number % _RESENT_EVERY == 0:
            self._num_resent = self.connections.num_resent()
        self._number += 1
        used = resource.getrusage(resource.RUSAGE_SELF)
        self.trace.record(
            Sampled(
                now,
                self.role,
                self.rank,
                os.getpid(),
                used.ru_utime + used.ru_stime,
                _delayed_s(),
                self._gc_s,
                used.ru_majflt,
                self._num_resent,
                os.uname().nodename,
            )
        )

    def close(self) -> None:
        """Stop to measure. Idempotent."""
        if self._is_open:
            self._is_open = False
            with suppress(ValueError):
                gc.callbacks.remove(self._note_collection)

    def _note_collection(self, phase: str, _: Mapping[str, int]) -> None:
        if phase == "start":
            self._gc_began_s = time.monotonic()
        elif self._gc_began_s:
            self._gc_s += time.monotonic() - self._gc_began_s
            self._gc_began_s = 0.0


def look_at(pid: int, seen_t: float) -> ProcessState:
    """Return what the kernel says of another process, which lived at `seen_t` on the monotonic clock; Linux only.

    A process that has its number now, and began later, is another one: then it is gone.
    """
    place = Path("/proc") / str(pid)
    try:
        fields = (place / "stat").read_bytes().rpartition(b")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK") - _suspended_s()
        rss_bytes = int((place / "statm").read_bytes().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return ProcessState("")
    state = fields[0].decode()
    return ProcessState("" if state in "ZX" or began_s > seen_t + 1 else state, rss_bytes)


def _suspended_s() -> float:
    """Return for how long this machine was suspended since it booted, which the monotonic clock leaves out."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() if hasattr(time, "CLOCK_BOOTTIME") else 0.0
