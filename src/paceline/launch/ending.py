"""How a worker's script ended, and what is to be done about it before the process ends."""

from collections.abc import Callable
from contextvars import ContextVar

_calls: ContextVar[tuple[Callable[[bool], None], ...]] = ContextVar("paceline_script_end", default=())


def when_script_ends(call: Callable[[bool], None]) -> None:
    """Have `call(ended_well)` called when the script of this worker ends; what it raises is the script's failure."""
    _calls.set((*_calls.get(), call))


def script_ended(*, well: bool) -> None:
    """Make the calls that were asked for, once."""
    calls = _calls.get()
    _calls.set(())
    for call in calls:
        call(well)


def ended_well(error: BaseException | None) -> bool:
    """Tell whether a script that ended with this error, or none, did what it was meant to.

    >>> ended_well(None), ended_well(SystemExit(0)), ended_well(SystemExit("no data"))
    (True, True, False)
    """
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
