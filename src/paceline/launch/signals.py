"""The signals by which users and schedulers end a job, as workers and launchers handle them.

A worker acts on those by which schedulers reclaim a machine at the end of its step. The first signal is only noted, and
acted on where a step ends. A second one ends the process at once. So does the first one where no step will end: in a
process forked from a worker, after the worker has left, and once the run is aborted.
"""

import os
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, Self, final

from paceline.errors import EXIT_PREEMPTED

# SIGTERM ends a process politely; the others are what users let Slurm's --signal send ahead of it.
PREEMPTION_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
HANDLED: Final = (signal.SIGINT, signal.SIGHUP, *PREEMPTION_SIGNALS)  # by launchers
ENDING_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # of a relay, a spare, a server of its own
ABORT_MARKER_NAME: Final = "called.off"  # in the folder of a job whose workers are to end at once
# A signal to the whole process group reaches workers directly, and then once more through our launcher.
REPEAT_WINDOW_S: Final = 1.0


@final
class PreemptionNotice:
    """Notes whether this process was preempted.

    Args:
        abort_marker: a file that appears when a run ends for another reason, and nothing is worth finishing.
        now: monotonic seconds.
    """

    def __init__(self, abort_marker: Path | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._abort_marker = abort_marker
        self._now = now
        self.told_at_s: float | None = None  # when this process was preempted, if it was
        self._script_decides = False
        # Returns whether the script may be saving its state because the job has failed: then it is not cut short.
        self.may_save: Callable[[], bool] = lambda: False
        self._listener: int | None = None  # the process that is told, while it listens: not what it forks

    def listen(self) -> None:
        """Note preemption signals from now on, except those that the script handles or ignores itself.

        Does nothing outside of the main thread, where there are no signals.
        """
        if threading.current_thread() is threading.main_thread():
            self._listener = os.getpid()
            for number in PREEMPTION_SIGNALS:
                if signal.getsignal(number) is signal.SIG_DFL and not _is_caught(number):
                    signal.signal(number, self._note)

    def close(self) -> None:
        """Let the signals do what they did before, unless one has come: its process is ending, and not to be cut short.

        May be repeated. Does nothing outside of the main thread, as `listen`.
        """
        if self.told_at_s is None and threading.current_thread() is threading.main_thread():
            self._listener = None
            for number in PREEMPTION_SIGNALS:
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL)

    def check_preempted(self) -> bool:
        """Return whether this process was preempted; from now on the script decides when to leave."""
        self._script_decides = True
        return self.told_at_s is not None

    def exit_if_preempted(self, leave: Callable[[], None]) -> None:
        """Leave and raise SystemExit(143) if this process was preempted, unless the script decides."""
        if self.told_at_s is not None and not self._script_decides:
            leave()
            raise SystemExit(EXIT_PREEMPTED)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = self._now()
        is_first = self.told_at_s is None or now - self.told_at_s < REPEAT_WINDOW_S
        is_wanted = self._abort_marker is None or not self._abort_marker.exists() or self.may_save()
        if self._listener == os.getpid() and is_first and is_wanted:
            self.told_at_s = now if self.told_at_s is None else self.told_at_s
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _is_caught(number: int) -> bool:
    """Return whether this process has a handler that Python does not know of, as `faulthandler.register` sets it."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:  # not Linux
        return False
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> (number - 1) & 1)


def ignore_preemption_signals() -> None:
    """Ignore preemption signals: for servers, which end after their workers. Call it in the main thread."""
    for number in PREEMPTION_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def at_first_signal(act: Callable[[int], None]) -> Generator[None]:
    """While entered, call `act` at the first signal to end this process; a second one ends it at once.

    A signal that was ignored before (SIGHUP under nohup) stays ignored. Usable from the main thread only.
    """
    before = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
    heeded = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}

    def heed(number: int, _frame: FrameType | None) -> None:
        for each in heeded:
            signal.signal(each, signal.SIG_DFL)
        act(number)

    for number in heeded:
        signal.signal(number, heed)
    try:
        yield
    finally:
        for number, handler in heeded.items():
            signal.signal(number, handler)


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

    def add(self, number: int) -> None:
        """Note that this signal was received; for any thread."""
        self._received.append(number)
        self.wake()

    def wake(self) -> None:
        """Make `wakeup_fd` readable; for any thread."""
        with suppress(OSError):  # it is readable already, or closed
            self._writer.send(b"\0")

    def pop_received(self) -> list[int]:
        """Return the signals received since the last call, oldest first."""
        return [self._received.popleft() for _ in range(len(self._received))]

    def _collect(self, number: int, _frame: FrameType | None) -> None:
        self._received.append(number)


def _wake(_number: int, _frame: FrameType | None) -> None:
    """Do nothing: that the signal is handled at all is what makes the descriptor readable."""
