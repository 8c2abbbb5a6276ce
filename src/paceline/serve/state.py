"""The state of a standalone server on disk: the saves of each namespace, of which the newest counts.

    STATE/lock                                    held by the one server that works with this folder
    STATE/token                                   without --keys: what clients show
    STATE/namespaces/NAME/generation              how often this namespace was taken up
    STATE/namespaces/NAME/newest                  the name of the save that counts
    STATE/namespaces/NAME/save-12/manifest.json   what is in it, with a digest of every file
    STATE/namespaces/NAME/save-12/0.safetensors   one table

A save is written beside the others, to the disk itself, renamed, and named as the newest last: whatever happens on the
way, the one before counts. That one is kept, too. Where the name of the newest is lost, which save counts is asked of
the operator, and not guessed. Names from the wire are mapped to names of ours.
"""

from __future__ import annotations

import fcntl
import hashlib
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
MAX_MANIFEST_BYTES: Final = 256 << 20  # of what is written and of what is read
_MAX_DIGITS: Final = 18  # of a number that we have written; larger ones do not travel
_SAVE: Final = "save-"
_UNFINISHED: Final = "unfinished"
_DAMAGED: Final = ".damaged"
_LOST_GENERATION: Final = 1 << 40
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-_")


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, readable by this user alone, in place of an older one; after a loss of power it is one of both."""
    unfinished = path.with_name(f".{path.name}")
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Have the disk hold a file, or the names in a folder, before this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class ManifestEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One table: its settings, and what pushes said last of hyperparameters, in MessagePack as they travel."""

    name: str
    kind: Kind
    file: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,9}\.safetensors$")]
    sha256: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}$")]
    version: _Count
    spec: bytes
    hyper: bytes


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A save. `clock`: below it every clock is finished, and all that follows goes on from there."""

    namespace: str
    clock: _Count
    entries: tuple[ManifestEntry, ...]
    format: str = FORMAT
    written_by: str = __version__

    def encode(self) -> bytes:
        """Return it as a file that people can read."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2)

    @staticmethod
    def decode(content: bytes, path: Path) -> Manifest:
        """Read the content of a file; raises CheckpointError when it is no manifest of this format."""
        try:
            found = msgspec.json.decode(content, type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CheckpointError(f"{path} is no manifest: {error}") from error
        if found.format != FORMAT:
            raise CheckpointError(f"{path} has the format {found.format!r}, expected {FORMAT!r}")
        return found


@dataclass(frozen=True, slots=True)
class Save:
    """A save on disk and what its manifest says."""

    folder: Path
    manifest: Manifest

    @staticmethod
    def read(folder: Path) -> Save:
        """Read a save and compare all of it with its digests.

        Raises:
            CheckpointError: something is missing, damaged or no save; the message names the file and the digests.
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
            CheckpointError: the number of the last generation is not known.
            OSError: the folder cannot be written; a new one is not there then.
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
        except FileNotFoundError:  # where it was lost, no client of before may pass as one of this life
            text = f"{1 + secrets.randbelow(_LOST_GENERATION)}".encode() if self._numbers(set_aside=True) else b"0"
        before = _whole_number(text.strip().decode(errors="replace"))
        if before is None:
            raise CheckpointError(f"{file} says {text[:80]!r}, expected a number of at most {_MAX_DIGITS} digits")
        generation = before + 1
        write_durably(file, str(generation).encode())
        return generation

    def newest(self, *, or_previous: bool = False) -> Save | None:
        """Return the save that counts, or None when there is none yet.

        With `or_previous`, a damaged one is set aside under another name and the one before it counts; where the file
        that names the newest is lost, the newest that is there counts.

        Raises:
            CheckpointError: it is damaged, or it is not known which one counts.
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
        """Let the newest of these saves count that is whole, and set all that are newer aside."""
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
        """Have `fill` write the files of a save into a folder, and let it count from then on.

        Raises OSError when the disk does not take it, and CheckpointError when it could not be read again: then the one
        before counts.
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
                shutil.rmtree(self._save(old), ignore_errors=True)  # what is left goes with the next save
        return Save(folder, content)

    def drop_if_empty(self) -> None:
        """Remove the folder of a namespace in which nothing was ever kept."""
        if not (self.path / NEWEST_NAME).exists() and not self._numbers(set_aside=True):
            shutil.rmtree(self.path, ignore_errors=True)

    def _save(self, number: int) -> Path:
        return self.path / f"{_SAVE}{number}"

    def _counting(self) -> int | None:
        """Return the number of the save that counts; raises CheckpointError where that is not known."""
        named, numbers, file = self._named(), self._numbers(set_aside=True), self.path / NEWEST_NAME
        if named is not None:
            return named
        if not file.exists() and numbers in ([], [1]):  # nothing was ever saved, or the first was not named any more
            return 1 if self._numbers() else None
        found = ", ".join(f"{_SAVE}{number}" for number in self._numbers()) or "no save"
        said = f"says {file.read_bytes()[:80]!r}, which names no save" if file.exists() else "is missing"
        raise CheckpointError(f"{file}, which names the save that counts, {said}; in this folder there is {found}")

    def _named(self) -> int | None:
        """Return the number of the save that was named as the newest; None where the file is missing or damaged."""
        try:
            return _number((self.path / NEWEST_NAME).read_text().strip())
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        except OSError as error:
            raise CheckpointError(f"{self.path / NEWEST_NAME} cannot be read: {error}") from error

    def _numbers(self, *, set_aside: bool = False) -> list[int]:
        """Return the numbers of all saves, ascending; those that were set aside, too, or not."""
        names = [path.name for path in self.path.glob(f"{_SAVE}*")]
        found = [_number(name.removesuffix(_DAMAGED) if set_aside else name) for name in names]
        return sorted(number for number in found if number is not None)


@final
class StateFolder:
    """The folder of one server, which it holds locked. Close it."""

    def __init__(self, path: Path) -> None:
        """Make the folder if it is missing; raises UsageError when another server works with it, or others may."""
        for folder in (path, path / NAMESPACES_NAME):
            make_private(folder, "name another folder for the state")
        self.path: Final = path
        self._lock = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._lock, 32).decode(errors="replace").strip() or "?"
            os.close(self._lock)
            raise UsageError(
                f"another server keeps its state in {path} (process {holder}): stop it, or name another folder"
            ) from None
        try:
            with naming(path / LOCK_NAME):
                os.ftruncate(self._lock, 0)
                os.pwrite(self._lock, str(os.getpid()).encode(), 0)
        except OSError:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Let others work with the folder."""
        os.close(self._lock)

    def names(self) -> list[str]:
        """Return the namespaces that are here, sorted."""
        return sorted(name_of(path.name) for path in (self.path / NAMESPACES_NAME).glob("*") if path.is_dir())

    def folder(self, name: str) -> NamespaceFolder:
        """Return the folder of a namespace, which may not be there yet."""
        return NamespaceFolder(self.path / NAMESPACES_NAME / folder_name(name))


def _remove(path: Path) -> None:
    """Remove what is at a path, if anything: a folder with all that is in it, or a file that somehow came there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _within_limit(manifest: bytes, path: Path) -> bytes:
    """Return a manifest that can be read again; raises CheckpointError when it is larger than is ever read."""
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
    """Return the number that was written so; None for what we never write."""
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS else None


def folder_name(name: str) -> str:
    """Return the name on disk: small letters, digits, - and _ as they are, all else by its bytes.

    >>> folder_name("Mnist.v2"), name_of("%4dnist%2ev2")
    ('%4dnist%2ev2', 'Mnist.v2')
    """
    return "".join(chr(byte) if chr(byte) in _PLAIN else f"%{byte:02x}" for byte in name.encode())


def name_of(on_disk: str) -> str:
    """Return the name of the wire that this name on disk was made of."""
    return unquote(on_disk)
