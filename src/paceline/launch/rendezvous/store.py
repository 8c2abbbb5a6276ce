"""How the processes of a job find the folder of their job, when the one that made it is not their parent.

Nothing secret travels here: the token lies in the folder, which only this user can enter.
"""

import fcntl
import os
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, final

import msgspec

from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.job.environment import asked_folder, cache_folder
from paceline.job.folders import ANOTHER_FOLDER, INTERVAL_SHARED_S, make_private, names_in, wait_for
from paceline.job.machines import Machine
from paceline.job.spec import write_private
from paceline.launch.rendezvous.detect import Detected
from paceline.launch.rendezvous.liveness_lock import is_held

if TYPE_CHECKING:
    from paceline.torch_private import TCPStore

LOCK_TIMEOUT_S: Final = 10.0
STORE_KEY: Final = "paceline/meeting"
SUFFIX: Final = ".meeting"
LOCK_NAME: Final = ".lock"


class Invitation(msgspec.Struct, frozen=True):
    """Where the folder of a job is, which machine made it, and the paceline that runs there."""

    run_dir: str
    machine: Machine
    version: str = ""

    @staticmethod
    def read(content: bytes, where: str) -> "Invitation":
        """Read what was told at a place; raises UsageError when it is no invitation."""
        try:
            return msgspec.json.decode(content, type=Invitation)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UsageError(
                f"what {where} says is no invitation to a job ({error}): does another version of paceline run there?"
            ) from error


class JobRefusal(msgspec.Struct, frozen=True):
    """Why there is no job, in the words of the process that was to set it up, and its machine."""

    reason: str
    machine: Machine

    def error(self) -> UsageError:
        """Return what the others of the job end with."""
        return UsageError(f"the first process of the job, on {self.machine}, does not start it: {self.reason}")


class RendezvousStore(Protocol):
    """Where one process of a job tells the others where they meet."""

    def invite(self, invitation: Invitation) -> None:
        """Tell it; raises UsageError when another process has."""
        ...

    def refuse(self, refusal: JobRefusal) -> None:
        """Tell it in the place of an invitation; nothing where there is one. Raises OSError and PacelineError."""
        ...

    def wait_invitation(self, timeout_s: float) -> Invitation:
        """Block until it is told; raises DeadlineExceeded when it is not in time, UsageError for a refusal."""
        ...

    def close(self) -> None:
        """Take back what was told here. May be repeated."""
        ...


def open_store(detected: Detected) -> RendezvousStore:
    """Return the store that the launcher has, or else files in a folder that all processes see."""
    if detected.has_store and detected.master is not None:
        return TorchRendezvous(*detected.master, detected.restart)
    return FolderRendezvous(asked_folder() or cache_folder(), detected.key)


