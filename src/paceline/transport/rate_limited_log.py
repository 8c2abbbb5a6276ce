"""Rate-limited log of refused clients, so that strangers cannot fill a disk with messages."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

Notice = Callable[[str], None]

MAX_LINES: Final = 10  # of one cause within a span
SPAN_S: Final = 1.0


@dataclass(slots=True)
class _Span:
    """The complaints of one cause since `start_s`; `num_untold` of them were counted but not written."""

    start_s: float
    num_told: int = 0
    num_untold: int = 0


@final
class RateLimitedLog:
    """Passes at most 10 complaints per second and cause to `notice`, and the number of the others.

    Causes are a few fixed texts, never chosen by a stranger. A notice that cannot be written (stderr is closed) is
    dropped, and the listener continues. Thread-safe.
    """

    def __init__(self, notice: Notice | None, now: Callable[[], float] = time.monotonic) -> None:
        self._notice = notice
        self._now = now
        self._lock = threading.Lock()
        self._spans: dict[str, _Span] = {}

    def add(self, cause: str, text: str) -> bool:
        """Write a complaint, or only count it; return whether it was written."""
        self.tell_due()
        with self._lock:
            span = self._spans.setdefault(cause, _Span(self._now()))
            if span.num_told < MAX_LINES:
                span.num_told += 1
            else:
                span.num_untold += 1
                return False
        self._tell(text)
        return True

    def patience_ms(self) -> float | None:
        """Return how long there is nothing to write; None for ever."""
        with self._lock:
            untold = [span.start_s for span in self._spans.values() if span.num_untold]
        return max(0.0, min(untold) + SPAN_S - self._now()) * 1000 if untold else None

    def tell_due(self) -> None:
        """Write the numbers of counted complaints for spans that are over."""
        now = self._now()
        with self._lock:
            over = {cause: span for cause, span in self._spans.items() if now - span.start_s >= SPAN_S}
            for cause in over:
                del self._spans[cause]
        self._tell_numbers(over)

    def tell_rest(self) -> None:
        """Write the numbers of all counted complaints, at the end."""
        with self._lock:
            rest, self._spans = self._spans, {}
        self._tell_numbers(rest)

    def _tell_numbers(self, spans: dict[str, _Span]) -> None:
        for cause, span in spans.items():
            if span.num_untold:
                self._tell(f"... and {span.num_untold} more ({cause})")

    def _tell(self, text: str) -> None:
        if self._notice is not None:
            with suppress(OSError):
                self._notice(text)
