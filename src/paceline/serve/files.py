"""Files that are on the disk when a call returns, whole or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


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
