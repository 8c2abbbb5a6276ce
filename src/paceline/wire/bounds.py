"""What one request may have a server make or keep: looked at before memory is taken, and before any long arithmetic.

The page about attacks lists all of them, by message. What a worker of ours sends is cut so that it stays within them.
"""

from __future__ import annotations

from typing import Final

from paceline.errors import UsageError
from paceline.update.table import MAX_NAME

MAX_IDS: Final = 1 << 20  # of one read of rows, and of one list of rows that a worker keeps no longer
MAX_READ_NUMBERS: Final = 1 << 21  # in the answer to one read: first values are computed, a tenth of a second a million
MAX_WAITING_READ_BYTES: Final = 1 << 30  # of the answers that one worker waits for, of one table
MAX_PUSH_BYTES: Final = 1 << 30  # of rows in one push
MAX_HEARD_BYTES: Final = 1 << 29  # of answers that are kept for one worker, and of what waits to be done for it


def most_rows(width: int) -> int:
    """Return how many rows one read may ask for, where a row and its echo have so many numbers.

    >>> most_rows(16), most_rows(1 << 21)
    (131072, 1)
    """
    return max(1, min(MAX_IDS, MAX_READ_NUMBERS // width))


def require_short(what: str, name: str) -> None:
    """Raise UsageError for a name that is too long to be kept."""
    if len(name) > MAX_NAME:
        raise UsageError(f"the name of {what} has {len(name)} characters, expected at most {MAX_NAME}")
