"""Collects the signals a launcher has to answer, so that they are handled one at a time and in one place."""

import signal
import socket
from collections import deque
from types import FrameType
from typing import Final, Self, final

from paceline.launch.preemption import PREEMPTION_SIGNALS

HANDLED: Final = (signal.SIGINT, signal.SIGHUP, *PREEMPTION_SIGNALS)


@final
class Signals:
    """While entered, signals that mean an end are collected; these and SIGCHLD make `wakeup_fd` readable.

    A signal that was ignored before (SIGHUP under nohup) stays ignored. Usable from the main thread only.
    """

    def __init__(self) -> None:
        self._received: deque[int] = deque()
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self.wakeup_fd = self._reader.fileno()

    def __enter__(self) -> Self:
        """Take over the handlers."""
        self._previous = {number: signal.getsignal(number) for number in (*HANDLED, signal.SIGCHLD)}
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in HANDLED:
            if self._previous[number] is not signal.SIG_IGN:
                signal.signal(number, self._collect)
        signal.signal(signal.SIGCHLD, _wake)
        return self

    def __exit__(self, *error: object) -> None:
        """Give the handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()

    def pop_received(self) -> list[int]:
        """Return the signals received since the last call, oldest first."""
        return [self._received.popleft() for _ in range(len(self._received))]

    def _collect(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: that the signal is handled at all is what makes the descriptor readable."""
