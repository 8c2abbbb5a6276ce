"""When the kernel gives a TCP connection up: when its line is cut, not when the process at the other end is stopped.

A stopped process reads nothing, so its receive window closes; its kernel still answers the probes of that window. With
TCP_USER_TIMEOUT set, the sender's kernel gives the connection up all the same. So it is set only while what was sent
goes unanswered.

The kernel counts it from what was sent first and not answered, and meanwhile asks no other questions. Silence counts
from what was last heard: else a message late in a silence would give that as long again.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Final, final

# A peer whose machine is gone is given up so long after it was last heard, whether or not anything was sent to it.
SILENCE_S: Final = 11.0
_LEAST_S: Final = 1.0  # for an answer to what was sent late
_PAUSE_S: Final = 0.25  # between two looks at least
_NUM_PROBES: Final = 3  # of a closed window that went unanswered: fewer may be under way
# Of struct tcp_info: tcpi_retransmits, tcpi_probes, and tcpi_last_data_recv, tcpi_last_ack_recv: how many ms ago.
_INFO: Final = struct.Struct("2xBB48xII")


@final
class Silence:
    """Watches one connection. Asked by the threads that read or write anyway, a few times a second."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._looked_s = time.monotonic()
        self._set_s = 0.0

    def look(self) -> None:
        """Let the kernel give the connection up if the other end goes on not to answer, else not."""
        now_s = time.monotonic()
        if now_s - self._looked_s < _PAUSE_S:
            return
        self._looked_s = now_s
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        num_retransmits, num_probes, *heard_ms = _INFO.unpack(info)
        is_silent = bool(num_retransmits) or num_probes >= _NUM_PROBES
        if is_silent == bool(self._set_s):
            return
        self._set_s = max(_LEAST_S, SILENCE_S - min(heard_ms) / 1000) if is_silent else 0.0
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self._set_s * 1000))
