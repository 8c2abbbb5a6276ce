"""The load of a server: busy time and bytes, recorded in the trace, from which shares of servers are planned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.observe.resources import ResourceUsage
from paceline.observe.trace import Load, Trace
from paceline.server.acceptor import Incoming


@dataclass(slots=True)
class LoadMeter:
    """Counts the time in which the server's thread does not wait, and the bytes that arrive."""

    server: int
    now: Callable[[], float] = time.monotonic
    _resources: ResourceUsage = field(default_factory=ResourceUsage)
    # Times of the first and the last item, and the idle time between them.
    _first_t: float | None = None
    _last_t: float = 0.0
    _idle_s: float = 0.0
    _received_bytes: int = 0

    def wait(self, get: Callable[[], object | None]) -> object | None:
        """Return the next item; blocks as `get` does, and counts that as idle."""
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

    def sample(self) -> None:
        """Read the byte counts of connections before one of them closes."""
        self._resources.sample()

    def record(self, trace: Trace, sent_bytes: int) -> None:
        """Write the totals to the trace, unless nothing ever arrived."""
        if self._first_t is not None:
            usage = self._resources.usage()
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
