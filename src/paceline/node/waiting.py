"""How the threads of a worker wait for each other: one lock, one deadline, and one failure that ends every wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from paceline.errors import DeadlineExceeded, PeerError, ServerLost

_ADVICE: Final = (
    "Values that were pulled before can still be read: save them in the script's except or finally, and start again "
    "from there"
)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How patient a worker is, in seconds: with a silent job (`wait_timeout_s`), with a broken connection.

    With `checks_memory` it overwrites memory of pushes that becomes free, and tells servers what pushes add up to.
    `how_ended` returns how a server of this rank has ended where that is known, else nothing: it is not tried again.
    """

    wait_timeout_s: float = 600.0
    reconnect_timeout_s: float = 5.0
    checks_memory: bool = False
    how_ended: Callable[[int], str] = lambda _: ""


@dataclass(slots=True)
class Waiting:
    """The lock of a worker, and waiting under it.

    Args:
        worker: its rank, for messages.
        patience_s: after this many seconds every wait gives up.
        clock: returns the worker's clock, for messages.
    """

    worker: int
    patience_s: float
    clock: Callable[[], int]
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    failure: str = ""
    failed_as: type[PeerError] = PeerError
    gave_up: bool = False  # a wait has reached its deadline

    @property
    def is_failing(self) -> bool:
        """Whether a call has raised, or the next one will, because a server is lost or has not answered in time."""
        return self.gave_up or (bool(self.failure) and self.failed_as is ServerLost)

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait, under the lock, until `done`; whatever happens this ends by the deadline."""
        deadline = time.monotonic() + self.patience_s
        while not done():
            self.check()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.gave_up = True
                raise DeadlineExceeded(
                    f"worker {self.worker} (clock {self.clock()}) waited {self.patience_s:g} s for {what}"
                )
            self.changed.wait(left_s)

    def check(self) -> None:
        """Raise PeerError if this worker cannot go on."""
        if self.failure:
            raise self.error()

    def error(self) -> PeerError:
        """Return why this worker cannot go on."""
        advice = f". {_ADVICE}" if self.failed_as is ServerLost else ""
        return self.failed_as(f"worker {self.worker} (clock {self.clock()}): {self.failure}{advice}")
