"""Makes the launcher the parent of a process that another process has forked for it.

A process whose parent ends falls to the nearest of its ancestors that takes in orphans. The nursery forks twice and the
process between ends at once; the launcher takes in orphans just then, and so is told of the end of its child like of
any other's. Linux only.
"""

import ctypes
import os
import select
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

PR_SET_CHILD_SUBREAPER: Final = 36
PR_GET_CHILD_SUBREAPER: Final = 37
POLL_INTERVAL_S: Final = 0.001


@contextmanager
def adopting() -> Generator[None]:
    """Take in orphans while entered. Raises OSError where that is not allowed.

    Only for moments: what a worker leaves behind and does not belong to us would be ours too.
    """
    before = ctypes.c_int()
    _prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1))
    try:
        yield
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(before.value))


def wait_adopted(parent: int, channel: socket.socket, timeout_s: float) -> bool:
    """Block until `parent` is the parent of this process.

    False when it still is not after `timeout_s`, or has closed its end of the channel: it wants no child any more.
    """
    deadline_s = time.monotonic() + timeout_s
    while os.getppid() != parent:
        if select.select([channel], [], [], POLL_INTERVAL_S)[0] or time.monotonic() >= deadline_s:
            return False
    return True


def _prctl(option: int, value: object) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
