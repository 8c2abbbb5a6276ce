"""Waiting for what other processes write into a folder: of a file on another machine no kernel tells, so one looks."""

import time
from collections.abc import Callable
from typing import Final, TypeVar

from paceline.errors import DeadlineExceeded
from paceline.stopwatch import Stopwatch

INTERVAL_S: Final = 0.005
INTERVAL_SHARED_S: Final = 0.05  # where each look is a question to a file server

_Found = TypeVar("_Found")


def wait_for(
    look: Callable[[], _Found | None], timeout_s: float, late: Callable[[], str], interval_s: float = INTERVAL_S
) -> _Found:
    """Look, with pauses in between, until something is found, and return it.

    Raises DeadlineExceeded with what `late` says when nothing is after `timeout_s`; whatever `look` raises comes out.

    >>> wait_for(iter([None, "spec.json"]).__next__, 1.0, lambda: "it was not written")
    'spec.json'
    """
    watch = Stopwatch()
    while (found := look()) is None:
        if watch.elapsed_s() >= timeout_s:
            raise DeadlineExceeded(late())
        time.sleep(interval_s)
    return found
