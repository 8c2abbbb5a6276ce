"""Callbacks for the end of a worker's script, with whether it ended well."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Final, final

from paceline.launch.preemption import EXIT_PREEMPTED

# Of this process, whichever thread asks: what a thread has joined is left when the script ends.
_calls: Final[list[Callable[[bool], None]]] = []


def when_script_ends(call: Callable[[bool], None]) -> None:
    """Have `call(ended_well)` called when the script of this process ends; what it raises is the script's failure."""
    _calls.append(call)


def script_ended(*, well: bool) -> None:
    """Make the calls that were asked for, once."""
    calls = tuple(_calls)
    _calls.clear()
    for call in calls:
        call(well)


def leave_after_crash() -> None:
    """Make the calls when an error ends this process, for a script that `paceline run` does not run."""
    if not isinstance(sys.excepthook, _TellAndLeave):
        sys.excepthook = _TellAndLeave(sys.excepthook)


def ended_well(error: BaseException | None) -> bool:
    """Return whether a script that ended with this error, or none, ended well; a preempted one did.

    >>> ended_well(None), ended_well(SystemExit(0)), ended_well(SystemExit(143)), ended_well(SystemExit("no data"))
    (True, True, True, False)
    """
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0, EXIT_PREEMPTED))


@final
class _TellAndLeave:
    """What Python does about an error that ends the process, and then the calls."""

    def __init__(self, tell: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._tell = tell

    def __call__(self, kind: type[BaseException], error: BaseException, origin: TracebackType | None) -> None:
        self._tell(kind, error, origin)
        script_ended(well=False)
