"""Told to leave: a worker answers signals by which machines are taken away when its step is over, not in the middle.

A first signal is only noted, and heeded where a step ends. A second one ends the process at once, and so does the first
where nobody is going to heed it: in what a worker has forked, after it has left, and once the run is over anyhow.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Final, final

# What ends a process politely, and what Slurm's --signal sends ahead of that as its users ask for.
TELLING: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
EXIT_TOLD: Final = 128 + signal.SIGTERM
CALLED_OFF_NAME: Final = "called.off"  # in the folder of a job whose workers are to end at once
# Who stops a whole group of processes tells each of them, and our launcher then tells its workers once more.
ONE_ORDER_S: Final = 1.0


@final
class PreemptionNotice:
    """Whether this process was told to leave.

    Args:
        called_off: a file that appears when a run ends for another reason, and nothing is worth finishing.
        now: monotonic seconds.
    """

    def __init__(self, called_off: Path | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self._called_off = called_off
        self._now = now
        self._told_at_s: float | None = None
        self._script_decides = False
        # Returns whether the script may be saving what it holds, as the job has failed it: it is not cut short.
        self.may_save: Callable[[], bool] = lambda: False
        self._listener: int | None = None  # the process that is told, while it listens: not what it forks

    def listen(self) -> None:
        """Note such signals from now on, but for those for which the script has a handler of its own, or ignores.

        Does nothing outside of the main thread, where there are no signals.
        """
        if threading.current_thread() is threading.main_thread():
            self._listener = os.getpid()
            for number in TELLING:
                if signal.getsignal(number) is signal.SIG_DFL and not _is_caught(number):
                    signal.signal(number, self._note)

    def close(self) -> None:
        """Let the signals do what they did before, unless one has come: its process is ending, and not to be cut short.

        May be repeated. Does nothing outside of the main thread, as `listen`.
        """
        if self._told_at_s is None and threading.current_thread() is threading.main_thread():
            self._listener = None
            for number in TELLING:
                if signal.getsignal(number) == self._note:
                    signal.signal(number, signal.SIG_DFL)

    def ask(self) -> bool:
        """Return whether this process was told to leave, for a script that sees to that itself from now on."""
        self._script_decides = True
        return self._told_at_s is not None

    def heed(self, leave: Callable[[], None]) -> None:
        """Leave and raise SystemExit(143) if this process was told to, and its script has never asked."""
        if self._told_at_s is not None and not self._script_decides:
            leave()
            raise SystemExit(EXIT_TOLD)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        now = self._now()
        is_first = self._told_at_s is None or now - self._told_at_s < ONE_ORDER_S
        is_wanted = self._called_off is None or not self._called_off.exists() or self.may_save()
        if self._listener == os.getpid() and is_first and is_wanted:
            self._told_at_s = now if self._told_at_s is None else self._told_at_s
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


def ignore_telling() -> None:
    """Ignore such signals: for processes that end after the workers whom they serve. Call it in the main thread."""
    for number in TELLING:
        signal.signal(number, signal.SIG_IGN)
