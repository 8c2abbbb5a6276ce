"""What is read from certificates: whom one is for, whether it was revoked, and when it holds."""

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from paceline.errors import AuthenticationFailed, UsageError
from paceline.transport.base import ANY, Papers

# How the names in certificates begin that are ours: paceline://mnist-7/worker/3, or paceline://mnist-7/any.
SCHEME: Final = "paceline://"

_NAME: Final = re.compile(r"paceline://([^/]*)/(?:any|(server|worker|data)/(0|[1-9]\d{0,8}))")
_SERIAL: Final = re.compile(r"[0-9a-fA-F]+")


def read_papers(names: list[str], serial: str, job: str, who: str) -> Papers:
    """Return what the certificate of `who` says, given the names in it and its serial number.

    One without a name of ours is for any process: the authority is trusted to sign for nobody else.

    >>> read_papers(["paceline://mnist-7/worker/3"], "0A1B", "mnist-7", "the client")
    Papers(holder='worker-3', serial='A1B')

    Raises:
        AuthenticationFailed: it is for another job, or says nothing that makes sense.
    """
    ours = [name for name in names if name.startswith(SCHEME)]
    if not ours:
        return Papers(ANY, normal_serial(serial))
    match = _NAME.fullmatch(ours[0])
    if match is None or len(ours) > 1:
        raise AuthenticationFailed(f"the certificate of {who} does not say whom it is for")
    found, role, rank = unquote(match[1]), match[2], match[3]
    if found not in (job, ANY):
        raise AuthenticationFailed(f"the certificate of {who} is for another job than {job!r}")
    return Papers(ANY if role is None else f"{role}-{rank}", normal_serial(serial))


def read_revoked(path: Path) -> frozenset[str]:
    """Return the holders and serial numbers in a file, one a line; none when there is no file.

    Raises UsageError when the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return frozenset()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read who was revoked in {path}: {error}") from error
    return frozenset(normal_serial(line.strip()) for line in lines if line.strip())


def is_serial(text: str) -> bool:
    """Say whether this can be a serial number."""
    return _SERIAL.fullmatch(text) is not None


def normal_serial(text: str) -> str:
    """Return a serial number in the one way we write it; anything else as it is."""
    return f"{int(text, 16):X}" if is_serial(text) else text


def clock() -> str:
    """Ask whether the clock is right, and say what it says."""
    return f"is the clock of this machine right? It says {_moment(datetime.now(UTC))}"


def validity(path: Path) -> str:
    """Say when a certificate of ours holds, and what the clock says."""
    from cryptography import x509  # only when something has gone wrong

    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return clock()
    since, until = _moment(certificate.not_valid_before_utc), _moment(certificate.not_valid_after_utc)
    return f"{path.name} holds from {since} until {until}; {clock()}"


def _moment(when: datetime) -> str:
    return f"{when:%Y-%m-%d %H:%M:%S} UTC"
