"""How it is known of a process on another machine that it still is: it touches a file for as long as it lives.

No two clocks are compared. Who watches looks only for the file's time to change, and measures by its own clock for how
long it has not.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from paceline.stopwatch import Stopwatch

BEAT_S: Final = 2.0
SILENCE_S: Final = 60.0  # much longer than a process that lives may be kept from touching its file


@final
class Pulse:
    """Touches a file, in a thread of its own."""

    def __init__(self, path: Path, beat_s: float = BEAT_S) -> None:
        self._path = path
        self._beat_s = beat_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="paceline-pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Touch it no longer; may be repeated."""
        self._ended.set()
        self._thread.join(self._beat_s)  # a file server that does not answer does not keep this process from ending

    def _beat(self) -> None:
        while not self._ended.wait(self._beat_s):
            with suppress(OSError):  # the job is over and its folder cleared, or the file server is away for a while
                os.utime(self._path)


@final
class Watch:
    """Tells for how long a file has not been touched, as far as whoever asks has seen."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._ran = Stopwatch(BEAT_S, now)
        self._touched_ns: int | None = None
        self._since_s = 0.0

    def silent_s(self, touched_ns: int) -> float:
        """Return for how many seconds the time of the file has been this one; ask every few seconds.

        Time in which whoever asks was stopped does not count: the other may have been stopped with it.
        """
        ran_s = self._ran.look()
        if touched_ns != self._touched_ns:
            self._touched_ns, self._since_s = touched_ns, ran_s
        return ran_s - self._since_s
