"""Holders of certificates, and the files in which a process finds its own certificate and the token of its job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, cast, final

import msgspec

from paceline.errors import UsageError
from paceline.job.spec import TOKEN_NAME, read_token
from paceline.transport.file_watch import FileWatch
from paceline.transport.tls import TlsSettings

KEYS_NAME: Final = "keys"  # of the folder in that of the job, where its processes find certificates
AUTHORITY_NAME: Final = "authority"
REVOKED_NAME: Final = "revoked"  # whose certificates hold no longer: a holder or a serial number a line

Role = Literal["server", "worker", "data", "reader", "relay", "any"]

_NAME: Final = re.compile(r"(?:(server|worker|data|reader|relay)-(0|[1-9]\d{0,8})|any)", re.ASCII)
PREVIOUS_NAME: Final = "token.previous"  # holds until it is removed


class Holder(msgspec.Struct, frozen=True):
    """The holder of a certificate: one process of a job, or any of them.

    >>> str(Holder("server", 0)), str(Holder("worker", 3)), str(Holder("any"))
    ('server-0', 'worker-3', 'any')
    """

    role: Role
    rank: int = -1

    @staticmethod
    def parse(text: str) -> Holder:
        """Read a name as `str` gives it; raises UsageError when it is none."""
        match = _NAME.fullmatch(text)
        if match is None:
            raise UsageError(f"{text!r} is not the name of a holder, expected one such as worker-3, server-0 or any")
        if match[1] is None:
            return Holder("any")
        return Holder(cast("Role", match[1]), int(match[2]))

    def __str__(self) -> str:
        """Return the name of this holder's files, which is what a certificate says, too."""
        return self.role if self.role == "any" else f"{self.role}-{self.rank}"


def tls_settings(folder: Path, holder: Holder) -> TlsSettings:
    """Return the files of a holder in a folder of keys; those for any process where it has none of its own."""
    name = str(holder) if (folder / f"{holder}.pem").exists() else str(Holder("any"))
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    return TlsSettings(certificate, key, folder / f"{AUTHORITY_NAME}.pem", folder / REVOKED_NAME)


def link_keys(keys: Path, folder: Path) -> None:
    """Have the folder of a job use the certificates and the token in a user's folder of keys, as they are at any time.

    Each file is a link of its own: what clears the folder of the job removes the links. Raises UsageError for a folder
    that has no token, or cannot be read.
    """
    keys = keys.absolute()
    read_token(keys)
    (folder / KEYS_NAME).mkdir(mode=0o700)
    (folder / KEYS_NAME / REVOKED_NAME).symlink_to(keys / REVOKED_NAME)  # it may come later
    for path in (*keys.glob("*.pem"), *keys.glob("*.key")):
        if path.stem != AUTHORITY_NAME or path.suffix == ".pem":  # what signs stays where it is
            (folder / KEYS_NAME / path.name).symlink_to(path)
    for name in (TOKEN_NAME, PREVIOUS_NAME):
        (folder / name).symlink_to(keys / name)


@final
class TokenFiles:
    """The secret of a job (see `transport.base.Secret`), read again when it has changed: rotating it ends nothing.

    While there is a file `token.previous`, that one holds for others as well.

    Raises UsageError when there is no token.
    """

    def __init__(self, folder: Path, job: str) -> None:
        self.job: Final = job
        self._tokens = FileWatch((folder / TOKEN_NAME, folder / PREVIOUS_NAME), lambda: _read(folder))
        self._tokens.get()

    def tokens(self) -> Sequence[bytes]:
        """Return the token, and the previous one if it still holds."""
        return self._tokens.get()


def _read(folder: Path) -> Sequence[bytes]:
    """Read both; the previous one first, because rotating writes it first."""
    previous = (read_token(folder, PREVIOUS_NAME),) if (folder / PREVIOUS_NAME).exists() else ()
    return (read_token(folder), *previous)
