"""Work that Ctrl-C does not interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupt_deferred() -> Generator[None]:
    """Have Ctrl-C (SIGINT) that comes inside this block take effect at its end.

    Python calls its handler in the main thread, between any two instructions, and it mostly raises KeyboardInterrupt.
    Other threads are not interrupted, so this changes nothing there.

    Example:
        >>> with interrupt_deferred():
        ...     pass  # Ctrl-C raises KeyboardInterrupt only after this
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
