"""The state of a standalone server on disk: the snapshots of each namespace, of which the newest counts.

    STATE/lock                           locked by the server that uses this folder
    STATE/token                          token of clients, without --keys
    STATE/namespaces/NAME/generation     number of starts of this namespace
    STATE/namespaces/NAME/snapshot-12/   as `paceline.snapshots.folder` writes it
    STATE/server                         with --views: see `numbers.py`
    STATE/saved-in-view/NAME             with --views: number of the view in which all that was acknowledged is saved

Names of namespaces are encoded as names of files.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from pathlib import Path
from typing import Final, final
from urllib.parse import unquote

from paceline.errors import CheckpointError, UsageError
from paceline.job.folders import make_private, naming
from paceline.snapshots.files import sync
from paceline.snapshots.folder import Snapshot, has_any, set_aside, snapshots_in

NAMESPACES_NAME: Final = "namespaces"
LOCK_NAME: Final = "lock"
GENERATION_NAME: Final = "generation"
VIEWS_NAME: Final = "saved-in-view"
_MAX_DIGITS: Final = 18  # of a generation; messages have no larger ones
_LOST_GENERATION: Final = 1 << 40
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file, readable by this user alone; after a loss of power the old or the new one is there."""
    unfinished = path.with_name(f".{path.name}")
    with naming(path), open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def note_holder(lock: int) -> None:
    """Note that this process is the one to stop before another server uses the folder."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


@final
class NamespaceFolder:
    """The snapshots of one namespace."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path

    def start_generation(self, before: int = 0) -> int:
        """Start a new generation of this namespace, and return its number; workers of earlier ones are refused.

        `before` is one that is known to have been.

        Raises:
            CheckpointError: the number of the last generation is unknown.
            OSError: the folder cannot be written; a new folder is removed.
        """
        is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            generation = max(before, self._last_generation()) + 1
            write_durably(self.path / GENERATION_NAME, str(generation).encode())
        except OSError:
            if is_new:
                shutil.rmtree(self.path, ignore_errors=True)
            raise
        return generation

    def _last_generation(self) -> int:
        file = self.path / GENERATION_NAME
        try:
            text = file.read_bytes().strip()
        except FileNotFoundError:  # if it is lost, clients of earlier generations must not be accepted
            return 1 + secrets.randbelow(_LOST_GENERATION) if has_any(self.path) else 0
        if not text.isdigit() or len(text) > _MAX_DIGITS:
            raise CheckpointError(f"{file} says {text[:80]!r}, expected a number of at most {_MAX_DIGITS} digits")
        return int(text)

    def newest(self, *, or_previous: bool = False) -> Snapshot | None:
        """Return the newest snapshot, whose files are compared with their digests; None without any.

        With `or_previous`, damaged ones are renamed, and the newest that is whole counts.

        Raises:
            CheckpointError: it is damaged.
        """
        found, problems = snapshots_in(self.path), list[str]()
        while found:
            try:
                snapshot = Snapshot.read(found[-1])
                snapshot.verify()
            except CheckpointError as error:
                problems.append(str(error))
                del found[-1]
                if found and not or_previous:
                    choice = f"Start with --or-previous to go on from {found[-1].name}"
                    raise CheckpointError(f"{error}. {choice}") from error
            else:
                for damaged in snapshots_in(self.path)[len(found) :]:
                    set_aside(damaged)
                return snapshot
        if problems:
            raise CheckpointError(f"{'; '.join(problems)}. There is no snapshot before it")
        return None

    def drop_if_empty(self) -> None:
        """Remove the folder of a namespace that never had a snapshot."""
        if not has_any(self.path):
            shutil.rmtree(self.path, ignore_errors=True)


@final
class StateFolder:
    """The folder of one server, which holds its lock until `close`."""

    def __init__(self, path: Path, lock: int | None = None) -> None:
        """Open or make the folder; raises UsageError if another server uses it, or other users may.

        `lock` is a descriptor of the lock, from then on this object's, where the server is one of several processes.
        """
        self.path: Final = path
        self.lock: Final = self._acquire() if lock is None else lock

    def _acquire(self) -> int:
        path = self.path
        for folder in (path, path / NAMESPACES_NAME):
            make_private(folder, "name another folder for the state")
        lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(lock, 32).decode(errors="replace").strip() or "?"
            os.close(lock)
            raise UsageError(
                f"another server keeps its state in {path} (process {holder}): stop it, or name another folder"
            ) from None
        try:
            with naming(path / LOCK_NAME):
                note_holder(lock)
        except OSError:
            os.close(lock)
            raise
        return lock

    def close(self) -> None:
        """Release the folder, unless another process of this server holds it, too."""
        os.close(self.lock)

    def names(self) -> list[str]:
        """Return the names of all namespaces, sorted."""
        return sorted(name_of(path.name) for path in (self.path / NAMESPACES_NAME).glob("*") if path.is_dir())

    def saved_view(self, name: str) -> int:
        """Return in which view of a namespace all that was acknowledged was saved here; 0 for none. Raises OSError."""
        try:
            text = (self.path / VIEWS_NAME / folder_name(name)).read_bytes().strip()
        except FileNotFoundError:
            return 0
        return int(text) if text.isdigit() and len(text) <= _MAX_DIGITS else 0

    def forget_saved_view(self, name: str) -> None:
        """Note that something may be acknowledged from now on that is not saved here. Raises OSError."""
        (self.path / VIEWS_NAME / folder_name(name)).unlink(missing_ok=True)

    def note_saved_view(self, name: str, number: int) -> None:
        """Note that all which was acknowledged in this view and before is saved here. Raises OSError."""
        (self.path / VIEWS_NAME).mkdir(mode=0o700, exist_ok=True)
        write_durably(self.path / VIEWS_NAME / folder_name(name), str(number).encode())

    def folder(self, name: str) -> NamespaceFolder:
        """Return the folder of a namespace, which may not exist yet."""
        return NamespaceFolder(self.path / NAMESPACES_NAME / folder_name(name))


def folder_name(name: str) -> str:
    """Return the name on disk: small letters, digits, - and _ are unchanged, other characters are encoded as bytes.

    >>> folder_name("Mnist.v2"), name_of("%4dnist%2ev2")
    ('%4dnist%2ev2', 'Mnist.v2')
    """
    return "".join(chr(byte) if chr(byte) in _PLAIN else f"%{byte:02x}" for byte in name.encode())


def name_of(on_disk: str) -> str:
    """Return the name of the namespace from its name on disk."""
    return unquote(on_disk)
