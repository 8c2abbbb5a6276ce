"""What is in a save: tables as they were declared, and of each the file with its content and the digest of that."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec

from paceline.errors import CheckpointError
from paceline.version import __version__

FORMAT: Final = "paceline state 1"

Kind = Literal["shape", "rows"]
_Count = Annotated[int, msgspec.Meta(ge=0)]


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
