"""Work that Ctrl-C does not interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import Final, final

# The functions behind those of `signal`, which take ten times as long: they look for members of enumerations.
_SIGNAL: Final = import_module("_signal")


@final
@dataclass(slots=True)
class InterruptDeferral:
    """Whether Ctrl-C is deferred now: it is, except inside `lifted`."""

    is_lifted: bool = False

    @contextmanager
    def lifted(self) -> Generator[None]:
        """Have Ctrl-C take effect inside this block. Once it has raised an exception, it is deferred again."""
        self.is_lifted = True
        try:
            yield
        finally:
            self.is_lifted = False


@contextmanager
def interrupt_deferred() -> Generator[InterruptDeferral]:
    """Have Ctrl-C (SIGINT) that comes inside this block take effect at its end.

    Python calls its handler in the main thread, between any two instructions, and it mostly raises KeyboardInterrupt.
    Other threads are not interrupted, so this changes nothing there.

    Example:
        >>> with interrupt_deferred():
        ...     pass  # Ctrl-C raises KeyboardInterrupt only after this
    """
    deferral = InterruptDeferral()
    handler = _SIGNAL.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield deferral
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if not deferral.is_lifted:
            came.append(number)
            return
        deferral.is_lifted = False
        handler(number, frame)
        deferral.is_lifted = True  # it has not raised

    _SIGNAL.signal(signal.SIGINT, note)
    try:
        yield deferral
    finally:
        _SIGNAL.signal(signal.SIGINT, handler)
        if came:
            signal.raise_signal(signal.SIGINT)
