"""TLS around the token: nobody in between can read or change what is sent, and both sides show a certificate.

Certificates are signed by one authority, which signs for the processes of one job (or of one team) and for nobody else:
who has one may be at either end, at whatever address. A certificate says whom it is for; what that one may do is for
others to judge. TLS 1.3 only.
"""

import hashlib
import ssl
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast, final

from paceline.errors import CertificateRefused, PeerError, UsageError
from paceline.transport.base import Papers
from paceline.transport.channel import SocketChannel, read_exactly
from paceline.transport.deadline import Deadline
from paceline.transport.frames import MAGIC, what_speaks
from paceline.transport.latest import Latest
from paceline.transport.papers import clock, read_papers, read_revoked, validity
from paceline.transport.security import MAX_TLS_HANDSHAKE_BYTES, Greeted, TokenHandshake
from paceline.transport.tls_channel import TlsChannel

# What the server says first inside TLS. In TLS 1.3 a client is done before the server has checked its certificate; only
# a client that has read this knows that it was not refused.
_WELCOME: Final = b"\x01"
_OUT_OF_DATE: Final = (9, 10)  # what OpenSSL calls a certificate that does not hold yet, or no longer


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files in PEM format: this process's certificate and its unencrypted key, and the certificate of the authority.

    `revoked` names who is turned away all the same: a holder or the serial number of a certificate a line; the file may
    be missing. All of them are read again when they have changed.

    >>> settings = TlsSettings(Path("worker.pem"), Path("worker.key"), Path("authority.pem"))
    """

    certificate: Path
    key: Path
    authority: Path
    revoked: Path | None = None


@dataclass(frozen=True, slots=True)
class _Own:
    """What was made of our own files; `digest` is that of our certificate."""

    serving: ssl.SSLContext
    calling: ssl.SSLContext
    digest: bytes


@final
class TlsHandshake:
    """TLS with certificates on both sides, and the proof of the token inside it, which covers both certificates.

    Raises UsageError when the files are not there or do not belong together.
    """

    def __init__(self, settings: TlsSettings, inside: TokenHandshake, job: str) -> None:
        self._settings = settings
        self._inside = inside
        self._job = job
        self._own = Latest((settings.certificate, settings.key, settings.authority), lambda: _read_own(settings))
        self._own.get()
        revoked = settings.revoked
        self._revoked = None if revoked is None else Latest((revoked,), lambda: read_revoked(revoked))

    def answer(self, channel: SocketChannel, deadline: Deadline) -> Greeted:
        """Play the server; see `Handshake.answer`."""
        own = self._own.get()
        tls = TlsChannel(channel, own.serving, server_side=True, allowance_bytes=MAX_TLS_HANDSHAKE_BYTES)
        try:
            tls.shake_hands(deadline)
        except ssl.SSLError as error:
            if tls.first == MAGIC:
                raise PeerError("the client does not speak TLS, as this server does: give it certificates") from error
            raise CertificateRefused(f"it has no certificate that holds here ({_reason(error)})") from error
        papers = self._check_papers(tls, "the client")
        tls.write([_WELCOME], deadline)
        greeted = self._inside.answer(tls, deadline, bound=_digest_of_peer(tls) + own.digest)
        self._check_revoked(papers, "the client")  # again: it may have taken its time since
        tls.trust()
        return replace(greeted, papers=papers)

    def introduce(self, channel: SocketChannel, identity: bytes, server: str, deadline: Deadline) -> Greeted:
        """Play the client; see `Handshake.introduce`."""
        own = self._own.get()
        tls = TlsChannel(channel, own.calling, server_side=False, allowance_bytes=MAX_TLS_HANDSHAKE_BYTES)
        agreed = False
        try:
            tls.shake_hands(deadline)
            agreed = True
            read_exactly(tls, len(_WELCOME), deadline)
        except ssl.SSLError as error:
            raise self._refusal(error, server, tls.first) from error
        except (EOFError, ConnectionError):
            raise _hung_up(server, agreed=agreed) from None
        papers = self._check_papers(tls, server)
        bound = own.digest + _digest_of_peer(tls)
        greeted = self._inside.introduce(tls, identity, server, deadline, bound=bound)
        tls.trust()
        return replace(greeted, papers=papers)

    def _check_papers(self, tls: TlsChannel, who: str) -> Papers:
        """Return what the certificate of `who` says; raises CertificateRefused when it was revoked."""
        certificate = cast("dict[str, object]", tls.certificate(binary=False))
        names = cast("tuple[tuple[str, str], ...]", certificate.get("subjectAltName", ()))
        serial = cast("str", certificate["serialNumber"])
        papers = read_papers([name for kind, name in names if kind == "URI"], serial, self._job, who)
        self._check_revoked(papers, who)
        return papers

    def _check_revoked(self, papers: Papers, who: str) -> None:
        if self._revoked is not None and papers.are_among(self._revoked.get()):
            raise CertificateRefused(f"the certificate of {who} ({papers.holder}, {papers.serial}) was revoked")

    def _refusal(self, error: ssl.SSLError, server: str, first: bytes) -> PeerError:
        """Say whose certificate was not accepted, and what to do."""
        settings = self._settings
        if isinstance(error, ssl.SSLCertVerificationError):
            doubt = f"; {clock()}" if error.verify_code in _OUT_OF_DATE else ""
            return CertificateRefused(
                f"the certificate of {server} does not hold: {error.verify_message}. Expected one that is valid now "
                f"and signed by the authority in {settings.authority}: give every process of the job certificates of "
                f"one authority, and do not trust this server{doubt}"
            )
        reason = _reason(error)
        if "alert" in reason:
            return CertificateRefused(
                f"{server} refused the certificate in {settings.certificate} ({reason}): give it one that is valid "
                f"now and signed by the authority of the server ({validity(settings.certificate)})"
            )
        known = what_speaks(first) if error.reason == "WRONG_VERSION_NUMBER" else ""
        if known:
            return PeerError(f"{server} is not a Paceline peer but {known}: check the address and the port")
        return PeerError(f"{server} does not speak TLS 1.3 ({reason}): give all processes of the job TLS, or none")


def _hung_up(server: str, *, agreed: bool) -> PeerError:
    if agreed:
        return PeerError(
            f"{server} closed the connection after it had seen our certificate: it may be shutting down or busy, or "
            "the certificate was revoked"
        )
    return PeerError(
        f"{server} closed the connection instead of speaking TLS: it may run without TLS, be busy or be shutting down"
    )


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        doubt = f"; {clock()}" if error.verify_code in _OUT_OF_DATE else ""
        return f"{error.verify_message}{doubt}"
    return (error.reason or str(error)).lower().replace("_", " ")


def _digest_of_peer(tls: TlsChannel) -> bytes:
    return hashlib.sha256(cast("bytes", tls.certificate(binary=True))).digest()


def _read_own(settings: TlsSettings) -> _Own:
    serving, calling = _context(ssl.PROTOCOL_TLS_SERVER, settings), _context(ssl.PROTOCOL_TLS_CLIENT, settings)
    serving.num_tickets = 0  # sessions are not resumed
    _, begin, rest = settings.certificate.read_text(encoding="ascii", errors="replace").partition(ssl.PEM_HEADER)
    own, end, _ = rest.partition(ssl.PEM_FOOTER)  # the first one of a chain
    return _Own(serving, calling, hashlib.sha256(ssl.PEM_cert_to_DER_cert(begin + own + end)).digest())


def _context(protocol: int, settings: TlsSettings) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cafile=settings.authority)
        context.load_cert_chain(settings.certificate, settings.key, password="")  # never ask at the terminal
    except OSError as error:  # SSLError is one
        raise UsageError(
            f"cannot use the TLS files {settings.certificate}, {settings.key} and {settings.authority}: "
            f"{error.strerror or error}. Expected a certificate, its key without a password, and the authority's "
            "certificate, all in PEM format"
        ) from error
    return context
