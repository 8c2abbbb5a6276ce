"""The thread that sends what waits for a budget, while its worker computes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.node.waiting import Waiting

_JOIN_TIMEOUT_S = 5.0


@dataclass(slots=True)
class SendingThread:
    """Calls `act` under the worker's lock when woken, and again as it asks for; ends with `stop`, or if it fails.

    Args:
        waiting: the lock.
        act: does what may be done at this time; returns after how many seconds to call it again, None for when woken.
        fail: told why nothing will be sent any more.
    """

    waiting: Waiting
    act: Callable[[float], float | None]
    fail: Callable[[str], None]
    _awake: threading.Event = field(default_factory=threading.Event)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, if it has not."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="paceline-sending", daemon=True)
            self._thread.start()

    def wake(self) -> None:
        """Have `act` called soon."""
        self._awake.set()

    def stop(self) -> None:
        """Call no more; does not wait for a call under way."""
        self._stopping.set()
        self._awake.set()

    def join(self) -> None:
        """Wait for the thread to end, if it was started."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=_JOIN_TIMEOUT_S)

    def _run(self) -> None:
        pause_s: float | None = None
        while not self._stopping.is_set():
            self._awake.wait(pause_s)
            self._awake.clear()
            with self.waiting.changed:
                pause_s = self._act()

    def _act(self) -> float | None:
        """Act unless stopped. An error ends the thread, and whoever waits is told before the lock is free."""
        if self._stopping.is_set():
            return None
        has_failed = True
        try:
            pause_s = self.act(time.monotonic())
            has_failed = False
        finally:
            if has_failed:
                self.fail("the thread that sends rows has failed; the traceback is on stderr")
        return pause_s
