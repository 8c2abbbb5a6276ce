"""Limits on what one request may make a server compute or keep, checked before any allocation or long computation.

The page about attacks lists all of them, by message. Paceline's own workers split their requests to stay within them.
"""

from __future__ import annotations

from typing import Final

from paceline.errors import UsageError
from paceline.update.table import MAX_NAME

SMALL_BYTES: Final = 64 << 10  # a body that is accepted unchecked; an invalid one is refused later, with a reason
MAX_IDS: Final = 1 << 20  # in one read of rows, or in one `Unsubscribe`
MAX_READ_NUMBERS: Final = 1 << 21  # in the answer to one read; a million first values take a tenth of a second
MAX_WAITING_READ_BYTES: Final = 1 << 30  # in all answers about one table that one worker waits for
MAX_PUSH_BYTES: Final = 1 << 30  # of rows in one push
MAX_JOINED_BYTES: Final = 128 << 10  # of several pushes in one frame, which are copied into one body
MAX_HEARD_BYTES: Final = 1 << 29  # of one worker's kept answers, and of its waiting requests


def most_rows(width: int) -> int:
    """Return how many rows one read may request when a row and its echo have `width` numbers together.

    >>> most_rows(16), most_rows(1 << 21)
    (131072, 1)
    """
    return max(1, min(MAX_IDS, MAX_READ_NUMBERS // width))


def require_short(what: str, name: str) -> None:
    """Raise UsageError for a name longer than MAX_NAME."""
    if len(name) > MAX_NAME:
        raise UsageError(f"the name of {what} has {len(name)} characters, expected at most {MAX_NAME}")
