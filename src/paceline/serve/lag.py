"""How many clocks replicas may lag: servers that stand in for each other agree on it in their folder of views.

    VIEWS/lag    the number, of the server that came first

It is one number: what clients keep for a server that comes to serve, they keep from their start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from paceline.errors import UsageError
from paceline.job.folders import make_once, make_private
from paceline.job.spec import MAX_LAG

_OTHER: Final = "name another folder for --views"
_NAME: Final = "lag"


def agree_on_lag(views: Path, lag: int) -> None:
    """Have the servers of a folder of views agree on the lag of replicas, in clocks; the first one decides.

    Raises UsageError as `check_lag`.
    """
    if check_lag(views, lag):
        return
    try:
        make_once(views / _NAME, str(lag).encode())
    except OSError as error:
        raise _unusable(views, error) from error
    check_lag(views, lag)


def check_lag(views: Path, lag: int) -> bool:
    """Return whether the servers of a folder of views have agreed on this lag; False where none has come.

    Raises UsageError: they have agreed on another number, it is none that may be, or the folder cannot be used.
    """
    if not 0 <= lag <= MAX_LAG:
        raise UsageError(f"--lag is {lag}, expected a number of clocks from 0 to {MAX_LAG}")
    make_private(views, _OTHER)
    file = views / _NAME
    try:
        agreed = file.read_text()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _unusable(views, error) from error
    if agreed != str(lag):
        raise UsageError(
            f"--lag is {lag}, and {agreed[:80]!r} for the servers that came before, as {file} says: what clients keep "
            f"depends on it. Start this one with the same; to change it, end all servers, and remove {file}"
        )
    return True


def _unusable(views: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot use the folder {views}: {error.strerror}; {_OTHER}")
