"""Makes the launcher the parent of processes whose own parent has ended.

A process whose parent ends falls to the nearest of its ancestors that is a subreaper. The fork server forks twice and
the process between ends at once; the launcher is a subreaper, and so is told of the end of its child like of any other.
What members of the job leave behind falls to the launcher, too, and ends with the job. Linux only.
"""

import ctypes
import os
import select
import socket
import time
from collections.abc import Collection, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, Self, final

from paceline.launch.guard import CLEANING_TIMEOUT_S, Guard, cleans_up, kill_each

PR_SET_CHILD_SUBREAPER: Final = 36
PR_GET_CHILD_SUBREAPER: Final = 37
POLL_INTERVAL_S: Final = 0.001
END_TIMEOUT_S: Final = 5.0
MOST_LOOKS: Final = 100  # for children, while threads end


@contextmanager
def adopting() -> Generator[None]:
    """Take in orphans while entered. Raises OSError where that is not allowed."""
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


@final
class Orphans:
    """What members of a job have left behind and has fallen to this process; whatever else it starts is its own.

    A context manager: leaving it kills what is left, but what cleans up after others and ends by itself in time. While
    it is entered the guard watches over them, too.
    """

    def __init__(self, guard: Guard) -> None:
        """Plan it."""
        self._guard = guard
        self._watched: set[int] = set()

    def __enter__(self) -> Self:
        """Take in orphans from now on, where that is allowed."""
        self._before, self._restoring = _children(), ExitStack()
        with suppress(OSError, AttributeError):  # no such call in this kernel, or on this system
            self._restoring.enter_context(adopting())
        return self

    def __exit__(self, *error: object) -> None:
        """Kill them all; what they have started falls to this process then, and is killed, too."""
        deadline_s = time.monotonic() + END_TIMEOUT_S
        cleaning_until_s = time.monotonic() + CLEANING_TIMEOUT_S
        with self._restoring:
            while (left := self.reap()) and time.monotonic() < deadline_s:
                kill_each(pid for pid in left if time.monotonic() > cleaning_until_s or not cleans_up(pid))
                time.sleep(POLL_INTERVAL_S)

    def reap(self, members: Collection[int] = ()) -> set[int]:
        """Release adopted processes that have ended; return the others. `members` are children that it started."""
        children = _children() - self._before
        found = children - set(members)
        for pid in found - self._watched:
            self._guard.watch_process(pid)
        for pid in self._watched & (children - found):  # it was forked ahead, and is a member now
            self._guard.forget_process(pid)
        self._watched = set(found)
        return {pid for pid in found if not self._release(pid)}

    def _release(self, pid: int) -> bool:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self._watched.discard(pid)
        self._guard.forget_process(pid)
        os.waitpid(pid, 0)
        return True


def _children() -> set[int]:
    """Return the children of this process, as far as the kernel tells."""
    for _ in range(MOST_LOOKS):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread has ended: its children are another one's now
            return _look_for_children()
    return _look_for_children()


def _look_for_children() -> set[int]:
    found = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in found for pid in path.read_text().split()}


def _prctl(option: int, value: object) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
