"""How hard a server works: what the record of a run says of it, for whoever shares out tables by that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.observe.resources import ResourceUsage
from paceline.observe.trace import Load, Trace
from paceline.server.acceptor import Incoming


@dataclass(slots=True)
class LoadMeter:
    """Counts the time that a server's thread does not wait, and what comes in meanwhile."""

    server: int
    now: Callable[[], float] = time.monotonic
    _odometer: ResourceUsage = field(default_factory=ResourceUsage)
    # From the first item to the last, and of that without work.
    _first_t: float | None = None
    _last_t: float = 0.0
    _idle_s: float = 0.0
    _received_bytes: int = 0

    def wait(self, get: Callable[[], object | None]) -> object | None:
        """Return the next item, which `get` may have to wait for."""
        began_t = self.now()
        item = get()
        if not isinstance(item, Incoming):
            return item
        self._last_t = self.now()
        if self._first_t is None:
            self._first_t = self._last_t
        else:
            self._idle_s += self._last_t - began_t
        self._received_bytes += 0 if item.frame is None else len(item.frame.body)
        return item

    def look(self) -> None:
        """See what connections have carried: one of them may be about to end."""
        self._odometer.look()

    def record(self, trace: Trace, sent_bytes: int) -> None:
        """Write down the whole, unless nothing ever came."""
        if self._first_t is not None:
            usage = self._odometer.usage()
            in_use_s = self._last_t - self._first_t
            sending_s = 0.0 if usage is None else usage.sending_s
            trace.record(
                Load(
                    self.now(),
                    self.server,
                    in_use_s,
                    in_use_s - self._idle_s,
                    sending_s,
                    self._received_bytes,
                    sent_bytes,
                )
            )
