"""Folders in which the processes of a job meet, which may be of a file server that several machines see.

No kernel tells of a file that another machine writes, so waiting for one means looking again and again.
"""

import errno
import os
import pwd
import secrets
import stat
import sys
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Final, TypeVar

from paceline.errors import DeadlineExceeded, UsageError
from paceline.stopwatch import Stopwatch

ANOTHER_FOLDER: Final = "name another folder, PACELINE_RUN_DIR=..."  # for what processes of a job meet in
INTERVAL_S: Final = 0.005
_SUPERUSER: Final = 0
INTERVAL_SHARED_S: Final = 0.05  # where each look is a question to a file server

_Found = TypeVar("_Found")


def names_in(folder: Path) -> set[str]:
    """Return the names of the files in a folder, none where it is gone.

    A client of NFS may keep for half a minute that a file is not there, unless it opens the folder itself.
    """
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


@contextmanager
def naming(path: Path) -> Generator[None]:
    """Have an OSError that says no file, as one of a full disk, name this one."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def make_once(path: Path, content: bytes) -> bool:
    """Make a file of mode 0600, whole at once, unless it is there; return whether this call has made it.

    Of processes that try it at the same moment, on whichever machines, one has made it. Raises OSError.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     print(make_once(Path(folder) / "first", b"a"), make_once(Path(folder) / "first", b"b"))
    True False
    """
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with naming(path), open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(unfinished, path)
        except OSError as error:  # a client of NFS may repeat what was done; the number of links tells
            is_made = unfinished.stat().st_nlink > 1
            if not is_made and not isinstance(error, FileExistsError):
                raise  # no other process has made it either
            return is_made
        return True  # be it that another process has read and removed it by now
    finally:
        with suppress(OSError):  # what was made counts, and a name that begins with a dot is looked at by none
            unfinished.unlink(missing_ok=True)


def check_folder(run_dir: Path) -> None:
    """Raise UsageError unless this is a folder that only this user can enter: then only this user has filled it."""
    try:
        found = run_dir.stat()
    except OSError as error:
        raise UsageError(f"cannot enter the folder of the job, {run_dir}: {error.strerror}") from error
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"{run_dir} has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}, expected 0700 and "
            f"{os.geteuid()}: it is not the folder of a job of yours"
        )


def require_own(path: Path) -> None:
    """Raise UsageError unless a file or folder, itself and not what a link leads to, is of this user."""
    found = path.lstat()
    if found.st_uid != os.geteuid():
        raise UsageError(f"{path} is of user {found.st_uid}, expected {os.geteuid()}: another user has put it there")


def require_text(folder: Path) -> None:
    """Raise UsageError for a folder whose name is not a text: processes tell each other in JSON where they meet."""
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the name of the folder {str(folder)!a} is not a text in the encoding of this process, "
            f"{sys.getfilesystemencoding()}: name another folder (TMPDIR, --run-dir, PACELINE_RUN_DIR), or set "
            "PYTHONUTF8=1 if the name is UTF-8"
        ) from error


def make_private(folder: Path, advice: str) -> None:
    """Make the folder if it is missing; raises UsageError, with advice, where others than this user can write.

    Args:
        folder: to be of this user alone.
        advice: which other folder to name, and how.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise UsageError(f"cannot use the folder {folder}: {error.strerror}; {advice}") from error
    if found.st_uid != os.geteuid():
        raise UsageError(f"others than you can write in {folder}: {_of_another_user(found.st_uid)}; {advice}")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise UsageError(f"others than you can write in {folder}: chmod 700 it; or {advice}")


def _of_another_user(owner: int) -> str:
    """Return to which other user a file or folder belongs that should be this user's."""
    return f"it belongs to {_user(owner)}, and this process runs as {_user(os.geteuid())}"


def _user(number: int) -> str:
    """Return what a user is called, as far as this machine knows."""
    try:
        return f"user {pwd.getpwuid(number).pw_name} ({number})"
    except KeyError:  # in a container, or of another machine
        return f"user {number}"


def check_private(folder: Path, private: Iterable[Path]) -> None:
    """Raise UsageError where others than this user can change what is in a folder, or read or change private files."""
    for path, forbidden in ((folder, 0o022), *((secret, 0o077) for secret in sorted(private))):
        try:
            found = path.stat()
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}") from error
        if found.st_uid not in (_SUPERUSER, os.geteuid()):
            raise UsageError(
                f"others than you can get at what lets clients in, with {path}: {_of_another_user(found.st_uid)}; run "
                "it as that user, or name another folder, and make new keys if others may have seen them"
            )
        if stat.S_IMODE(found.st_mode) & forbidden:
            raise UsageError(
                f"{path} has mode {stat.S_IMODE(found.st_mode):04o} and owner {found.st_uid}: others than you can get "
                f"at what lets clients in. Make it yours alone with `chmod {'700' if path == folder else '600'}`, and "
                "make new keys if others may have seen them"
            )


def open_file(path: Path) -> BufferedReader:
    """Open a file to read it; raises OSError for what is none, as a pipe, which would be waited for."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a file", str(path))
    return file


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
