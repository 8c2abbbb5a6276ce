"""A user's own folder of keys: an authority, a token and certificates, to be made, handed on, rotated and revoked.

In the folder lie authority.pem and authority.key, token, any.pem and any.key; under issued/ a copy of every certificate
(not of its key) that was signed for another machine; in `revoked` the revoked holders. Only its owner can enter it.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import msgspec
from cryptography import x509

from paceline.errors import UsageError
from paceline.job.credentials.certificates import (
    AUTHORITY_KEY_NAME,
    DEFAULT_DAYS,
    Authority,
    private_pem,
    request,
    said_in,
)
from paceline.job.credentials.holders import AUTHORITY_NAME, PREVIOUS_NAME, REVOKED_NAME, Holder, tls_settings
from paceline.job.folders import check_private
from paceline.job.spec import TOKEN_BYTES, TOKEN_NAME, read_token, write_private, write_token
from paceline.transport.base import ANY
from paceline.transport.peer_identity import is_serial, normal_serial, read_revoked

ISSUED_NAME: Final = "issued"
SOON: Final = timedelta(days=7)


class Certificate(msgspec.Struct, frozen=True):
    """A certificate in a folder of keys: its holder, serial number, end, and whether it was revoked."""

    holder: str
    serial: str
    until: datetime
    revoked: bool

    def trouble(self, now: datetime) -> str:
        """Return what is wrong with it at this time, or nothing."""
        if self.revoked:
            return "revoked"
        if self.until <= now:
            return "expired"
        return f"ends in {(self.until - now).days} days" if self.until - now < SOON else ""


def make_keys(folder: Path, *, days: int = DEFAULT_DAYS) -> None:
    """Make a folder of keys that hold for some days, for jobs of any name.

    Raises UsageError when there is something in it already: keys are never overwritten.
    """
    authority = Authority.make(ANY, days=days)
    _prepare(folder, "is not empty; keys are not overwritten. Name a new folder", may_hold=frozenset())
    write_private(folder / AUTHORITY_KEY_NAME, private_pem(authority.key))
    write_token(folder)
    authority.issue(folder, Holder("any"))


def issue_keys(folder: Path, holder: Holder, out: Path) -> None:
    """Make a folder to carry to another machine: a certificate for `holder`, its key and the token.

    Several holders may share one. Raises UsageError when this holder is revoked or has a key there, or the folder
    belongs to other keys.
    """
    if str(holder) in read_revoked(folder / REVOKED_NAME):
        raise UsageError(f"{holder} is revoked in {folder / REVOKED_NAME}: give another name, or remove it there")
    authority, token = Authority.read(folder), read_token(folder)
    names = frozenset(path.name for path in out.iterdir()) if out.is_dir() else frozenset[str]()
    may_hold = names if _is_issued(out) else frozenset[str]()
    _prepare(out, "holds something else than issued keys; name a new folder", may_hold=may_hold)
    if f"{holder}.key" in names:
        raise UsageError(f"{out} has a key for {holder}; keys are not overwritten. Name a new folder")
    if TOKEN_NAME in names and not secrets.compare_digest(read_token(out), token):
        raise UsageError(f"{out} holds another token than {folder}: it belongs to other keys, or to those of before")
    certificate = authority.sign(request(out, holder), holder)
    serial = f"{x509.load_pem_x509_certificate(certificate).serial_number:X}"
    (folder / ISSUED_NAME).mkdir(mode=0o700, exist_ok=True)
    write_private(folder / ISSUED_NAME / f"{serial}.pem", certificate)
    write_private(out / f"{holder}.pem", certificate)
    write_private(out / f"{AUTHORITY_NAME}.pem", authority.pem)
    write_private(out / TOKEN_NAME, token)


def rotate_token(folder: Path) -> None:
    """Make a new token; the one of now becomes the previous one, which still holds until `expire_previous_token`.

    Raises UsageError when there is a previous one already, or none at all, or the folder was issued: no server reads
    the token there.
    """
    if _is_issued(folder):
        raise UsageError(
            f"{folder} was issued for other processes: a token that is made there is known to no server. Rotate in the "
            f"folder where `paceline keys make` was run, then carry its file {TOKEN_NAME} here"
        )
    if (folder / PREVIOUS_NAME).exists():
        raise UsageError(
            f"in {folder} the token before this one still holds: end it first, with --finish, once every process has "
            "the new one"
        )
    write_private(folder / PREVIOUS_NAME, read_token(folder))  # first: at every moment what others have holds
    write_private(folder / TOKEN_NAME, secrets.token_bytes(TOKEN_BYTES))


def expire_previous_token(folder: Path) -> None:
    """Have the previous token hold no longer; raises UsageError when there is none."""
    try:
        (folder / PREVIOUS_NAME).unlink()
    except FileNotFoundError:
        raise UsageError(f"there is no previous token in {folder}: nothing to finish") from None


def revoke(folder: Path, subject: str) -> int:
    """Revoke all certificates of a holder, or the one of a serial number; returns how many of them are known here.

    Servers that find their keys in this folder end its connections within a second, and let it in no more. Raises
    UsageError when this is neither, or no server finds its keys there: the folder holds no certificates, or was issued
    for others than servers.
    """
    if _is_issued(folder) and not any(
        path.stem == ANY or path.stem.startswith("server-") for path in folder.glob("*.key")
    ):
        raise UsageError(
            f"{folder} was issued for {', '.join(sorted(path.stem for path in folder.glob('*.key')))}: no server looks "
            "there, so nothing would end. Revoke in the folder that the servers were given as --keys"
        )
    name = normal_serial(subject)
    if not is_serial(subject):
        name = str(Holder.parse(subject))
    known = [found for found in certificates(folder) if name in (found.holder, found.serial)]
    path = folder / REVOKED_NAME
    names = sorted({*read_revoked(path), name})
    write_private(path, "".join(f"{line}\n" for line in names).encode())
    return len(known)


def certificates(folder: Path) -> list[Certificate]:
    """Return the certificates in a folder of keys, the authority's first; raises UsageError when there is none."""
    revoked = read_revoked(folder / REVOKED_NAME)
    found = [_described(path, revoked) for path in _files(folder)]
    if not found:
        raise UsageError(f"there are no certificates in {folder}: make some with `paceline keys make`")
    return found


