"""Identities in certificates: the holder and serial number, whether it was revoked, and when it is valid."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from paceline.errors import CertificateRefused, UsageError
from paceline.transport.base import ANY, PeerIdentity

# How the names in certificates begin that are ours: paceline://mnist-7/worker/3, or paceline://mnist-7/any.
SCHEME: Final = "paceline://"

_NAME: Final = re.compile(r"paceline://([^/]*)/(?:any|(server|worker|data|reader|relay)/(0|[1-9]\d{0,8}))")
_HOLDER: Final = re.compile(r"any|(server|worker|data|reader|relay)-(0|[1-9]\d{0,8})", re.ASCII)
_SERIAL: Final = re.compile(r"[0-9a-fA-F]{1,2}(:?[0-9a-fA-F]{2})*|[0-9a-fA-F]+")


class DamagedRevocations(UsageError):
    """A file of revoked names has invalid lines; `names` are those of the valid lines."""

    def __init__(self, message: str, names: frozenset[str]) -> None:
        super().__init__(message)
        self.names: Final = names


def read_identity(names: list[str], serial: str, job: str, peer: str) -> PeerIdentity:
    """Return the identity in the certificate of `peer`, given its names and its serial number.

    A certificate without a paceline:// name is valid for any process: the authority signs for this job or team alone.

    >>> read_identity(["paceline://mnist-7/worker/3"], "0A1B", "mnist-7", "the client")
    PeerIdentity(holder='worker-3', serial='A1B')

    Raises:
        CertificateRefused: it is for another job, or its name is malformed.
    """
    ours = [name for name in names if name.startswith(SCHEME)]
    if not ours:
        return PeerIdentity(ANY, normal_serial(serial))
    match = _NAME.fullmatch(ours[0])
    if match is None or len(ours) > 1:
        raise CertificateRefused(f"the certificate of {peer} does not name the process that it is for")
    found, role, rank = unquote(match[1]), match[2], match[3]
    if found not in (job, ANY):
        raise CertificateRefused(f"the certificate of {peer} is for another job than {job!r}")
    return PeerIdentity(ANY if role is None else f"{role}-{rank}", normal_serial(serial))


def read_revoked(path: Path) -> frozenset[str]:
    """Return the holders and serial numbers in a file, one a line; none when there is no file.

    Raises:
        DamagedRevocations: a line is neither; the message names it.
        UsageError: the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return frozenset()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read who was revoked in {path}: {error}") from error
    said = {number: line.strip() for number, line in enumerate(lines, start=1) if line.strip()}
    names = frozenset(normal_serial(name) for name in said.values() if is_serial(name) or _HOLDER.fullmatch(name))
    damaged = [number for number, name in said.items() if normal_serial(name) not in names]
    if damaged:
        raise DamagedRevocations(
            f"line {damaged[0]} of {path} is {said[damaged[0]][:80]!r}, expected a holder such as worker-3 or a serial "
            "number as `paceline keys show` prints it: no client is let in until this is mended",
            names,
        )
    return names


def is_serial(text: str) -> bool:
    """Return whether this can be a serial number, in hexadecimal, its bytes perhaps with colons between them."""
    return _SERIAL.fullmatch(text) is not None


def normal_serial(text: str) -> str:
    """Return a serial number in the one way that is compared; anything else as it is."""
    return f"{int(text.replace(':', ''), 16):X}" if is_serial(text) else text


def clock() -> str:
    """Return a question for error messages: whether this machine's clock, with the time it shows, is right."""
    return f"is the clock of this machine right? It says {_moment(datetime.now(UTC))}"


def validity(path: Path) -> str:
    """Return when one of our certificates is valid, and the time that the clock shows."""
    from cryptography import x509  # only when something has gone wrong

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return clock()
    since, until = _moment(certificate.not_valid_before_utc), _moment(certificate.not_valid_after_utc)
    return f"{path.name} holds from {since} until {until}; {clock()}"


def _moment(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"
