"""Reports the error that ended a worker's script, without the frames of Paceline."""

import os
import sys
import traceback
from itertools import takewhile
from pathlib import Path
from types import TracebackType
from typing import Final

from paceline.errors import PacelineError
from paceline.job.environment import wants_traceback

PACKAGE: Final = Path(__file__).parent.parent
INSTALLED: Final = {"site-packages", "dist-packages"}  # folders of packages that the user's code calls


def report_error(error: BaseException, script: str) -> None:
    """Write on stderr what went wrong.

    An error of ours is told in one line with the place in the user's code that led to it, unless a traceback was asked
    for; any other error as Python does, from the script on.
    """
    origin = _from_script(error.__traceback__, script)
    if isinstance(error, PacelineError) and not wants_traceback():
        print(f"paceline: {error}{_place(origin)}", file=sys.stderr, flush=True)
    else:
        sys.__excepthook__(type(error), error.with_traceback(origin), origin)
        if type(error).__module__ == "bdb" and _reads_nothing():  # BdbQuit
            print(
                "paceline: a debugger found no terminal in this worker: `paceline run --debug RANK script.py` gives "
                "one worker this one",
                file=sys.stderr,
            )
        sys.stderr.flush()


def _reads_nothing() -> bool:
    """Return whether standard input is the null device, as workers have it."""
    return os.fstat(0).st_rdev == os.stat(os.devnull).st_rdev


def _from_script(origin: TracebackType | None, script: str) -> TracebackType | None:
    """Leave out the frames that only started the script; all of them when it was not even read."""
    while origin is not None and origin.tb_frame.f_code.co_filename != script:
        origin = origin.tb_next
    return origin


def _place(origin: TracebackType | None) -> str:
    """Say where the user's code called ours, also by way of a package: torch wraps the steps of optimizers."""
    frames = list(takewhile(lambda frame: PACKAGE not in Path(frame.filename).parents, traceback.extract_tb(origin)))
    users = [frame for frame in frames if INSTALLED.isdisjoint(Path(frame.filename).parts)] or frames
    return f"\n  at {users[-1].filename}:{users[-1].lineno}; run with --traceback for more" if users else ""
