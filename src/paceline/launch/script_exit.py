"""The end of a worker's script: reports its error, and tells callbacks whether it ended well."""

import os
import sys
import traceback
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Final, final

from paceline.errors import EXIT_PREEMPTED, PacelineError
from paceline.job.environment import wants_traceback

PACKAGE: Final = Path(__file__).parent.parent
INSTALLED: Final = {"site-packages", "dist-packages"}  # folders of packages that the user's code calls
STANDARD: Final = Path(os.__file__).parent  # Python's own modules: contextlib enters context managers
# Of this process, whichever thread asks: what a thread has joined is left when the script ends.
_calls: Final[list[Callable[[bool], None]]] = []


def report_error(error: BaseException, script: str) -> None:
    """Write on stderr what went wrong.

    An error of ours is told in one line with the place in the user's code that led to it, unless a traceback was asked
    for; any other error as Python does, from the script on.
    """
    origin = _from_script(error.__traceback__, script)
    if isinstance(error, PacelineError) and not wants_traceback():
        # One write, with the end of its line: else the lines of other processes may come in between.
        sys.stderr.write(f"paceline: {error}{_place(origin)}\n")
        sys.stderr.flush()
    else:
        sys.__excepthook__(type(error), error.with_traceback(origin), origin)
        tell_of_debugger(error)
        sys.stderr.flush()


def tell_of_debugger(error: BaseException) -> None:
    """Write on stderr where a terminal comes from, if a debugger that found none has ended the script."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_by_pdb = (
        isinstance(error, SystemExit) and frames and frames[-1].f_globals.get("__name__") == "pdb"
    )  # from 3.14 on
    if (is_by_pdb or type(error).__module__ == "bdb") and _reads_nothing():  # BdbQuit
        sys.stderr.write(
            "paceline: a debugger found no terminal in this worker: `paceline run --debug RANK script.py` gives "
            "one worker this one\n"
        )


def _reads_nothing() -> bool:
    """Return whether standard input is the null device, as workers have it."""
    return os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev


def _from_script(origin: TracebackType | None, script: str) -> TracebackType | None:
    """Leave out the frames that only started the script; all of them when it was not even read."""
    while origin is not None and origin.tb_frame.f_code.co_filename != script:
        origin = origin.tb_next
    return origin


def _place(origin: TracebackType | None) -> str:
    """Return where the user's code called ours, also by way of a package: torch wraps the steps of optimizers."""
    frames = list(takewhile(lambda frame: PACKAGE not in Path(frame.filename).parents, traceback.extract_tb(origin)))
    users = [frame for frame in frames if _is_users(Path(frame.filename))] or frames
    return f"\n  at {users[-1].filename}:{users[-1].lineno}; run with --traceback for more" if users else ""


def _is_users(file: Path) -> bool:
    return INSTALLED.isdisjoint(file.parts) and STANDARD not in file.parents


def when_script_ends(call: Callable[[bool], None]) -> None:
    """Have `call(ended_well)` called when the script of this process ends; what it raises is the script's failure."""
    _calls.append(call)


def will_leave() -> bool:
    """Return whether there is something to leave: whether this process has joined a job since it began."""
    return bool(_calls)


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
