"""Work that Ctrl-C does not interrupt."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType, TracebackType
from typing import Final, Self, cast, final

# The functions behind those of `signal`, which take ten times as long: they look for members of enumerations.
_SIGNAL: Final = import_module("_signal")


@final
class InterruptDeferral:
    """Has Ctrl-C (SIGINT) that comes while this is entered take effect when it is left.

    Python calls its handler in the main thread, between any two instructions, and it mostly raises KeyboardInterrupt.
    Other threads are not interrupted, so this changes nothing there.

    Example:
        >>> with InterruptDeferral():
        ...     pass  # Ctrl-C raises KeyboardInterrupt only after this
    """

    __slots__ = ("_came", "_handler", "_is_lifted")

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] | None = None  # that is deferred
        self._came = False
        self._is_lifted = False

    def __enter__(self) -> Self:
        """Defer Ctrl-C from now on."""
        if threading.get_ident() == threading.main_thread().ident:
            handler = _SIGNAL.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = cast("Callable[[int, FrameType | None], object]", handler)
                _SIGNAL.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Let Ctrl-C take effect, also one that has come meanwhile."""
        if self._handler is not None:
            _SIGNAL.signal(signal.SIGINT, self._handler)
            if self._came:
                signal.raise_signal(signal.SIGINT)

    @contextmanager
    def lifted(self) -> Generator[None]:
        """Have Ctrl-C take effect inside this block. Once it has raised an exception, it is deferred again."""
        self._is_lifted = True
        try:
            yield
        finally:
            self._is_lifted = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._is_lifted or self._handler is None:
            self._came = True
            return
        self._is_lifted = False
        self._handler(number, frame)
        self._is_lifted = True  # it has not raised
