"""Who takes part in a job that nobody watches over: each worker holds a file locked for as long as it does.

The kernel lets go of a lock when its process ends, however it ends, and whoever waits for it is told at once. In a
folder that several machines see, locks are those of its file server: one of a machine that is gone stays until the file
server gives it up.
"""

import errno
import fcntl
import os
import socket
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Final, final

import msgspec

from paceline.errors import UsageError
from paceline.launch.entering.cards import Card
from paceline.launch.entering.detect import Role
from paceline.launch.entering.pulse import SILENCE_S, Pulse, Watch
from paceline.launch.folders import names_in

SUFFIX: Final = ".life"
POLL_INTERVAL_S: Final = 0.25


@final
class Presence:
    """The file that this process holds locked."""

    def __init__(self, path: Path, descriptor: int, index: int) -> None:
        self.index: Final = index
        self._path = path
        self._descriptor: int | None = descriptor
        self._pulse: Pulse | None = None

    @staticmethod
    def begin(run_dir: Path, role: Role, index: int | None, count: int) -> "Presence":
        """Take part as this one of `count`, or as the first that nobody is yet.

        Raises UsageError when another process is.
        """
        unfinished = run_dir / f".{role}.{socket.gethostname()}.{os.getpid()}"
        with ExitStack() as undo:
            descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            undo.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)  # before anybody can see the file, who would take us for dead
                os.write(descriptor, msgspec.json.encode(Card.own()))
                os.fsync(descriptor)  # for other machines too, though the file stays open
                for one in range(count) if index is None else (index,):
                    path = run_dir / _name(role, one)
                    if _link(unfinished, path):
                        undo.pop_all()
                        return Presence(path, descriptor, one)
            finally:
                unfinished.unlink()
        who = f"all {count} {role}s are" if index is None else f"{role} {index} is"
        raise UsageError(
            f"{who} there already: another process has taken this place, or this one joined before and has left. Start "
            "the job again, and join it once"
        )

    def show(self) -> None:
        """Let other machines see from now on that this process lives."""
        self._pulse = Pulse(self._path)

    def end(self) -> None:
        """Take part no longer; may be repeated."""
        if self._descriptor is None:
            return
        if self._pulse is not None:
            self._pulse.end()
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child that was forked may have the file open still
        os.close(self._descriptor)
        self._descriptor = None


def absent(run_dir: Path, role: Role, count: int) -> list[int]:
    """Return those of a role who have never come."""
    present = names_in(run_dir)
    return [index for index in range(count) if _name(role, index) not in present]


def card(run_dir: Path, role: Role, index: int) -> Card:
    """Return what one who has come tells of itself; raises UsageError when that cannot be read."""
    path = run_dir / _name(role, index)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Card)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} does not say where {role} {index} runs ({error}): does it run another version of paceline?"
        ) from error


def wait_end(run_dir: Path, role: Role, index: int) -> None:
    """Block until one who has come takes part no longer, be it left or dead."""
    try:
        descriptor = os.open(run_dir / _name(role, index), os.O_RDWR)
    except FileNotFoundError:  # the job is over, and its folder is cleared
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    finally:
        os.close(descriptor)


def wait_end_elsewhere(run_dir: Path, role: Role, index: int, silence_s: float = SILENCE_S) -> bool:
    """Block as `wait_end` does, for one that may be on another machine and shows that it lives.

    Returns False when it has not for `silence_s`, though it holds its lock still: its machine is gone, and the file
    server has not noticed; or it is stopped.
    """
    watch, pause = Watch(), threading.Event()
    while True:
        try:
            descriptor = os.open(run_dir / _name(role, index), os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            if not is_held(descriptor):
                return True
            if watch.silent_s(os.fstat(descriptor).st_mtime_ns) >= silence_s:
                return False
        finally:
            os.close(descriptor)
        pause.wait(POLL_INTERVAL_S)  # to block could take longer: a client of NFS asks for a lock ever less often


def takes_part(run_dir: Path, role: Role, index: int) -> bool:
    """Tell whether one who has come still takes part; does not block."""
    try:
        descriptor = os.open(run_dir / _name(role, index), os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return is_held(descriptor)
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


def _name(role: Role, index: int) -> str:
    return f"{role}-{index}{SUFFIX}"


def _link(existing: Path, path: Path) -> bool:
    try:
        os.link(existing, path)
    except FileExistsError:
        return False
    return True