@final
class TorchRendezvous:
    """A store of torch that the launcher runs: of this run, and with a key for each time that it starts the workers."""

    def __init__(self, host: str, port: int, restart: int) -> None:
        self._where = f"{host}:{port}"
        self._host = host
        self._port = port
        self._key = f"{STORE_KEY}/{restart}"

    def invite(self, invitation: Invitation) -> None:
        """Tell it; see `RendezvousStore.invite`."""
        store = self._connect(10.0)
        if store.add(f"{self._key}/count", 1) > 1:
            raise UsageError(
                f"the store of the launcher at {self._where} names a meeting for this start of the workers already: a "
                "process joins its job once"
            )
        store.set(self._key, msgspec.json.encode(invitation).decode())

    def refuse(self, refusal: JobRefusal) -> None:
        """Tell it; see `RendezvousStore.refuse`."""
        store = self._connect(10.0)
        if store.add(f"{self._key}/count", 1) == 1:
            store.set(self._key, msgspec.json.encode(refusal).decode())

    def wait_invitation(self, timeout_s: float) -> Invitation:
        """Block until it is told; see `RendezvousStore.wait_invitation`."""
        deadline_s = time.monotonic() + timeout_s
        store = self._connect(timeout_s)
        try:
            store.wait([self._key], timedelta(seconds=max(0.001, deadline_s - time.monotonic())))
            told = _read_told(store.get(self._key), f"the store of the launcher at {self._where}")
        except RuntimeError as error:
            raise DeadlineExceeded(
                f"rank 0 has not told {socket.gethostname()} within {timeout_s:g} s where the job meets, in the store "
                f"of the launcher at {self._where}: is it there, and does it call paceline.init()? "
                f"({_first_line(error)})"
            ) from error
        return _accepted(told)

    def close(self) -> None:
        """Leave the store as it is: it ends with the launcher."""

    def _connect(self, timeout_s: float) -> "TCPStore":
        from paceline.torch_private import TCPStore

        try:
            return TCPStore(self._host, self._port, is_master=False, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerError(
                f"the store of the launcher at {self._where} does not answer within {timeout_s:g} s: "
                f"{_first_line(error)}"
            ) from error


@final
class FolderRendezvous:
    """A file in a folder, which the inviting process holds locked: one that is not locked is of an earlier run.

    A refusal stays when its process has ended, without a lock. It counts for processes that began before it was told: a
    later run of the same name begins after it.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / f"{key}{SUFFIX}"
        self._descriptor: int | None = None

    def invite(self, invitation: Invitation) -> None:
        """Tell it in place of what an earlier run may have told here; see `RendezvousStore.invite`."""
        make_private(self._path.parent, ANOTHER_FOLDER)
        with _locked(self._path.parent):
            if isinstance(_read(self._path), Invitation):
                raise UsageError(
                    f"another run has the same name, and goes on: it holds {self._path} locked. Wait until it has "
                    "ended, or let PACELINE_RUN_DIR name another folder for each"
                )
            _sweep(self._path.parent)
            unfinished = self._path.with_name(f".{self._path.name}.{socket.gethostname()}.{os.getpid()}")
            self._descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            os.write(self._descriptor, msgspec.json.encode(invitation))
            os.fsync(self._descriptor)  # for other machines too, though the file stays open
            unfinished.rename(self._path)

    def refuse(self, refusal: JobRefusal) -> None:
        """Tell it; see `RendezvousStore.refuse`."""
        make_private(self._path.parent, ANOTHER_FOLDER)
        with _locked(self._path.parent):
            if not isinstance(_read(self._path), Invitation):
                write_private(self._path, msgspec.json.encode(refusal))

    def wait_invitation(self, timeout_s: float) -> Invitation:
        """Block until it is told; see `RendezvousStore.wait_invitation`."""
        make_private(self._path.parent, ANOTHER_FOLDER)  # else the first process can tell nothing in it
        told = wait_for(
            lambda: _read(self._path) if self._path.name in names_in(self._path.parent) else None,
            timeout_s,
            lambda: (
                f"the first process of the job has not told within {timeout_s:g} s where the job meets, in "
                f"{self._path} on {socket.gethostname()}: is it there, or has the job ended, does it call "
                "paceline.init(), and does it see this folder? On several machines let PACELINE_RUN_DIR name one that "
                "all of them see"
            ),
            INTERVAL_SHARED_S,
        )
        return _accepted(told)

    def close(self) -> None:
        """Remove the file."""
        if self._descriptor is None:
            return
        self._path.unlink(missing_ok=True)
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)
        self._descriptor = None


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold the lock on the files of this folder while entered; other holders release it in a moment."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)

    def try_lock() -> bool | None:
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return None

    try:
        wait_for(
            try_lock,
            LOCK_TIMEOUT_S,
            lambda: (
                f"another process holds {folder / LOCK_NAME} locked for {LOCK_TIMEOUT_S:g} s already, which it should "
                "for a moment: is it stopped? End it, or let PACELINE_RUN_DIR name another folder"
            ),
        )
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that was forked meanwhile may have the file open still
        os.close(descriptor)


def _read(path: Path) -> Invitation | JobRefusal | None:
    """Return what a process that still lives tells in this file, or a refusal since this process began."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise UsageError(f"{path} belongs to another user: it is not from this job. Remove it")
        if is_held(descriptor):
            return _read_told(file.read(), str(path))
        return _as_refusal(file.read()) if os.fstat(descriptor).st_mtime >= _began_s() else None


def _began_s() -> float:
    """Return when this process was started, in seconds since 1970."""
    import psutil  # deferred: few processes are refused

    return psutil.Process().create_time()


def _read_told(content: bytes, where: str) -> Invitation | JobRefusal:
    """Read what was told at a place; raises UsageError when it is neither."""
    return _as_refusal(content) or Invitation.read(content, where)


def _as_refusal(content: bytes) -> JobRefusal | None:
    with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(content, type=JobRefusal)
    return None


def _accepted(told: Invitation | JobRefusal) -> Invitation:
    """Return an invitation; raises UsageError for a refusal."""
    if isinstance(told, JobRefusal):
        raise told.error()
    return told


def _sweep(folder: Path) -> None:
    """Remove what processes have left here that were killed."""
    for path in folder.glob(f"*{SUFFIX}"):
        if _read(path) is None:
            path.unlink(missing_ok=True)


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