def _files(folder: Path) -> Iterator[Path]:
    authority = folder / f"{AUTHORITY_NAME}.pem"
    if authority.exists():
        yield authority
    yield from sorted(path for path in folder.glob("*.pem") if path != authority)
    yield from sorted((folder / ISSUED_NAME).glob("*.pem"))


def _described(path: Path, revoked: frozenset[str]) -> Certificate:
    certificate = _read(path)
    _, _, name = said_in(certificate).partition("/")
    holder, serial = unquote(name).replace("/", "-") or ANY, f"{certificate.serial_number:X}"
    gone = holder in revoked or serial in revoked
    return Certificate(holder, serial, certificate.not_valid_after_utc, gone)


def check_keys(folder: Path, holder: Holder) -> str:
    """Check the keys of this folder as a server uses them; return what will soon fail, or nothing.

    Raises:
        UsageError: others can change or read what is secret, a certificate does not hold now, or the list of revoked
            names is damaged.
    """
    check_private(folder, [*folder.glob("*.key"), *folder.glob(f"{TOKEN_NAME}*")])
    read_revoked(folder / REVOKED_NAME)
    certificate = tls_settings(folder, holder).certificate
    soon, now = "", datetime.now(UTC)
    for path in (certificate, folder / f"{AUTHORITY_NAME}.pem"):
        found = _read(path)
        since, until = found.not_valid_before_utc, found.not_valid_after_utc
        if not since <= now < until:
            raise UsageError(
                f"{path} holds from {since:%Y-%m-%d %H:%M} until {until:%Y-%m-%d %H:%M} UTC, and the clock of this "
                f"machine says {now:%Y-%m-%d %H:%M}: no client would be let in. Make keys with `paceline keys make "
                "NEW_FOLDER`, or set the clock"
            )
        if until - now < SOON:
            soon = f"{path} holds for {(until - now).days} days more: no client is let in after that"
    return soon


def _read(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a certificate in PEM format: {error}") from error


def _is_issued(folder: Path) -> bool:
    """Return whether a folder is for other processes than where its keys were made: with a token, and no authority."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    return {f"{AUTHORITY_NAME}.pem", TOKEN_NAME} <= names and AUTHORITY_KEY_NAME not in names


def _prepare(folder: Path, otherwise: str, *, may_hold: frozenset[str]) -> None:
    """Make a folder that only its owner can enter; raises UsageError when it holds other files than it may."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(path.name not in may_hold for path in folder.iterdir()):
            raise UsageError(f"{folder} {otherwise}")
        folder.chmod(0o700)
    except OSError as error:
        raise UsageError(f"cannot use the folder {folder}: {error.strerror}") from error
