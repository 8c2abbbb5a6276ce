"""The state of a standalone server on disk: the saves of each namespace, of which the newest counts.

    STATE/lock                                    locked by the server that uses this folder
    STATE/token                                   token of clients, without --keys
    STATE/namespaces/NAME/generation              number of starts of this namespace
    STATE/namespaces/NAME/newest                  the name of the save that counts
    STATE/namespaces/NAME/save-12/manifest.json   its content, with a digest of every file
    STATE/namespaces/NAME/save-12/0.safetensors   one table

A save is written beside the others, synced to disk and renamed; the last write names it as the newest. Until then the
save before counts, and it is kept. If the name of the newest save is lost, the operator chooses the one that counts.
Names of namespaces are encoded as names of files.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, final
from urllib.parse import unquote

import msgspec

from paceline.errors import CheckpointError, UsageError
from paceline.job.folders import make_private
from paceline.job.spec import naming
from paceline.snapshots.files import digest_of, sync
from paceline.version import __version__

FORMAT: Final = "paceline state 1"

Kind = Literal["shape", "rows"]
_Count = Annotated[int, msgspec.Meta(ge=0)]
NAMESPACES_NAME: Final = "namespaces"
LOCK_NAME: Final = "lock"
GENERATION_NAME: Final = "generation"
NEWEST_NAME: Final = "newest"
MANIFEST_NAME: Final = "manifest.json"
MANIFEST_DIGEST_NAME: Final = "manifest.sha256"
MAX_MANIFEST_BYTES: Final = 256 << 20  # of a manifest, when written and when read
_MAX_DIGITS: Final = 18  # of a number in our files; messages have no larger ones
_SAVE: Final = "save-"
_UNFINISHED: Final = "unfinished"
_DAMAGED: Final = ".damaged"
_LOST_GENERATION: Final = 1 << 40
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")


def write_durably(path: Path, content: bytes) -> None:
    """Replace a file, readable by this user alone; after a loss of power the old or the new one is there."""
    unfinished = path.with_name(f".{path.name}")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def note_holder(lock: int) -> None:
    """Note that this process is the one to stop before another server uses the folder."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, str(os.getpid()).encode(), 0)


class ManifestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table: its specification and latest hyperparameters, in MessagePack as in messages."""

    name: str
    kind: Kind
    file: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}\.safetensors$")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    version: _Count
    spec: bytes
    hyper: bytes


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of a save. `clock` is the next clock: all lower ones are finished."""

    namespace: str
    clock: _Count
    entries: tuple[ManifestEntry, ...]
    format: str = FORMAT
    written_by: str = __version__

    def encode(self) -> bytes:
        """Return the text of a file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @staticmethod
    def decode(content: bytes, path: Path) -> Manifest:
        """Decode a file; raises CheckpointError for content that is not a manifest of this format."""
        try:
            found = msgspec.json.decode(content, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no manifest: {error}") from error
        if found.format != FORMAT:
            raise CheckpointError(f"{path} has the format {found.format!r}, expected {FORMAT!r}")
        return found


@dataclass(frozen=True, slots=True)
class Save:
    """A save on disk, and its manifest."""

    folder: Path
    manifest: Manifest

    @staticmethod
    def read(folder: Path) -> Save:
        """Read a save and check all files against their digests.

        Raises:
            CheckpointError: a file is missing, damaged or not part of a save; the message names file and digests.
        """
        manifest = folder / MANIFEST_NAME
        try:
            expected = (folder / MANIFEST_DIGEST_NAME).read_text().strip()
            _compare(manifest, expected)
            if manifest.stat().st_size > MAX_MANIFEST_BYTES:
                raise CheckpointError(f"{manifest} has more than {MAX_MANIFEST_BYTES} bytes: it is no manifest")
            found = Manifest.decode(manifest.read_bytes(), manifest)
            for entry in found.entries:
                _compare(folder / entry.file, entry.sha256)
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"the save {folder} cannot be read: {error}") from error
        return Save(folder, found)


@final
class NamespaceFolder:
    """The saves of one namespace."""

    def __init__(self, path: Path) -> None:
        self.path: Final = path

    def start_generation(self) -> int:
        """Start a new generation of this namespace, and return its number; workers of earlier ones are refused.

        Raises:
            CheckpointError: the number of the last generation is unknown.
            OSError: the folder cannot be written; a new folder is removed.
        """
        is_new = not self.path.exists()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            return self._count_up()
        except OSError:
            if is_new:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _count_up(self) -> int:
        for left in self.path.glob(f"{_UNFINISHED}*"):
            _remove(left)
        file = self.path / GENERATION_NAME
        try:
            text = file.read_bytes()
        except FileNotFoundError:  # if it is lost, clients of earlier generations must not be accepted
            text = f"{1 + secrets.randbelow(_LOST_GENERATION)}".encode() if self._numbers(set_aside=True) else b"0"
        before = _whole_number(text.strip().decode(errors="replace"))
        if before is None:
            raise CheckpointError(f"{file} says {text[:80]!r}, expected a number of at most {_MAX_DIGITS} digits")
        generation = before + 1
        write_durably(file, str(generation).encode())
        return generation

    def newest(self, *, or_previous: bool = False) -> Save | None:
        """Return the save that counts, or None without saves.

        With `or_previous`, a damaged save is renamed and the one before it counts; without the file that names the
        newest, the newest save counts.

        Raises:
            CheckpointError: the save is damaged, or the one that counts is unknown.
        """
        try:
            number = self._counting()
            return None if number is None else Save.read(self._save(number))
        except CheckpointError as error:
            number = self._named()
            earlier = [each for each in self._numbers() if number is None or each < number]
            if not earlier:
                raise CheckpointError(f"{error}. There is no save before it") from error
            if not or_previous:
                raise CheckpointError(f"{error}. Start with --or-previous to go on from save-{earlier[-1]}") from error
        return self._go_back(earlier)

    def _go_back(self, earlier: list[int]) -> Save:
        """Make the newest complete save count, and rename all newer ones."""
        problems: list[str] = []
        for number in reversed(earlier):
            try:
                found = Save.read(self._save(number))
            except CheckpointError as error:
                problems.append(str(error))
                continue
            for newer in (each for each in self._numbers() if each > number):
                self._save(newer).rename(self.path / f"{_SAVE}{newer}{_DAMAGED}")
            write_durably(self.path / NEWEST_NAME, found.folder.name.encode())
            return found
        raise CheckpointError(f"no save in {self.path} is whole: {'; '.join(problems)}")

    def write(self, fill: Callable[[Path], Manifest]) -> Save:
        """Write a save, whose files `fill` writes into a folder, and make it count.

        Raises OSError if the disk fails, and CheckpointError for a save that could not be read again. The save before
        counts then.
        """
        number = max([0, *self._numbers(set_aside=True)]) + 1
        before = self._named()
        if before is None:
            before = max(self._numbers(), default=None)
        unfinished = self.path / f"{_UNFINISHED}-{number}"
        _remove(unfinished)
        unfinished.mkdir()
        try:
            content = fill(unfinished)
            write_durably(unfinished / MANIFEST_NAME, _within_limit(content.encode(), self.path))
            write_durably(unfinished / MANIFEST_DIGEST_NAME, digest_of(unfinished / MANIFEST_NAME).encode())
            folder = unfinished.rename(self.path / f"{_SAVE}{number}")
        except BaseException:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        sync(self.path)
        write_durably(self.path / NEWEST_NAME, folder.name.encode())
        for old in self._numbers():
            if old not in (before, number):
                shutil.rmtree(self._save(old), ignore_errors=True)  # the next save removes the rest
        return Save(folder, content)

    def drop_if_empty(self) -> None:
        """Remove the folder of a namespace that never had a save."""
        if not (self.path / NEWEST_NAME).exists() and not self._numbers(set_aside=True):
            shutil.rmtree(self.path, ignore_errors=True)

    def _save(self, number: int) -> Path:
        return self.path / f"{_SAVE}{number}"

    def _counting(self) -> int | None:
        """Return the number of the save that counts; raises CheckpointError if it is unknown."""
        named, numbers, file = self._named(), self._numbers(set_aside=True), self.path / NEWEST_NAME
        if named is not None:
            return named
        if not file.exists() and numbers in ([], [1]):  # no save was written, or the first one was not yet named
            return 1 if self._numbers() else None
        found = ", ".join(f"{_SAVE}{number}" for number in self._numbers()) or "no save"
        said = f"says {file.read_bytes()[:80]!r}, which names no save" if file.exists() else "is missing"
        raise CheckpointError(f"{file}, which names the save that counts, {said}; in this folder there is {found}")

    def _named(self) -> int | None:
        """Return the number of the save that is named as the newest; None if the file is missing or damaged."""
        try:
            return _number((self.path / NEWEST_NAME).read_text().strip())
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        except OSError as error:
            raise CheckpointError(f"{self.path / NEWEST_NAME} cannot be read: {error}") from error

    def _numbers(self, *, set_aside: bool = False) -> list[int]:
        """Return the numbers of all saves, ascending, with or without renamed ones."""
        names = [path.name for path in self.path.glob(f"{_SAVE}*")]
        found = [_number(name.removesuffix(_DAMAGED) if set_aside else name) for name in names]
        return sorted(number for number in found if number is not None)


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

    def folder(self, name: str) -> NamespaceFolder:
        """Return the folder of a namespace, which may not exist yet."""
        return NamespaceFolder(self.path / NAMESPACES_NAME / folder_name(name))


def _remove(path: Path) -> None:
    """Remove a path, if it exists: a folder with all its content, or a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _within_limit(manifest: bytes, path: Path) -> bytes:
    """Return a manifest that can be read again; raises CheckpointError for a larger one."""
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise CheckpointError(
            f"the manifest of a save in {path} would have {len(manifest)} bytes, at most {MAX_MANIFEST_BYTES} are "
            "read: declare fewer tables, or tables with fewer parameters, in one namespace"
        )
    return manifest


def _compare(file: Path, expected: str) -> None:
    found = digest_of(file)
    if found != expected:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is {found}, expected {expected}")


def _number(name: str) -> int | None:
    return _whole_number(name.removeprefix(_SAVE)) if name.startswith(_SAVE) else None


def _whole_number(digits: str) -> int | None:
    """Return the number of a text that this module writes; None for other texts."""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS else None


def folder_name(name: str) -> str:
    """Return the name on disk: small letters, digits, - and _ are unchanged, other characters are encoded as bytes.

    >>> folder_name("Mnist.v2"), name_of("%4dnist%2ev2")
    ('%4dnist%2ev2', 'Mnist.v2')
    """
    return "".join(chr(byte) if chr(byte) in _PLAIN else f"%{byte:02x}" for byte in name.encode())


def name_of(on_disk: str) -> str:
    """Return the name of the namespace from its name on disk."""
    return unquote(on_disk)
