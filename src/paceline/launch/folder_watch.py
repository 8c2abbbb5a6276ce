"""Looks into the folder of a job now and then, in a thread, for a process that must not wait for a file server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Final, Generic, Self, TypeVar, final

from paceline.notices import tell

LOOK_S: Final = 1.0
_END_TIMEOUT_S: Final = 1.0  # a file server that does not answer does not keep the process from ending

_Seen = TypeVar("_Seen")


def looks(
    look: Callable[[], _Seen], ending: threading.Event, problem: str, every_s: float = LOOK_S
) -> Generator[_Seen]:
    """Yield what each look sees, with pauses before each, until `ending` is set.

    A look that raises OSError sees nothing: `problem` and the error are told, once until a look succeeds or another
    error comes. A file that is not there is no error: it comes later, or the job is over and its folder cleared.
    """
    told = ""
    while not ending.wait(every_s):
        try:
            seen = look()
        except FileNotFoundError:
            continue
        except OSError as error:
            if str(error) != told:
                tell(f"{problem}: {error}")
            told = str(error)
            continue
        told = ""
        yield seen


@final
class FolderWatch(Generic[_Seen]):
    """What was seen last, looked for once a second while it is entered.

    Args:
        look: returns what is there; what it raises as OSError leaves what was seen before, and is told as by `looks`.
        before: what counts until the first look has come to its end.
        problem: what it means that a look raises OSError.
        every_s: seconds between two looks.

    Example:
        >>> with FolderWatch(lambda: ["server-0.view-1"], [], "the views cannot be seen") as watch:
        ...     watch.seen in ([], ["server-0.view-1"])
        True
    """

    def __init__(self, look: Callable[[], _Seen], before: _Seen, problem: str, every_s: float = LOOK_S) -> None:
        self._ended = threading.Event()
        self._looks = looks(look, self._ended, problem, every_s)
        self._thread = threading.Thread(target=self._run, name="paceline-folder", daemon=True)
        self.seen = before

    def __enter__(self) -> Self:
        """Begin to look."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Look no longer."""
        self._ended.set()
        self._thread.join(_END_TIMEOUT_S)

    def _run(self) -> None:
        for seen in self._looks:
            self.seen = seen
