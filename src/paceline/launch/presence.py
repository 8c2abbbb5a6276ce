"""Who takes part in a job that nobody watches over: each worker holds a file locked for as long as it does.

The kernel lets go of a lock when its process ends, however it ends, and whoever waits for it is told at once.
"""

import errno
import fcntl
import os
from pathlib import Path
from typing import Final, final

from paceline.errors import UsageError
from paceline.launch.detect import Role

SUFFIX: Final = ".life"


@final
class Presence:
    """The file that this process holds locked."""

    def __init__(self, descriptor: int, index: int) -> None:
        self.index: Final = index
        self._descriptor: int | None = descriptor

    @staticmethod
    def begin(run_dir: Path, role: Role, index: int | None, count: int) -> "Presence":
        """Take part as this one of `count`, or as the first that nobody is yet.

        Raises UsageError when another process is.
        """
        unfinished = run_dir / f".{role}.{os.getpid()}"
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # before anybody can see the file, who would take us for dead
            for one in range(count) if index is None else (index,):
                if _link(unfinished, _path(run_dir, role, one)):
                    return Presence(descriptor, one)
        finally:
            unfinished.unlink()
        os.close(descriptor)
        who = f"all {count} {role}s are" if index is None else f"{role} {index} is"
        raise UsageError(
            f"{who} there already: another process has taken this place, or this one joined before and has left. Start "
            "the job again, and join it once"
        )

    def end(self) -> None:
        """Take part no longer; may be repeated."""
        if self._descriptor is None:
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child that was forked may have the file open still
        os.close(self._descriptor)
        self._descriptor = None


def absent(run_dir: Path, role: Role, count: int) -> list[int]:
    """Return those of a role who have never come."""
    return [index for index in range(count) if not _path(run_dir, role, index).exists()]


def wait_end(run_dir: Path, role: Role, index: int) -> None:
    """Block until one who has come takes part no longer, be it left or dead."""
    try:
        descriptor = os.open(_path(run_dir, role, index), os.O_RDWR)
    except FileNotFoundError:  # the job is over, and its folder is cleared
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def is_held(descriptor: int) -> bool:
    """Tell whether another process holds this file locked; does not block."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno != errno.EWOULDBLOCK:
            raise
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _path(run_dir: Path, role: Role, index: int) -> Path:
    return run_dir / f"{role}-{index}{SUFFIX}"


def _link(existing: Path, path: Path) -> bool:
    try:
        os.link(existing, path)
    except FileExistsError:
        return False
    return True
