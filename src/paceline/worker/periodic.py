"""A thread that calls a function at intervals until it is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

_JOIN_TIMEOUT_S = 5.0


@dataclass(slots=True)
class PeriodicThread:
    """Calls `act` every `pause_s` seconds on its own thread, until `stop` or until it returns False."""

    pause_s: float
    act: Callable[[], bool]
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        """Create the thread without starting it."""
        self._thread = threading.Thread(target=self._run, name="paceline-time", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Make no more calls; does not wait for one that is running."""
        self._stopping.set()

    def join(self) -> None:
        """Wait for the thread to end, if it was started."""
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        while not self._stopping.wait(self.pause_s) and self.act():
            pass
