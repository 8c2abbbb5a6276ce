"""TLS around the token: nobody in between can read or change what is sent, and both sides show a certificate.

Certificates are signed by one authority, which signs for the processes of one job (or of one team) and for nobody else:
who has one may be at either end, at whatever address. TLS 1.3 only.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from paceline.errors import AuthenticationFailed, PeerError, UsageError
from paceline.transport.channel import Channel, SocketChannel, read_exactly
from paceline.transport.deadline import Deadline
from paceline.transport.security import TokenHandshake
from paceline.transport.tls_channel import TlsChannel

# What the server says first inside TLS. In TLS 1.3 a client is done before the server has checked its certificate; only
# a client that has read this knows that it was not refused.
_WELCOME: Final = b"\x01"


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """Files in PEM format: this process's certificate and its unencrypted key, and the certificate of the authority.

    >>> settings = TlsSettings(Path("worker.pem"), Path("worker.key"), Path("authority.pem"))
    """

    certificate: Path
    key: Path
    authority: Path


@final
class TlsHandshake:
    """TLS with certificates on both sides, and the proof of the token inside it.

    Raises UsageError when the files are not there or do not belong together.
    """

    def __init__(self, settings: TlsSettings, inside: TokenHandshake) -> None:
        self._settings = settings
        self._inside = inside
        self._serving = _context(ssl.PROTOCOL_TLS_SERVER, settings)
        self._serving.num_tickets = 0  # sessions are not resumed
        self._calling = _context(ssl.PROTOCOL_TLS_CLIENT, settings)

    def answer(self, channel: SocketChannel, deadline: Deadline) -> tuple[Channel, bytes]:
        """Play the server; see `Handshake.answer`."""
        tls = TlsChannel(channel, self._serving, server_side=True)
        try:
            tls.shake_hands(deadline)
        except ssl.SSLError as error:
            raise AuthenticationFailed(f"the client has no certificate that holds here ({error.reason})") from error
        tls.write([_WELCOME], deadline)
        return self._inside.answer(tls, deadline)

    def introduce(self, channel: SocketChannel, identity: bytes, server: str, deadline: Deadline) -> Channel:
        """Play the client; see `Handshake.introduce`."""
        tls = TlsChannel(channel, self._calling, server_side=False)
        try:
            tls.shake_hands(deadline)
            read_exactly(tls, len(_WELCOME), deadline)
        except ssl.SSLError as error:
            raise self._refusal(error, server) from error
        except (EOFError, ConnectionError):
            raise PeerError(
                f"{server} closed the connection instead of speaking TLS: it may run without TLS, be busy or be "
                "shutting down"
            ) from None
        return self._inside.introduce(tls, identity, server, deadline)

    def _refusal(self, error: ssl.SSLError, server: str) -> PeerError:
        """Say whose certificate was not accepted, and what to do."""
        settings = self._settings
        if isinstance(error, ssl.SSLCertVerificationError):
            return AuthenticationFailed(
                f"the certificate of {server} does not hold: {error.verify_message}. Expected one that is valid now "
                f"and signed by the authority in {settings.authority}: give every process of the job certificates of "
                "one authority, and do not trust this server"
            )
        reason = (error.reason or str(error)).lower().replace("_", " ")
        if "alert" in reason:
            return AuthenticationFailed(
                f"{server} refused the certificate in {settings.certificate} ({reason}): give it one that is valid "
                "now and signed by the authority of the server"
            )
        return PeerError(f"{server} does not speak TLS 1.3 ({reason}): give all processes of the job TLS, or none")


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
