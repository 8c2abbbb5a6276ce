"""When the kernel gives a TCP connection up: when its line is cut, not when the process at the other end is stopped.

A stopped process reads nothing, so its receive window closes; its kernel still answers the probes of that window. With
TCP_USER_TIMEOUT set, the sender's kernel gives the connection up all the same. So it is set only while what was sent
goes unanswered.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Final, final

# A peer whose machine is gone is given up after so long without an acknowledgement.
SILENCE_S: Final = 10.0
_PAUSE_S: Final = 0.25  # between two looks at least
_NUM_PROBES: Final = 3  # of a closed window that went unanswered: fewer may be under way
_INFO: Final = struct.Struct("2xBB")  # of struct tcp_info: tcpi_retransmits, tcpi_probes


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
        num_retransmits, num_probes = _INFO.unpack(info)
        wanted_s = SILENCE_S if num_retransmits or num_probes >= _NUM_PROBES else 0.0
        if wanted_s != self._set_s:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(wanted_s * 1000))
            self._set_s = wanted_s
