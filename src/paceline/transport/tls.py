"""TLS around the token handshake: traffic is encrypted, and both sides show a certificate.

One authority signs the certificates, and only for the processes of one job (or of one team): a process with one may be
at either end, at any address. A certificate names its holder; permissions are decided elsewhere. TLS 1.3 only.
"""

import hashlib
import ssl
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, cast, final

import msgspec
from msgspec.structs import replace

from paceline.errors import CertificateRefused, PeerError, ProtocolBug, UsageError
from paceline.transport.base import PeerIdentity
from paceline.transport.buffers import LentBody
from paceline.transport.channel import OutOfTime, SocketChannel, read_exactly
from paceline.transport.deadline import Deadline
from paceline.transport.file_watch import FileWatch
from paceline.transport.frames import MAGIC, what_speaks
from paceline.transport.handshake import MAX_TLS_HANDSHAKE_BYTES, HandshakeResult, TokenHandshake
from paceline.transport.peer_identity import clock, read_identity, read_revoked, validity

# Sixteen records of the largest size: enough that the cost of a call does not matter.
_TURN_BYTES: Final = 256 * 1024
# Twice as many wait at most while a frame is written. More are answers to a peer that asks for new keys without end.
_MOST_LEAVING_BYTES: Final = 4 * _TURN_BYTES
_FIRST_BYTES: Final = 4  # say what a program is that does not speak TLS


@final
class TlsChannel:
    """A `Channel` that encrypts what it carries over another one, which it owns.

    OpenSSL may work for one thread at a time on a connection. So it never touches the socket: under a lock it turns
    bytes into records and records into bytes, and the thread that has records to send, or waits for some, does so
    without the lock.
    """

    def __init__(
        self, inner: SocketChannel, context: ssl.SSLContext, *, server_side: bool, allowance_bytes: int
    ) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._arrived = ssl.MemoryBIO()
        self._leaving = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=server_side)
        # Until the peer is authenticated it may send only this many more bytes, which also bounds memory.
        self._allowance_bytes = allowance_bytes
        self._records = memoryview(bytearray(allowance_bytes))
        self.first = b""  # of what the other side has said

    def trust(self) -> None:
        """Accept any amount of data from now on: the peer is authenticated."""
        self._allowance_bytes = sys.maxsize
        self._records = memoryview(bytearray(_TURN_BYTES))

    def certificate(self, *, binary: bool) -> object:
        """Return the peer's certificate, which has been checked: as a dict, or as DER."""
        return self._tls.getpeercert(binary)

    def shake_hands(self, deadline: Deadline) -> None:
        """Agree on keys, and check the other side's certificate; raises SSLError when that fails."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._take_in(deadline)
            except ssl.SSLError:
                with suppress(OSError, OutOfTime):  # the other side may be gone; if not, it learns why
                    self._flush(deadline)
                raise
            else:
                self._flush(deadline)
                return

    def read_some(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for bytes; see `Channel.read_some`."""
        while True:
            with self._lock:
                num_bytes = self._decrypt(buffer)
            if self._leaving.pending > _MOST_LEAVING_BYTES:
                raise PeerError("it asks for new keys, which TLS answers, again and again")
            if num_bytes:
                return num_bytes
            self._take_in(deadline)

    def read_much(self, buffer: memoryview, deadline: Deadline) -> int:
        """Wait for bytes: what has arrived is decrypted while more arrives; see `Channel.read_much`."""
        return self.read_some(buffer, deadline)

    def read_with_descriptors(self, buffer: memoryview, deadline: Deadline) -> tuple[int, list[int]]:
        """Wait for bytes; descriptors never come."""
        return self.read_some(buffer, deadline), []

    def write(self, buffers: Sequence[memoryview | bytes], deadline: Deadline, descriptor: int | None = None) -> None:
        """Write all; see `Channel.write`."""
        if descriptor is not None:
            raise ProtocolBug("a descriptor cannot pass through TLS")
        self._write_first(buffers, deadline)
        self._flush(deadline, sum(map(len, buffers)))

    def write_lent(self, buffers: Sequence[memoryview | bytes], body: LentBody, deadline: Deadline) -> None:
        """Write all; see `Channel.write_lent`."""
        num_encrypted = self._write_first(buffers, deadline)
        for start in range(0, len(body.memory), _TURN_BYTES):
            with body.lock:
                num_encrypted += self._encrypt(body.memory[start : start + _TURN_BYTES])
            self._flush_full(deadline, num_encrypted)
        self._flush(deadline, num_encrypted)

    def _write_first(self, buffers: Sequence[memoryview | bytes], deadline: Deadline) -> int:
        """Write all except the last records; returns how many bytes are encrypted."""
        self._inner.wait_for_room(deadline)  # once it is encrypted, a record cannot be taken back
        num_encrypted = 0
        for piece in _pieces(buffers):
            num_encrypted += self._encrypt(piece)
            self._flush_full(deadline, num_encrypted)
        return num_encrypted

    def _encrypt(self, piece: memoryview) -> int:
        with self._lock:
            return self._tls.write(piece)

    def _flush_full(self, deadline: Deadline, num_encrypted: int) -> None:
        if self._leaving.pending >= _TURN_BYTES:
            self._flush(deadline, num_encrypted)

    def has_room(self) -> bool:
        """Return whether the kernel has room; see `Channel.has_room`."""
        return self._inner.has_room()

    def fileno(self) -> None:
        """Return None: what was decrypted may wait here while the socket has nothing to read."""

    def silent_s(self) -> float:
        """Return how long the other end has been silent; see `Channel.silent_s`."""
        return self._inner.silent_s()

    def shut(self) -> None:
        """End the stream; see `Channel.shut`. Every frame says its length, so TLS need not say that it ends."""
        self._inner.shut()

    def close(self) -> None:
        """Free the descriptor; see `Channel.close`."""
        self._inner.close()

    def _decrypt(self, buffer: memoryview) -> int:
        """Fill `buffer` from the records that have arrived; returns how many bytes were read."""
        num_bytes = 0
        with suppress(ssl.SSLWantReadError):  # what is there may end within a record
            while num_bytes < len(buffer) and (self._arrived.pending or self._tls.pending()):
                rest = buffer[num_bytes:]
                num_read = cast("int", cast("object", self._tls.read(len(rest), rest)))  # bytes only without a buffer
                if num_read == 0:
                    raise EOFError
                num_bytes += num_read
        return num_bytes

    def _take_in(self, deadline: Deadline) -> None:
        """Wait for records, or parts of them."""
        if not self._allowance_bytes:
            raise PeerError("it said more than a handshake takes before it had proven itself")
        num_bytes = self._inner.read_some(self._records[: self._allowance_bytes], deadline)
        self._allowance_bytes -= num_bytes
        self.first = self.first or bytes(self._records[: min(num_bytes, _FIRST_BYTES)])
        with self._lock:
            self._arrived.write(self._records[:num_bytes])

    def _flush(self, deadline: Deadline, num_encrypted: int = 0) -> None:
        """Send the records that are ready, which hold this many bytes of what is being written, or the last of them."""
        with self._lock:
            records = self._leaving.read()
        if not records:
            return
        try:
            self._inner.write([records], deadline)
        except OutOfTime:
            raise OutOfTime(num_encrypted) from None


def _pieces(buffers: Sequence[memoryview | bytes]) -> Iterator[memoryview]:
    for buffer in buffers:
        for start in range(0, len(buffer), _TURN_BYTES):
            yield memoryview(buffer)[start : start + _TURN_BYTES]


# What the server says first inside TLS. In TLS 1.3 a client is done before the server has checked its certificate; only
# a client that has read this knows that it was not refused.
_WELCOME: Final = b"\x01"
_OUT_OF_DATE: Final = (9, 10)  # OpenSSL's codes for a certificate that is not valid yet, or no longer


class TlsSettings(msgspec.Struct, frozen=True):
    """Files in PEM format: this process's certificate and its unencrypted key, and the certificate of the authority.

    `revoked` names what is refused all the same: a holder or the serial number of a certificate a line; the file may
    be missing. All of them are read again when they have changed.

    >>> settings = TlsSettings(Path("worker.pem"), Path("worker.key"), Path("authority.pem"))
    """

    certificate: Path
    key: Path
    authority: Path
    revoked: Path | None = None


class _Own(msgspec.Struct, frozen=True):
    """The contents of our own TLS files; `digest` is that of our certificate."""

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
        self._own = FileWatch((settings.certificate, settings.key, settings.authority), lambda: _read_own(settings))
        self._own.get()
        revoked = settings.revoked
        self._revoked = None if revoked is None else FileWatch((revoked,), lambda: read_revoked(revoked))

    def answer(self, channel: SocketChannel, deadline: Deadline) -> HandshakeResult:
        """Play the server; see `Handshake.answer`."""
        own = self._own.get()
        tls = TlsChannel(channel, own.serving, server_side=True, allowance_bytes=MAX_TLS_HANDSHAKE_BYTES)
        try:
            tls.shake_hands(deadline)
        except ssl.SSLError as error:
            if tls.first == MAGIC:
                raise PeerError("the client does not speak TLS, as this server does: give it certificates") from error
            raise CertificateRefused(f"it has no certificate that holds here ({_reason(error)})") from error
        peer_identity = self._check_identity(tls, "the client")
        tls.write([_WELCOME], deadline)
        greeted = self._inside.answer(tls, deadline, bound=_digest_of_peer(tls) + own.digest)
        self._check_revoked(peer_identity, "the client")  # again: it may have taken its time since
        tls.trust()
        return replace(greeted, peer_identity=peer_identity)

    def introduce(self, channel: SocketChannel, identity: bytes, server: str, deadline: Deadline) -> HandshakeResult:
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
        peer_identity = self._check_identity(tls, server)
        bound = own.digest + _digest_of_peer(tls)
        greeted = self._inside.introduce(tls, identity, server, deadline, bound=bound)
        tls.trust()
        return replace(greeted, peer_identity=peer_identity)

    def _check_identity(self, tls: TlsChannel, peer: str) -> PeerIdentity:
        """Return the identity in the certificate of `peer`; raises CertificateRefused when it was revoked."""
        certificate = cast("dict[str, object]", tls.certificate(binary=False))
        names = cast("tuple[tuple[str, str], ...]", certificate.get("subjectAltName", ()))
        serial = cast("str", certificate["serialNumber"])
        peer_identity = read_identity([name for kind, name in names if kind == "URI"], serial, self._job, peer)
        self._check_revoked(peer_identity, peer)
        return peer_identity

    def _check_revoked(self, peer_identity: PeerIdentity, peer: str) -> None:
        if self._revoked is not None and peer_identity.are_among(self._revoked.get()):
            raise CertificateRefused(
                f"the certificate of {peer} ({peer_identity.holder}, {peer_identity.serial}) was revoked"
            )

    def _refusal(self, error: ssl.SSLError, server: str, first: bytes) -> PeerError:
        """Return an error that names the certificate that was refused, and what to do."""
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
        f"{server} closed the connection instead of speaking TLS: it may run without TLS, be busy or be shutting down, "
        "or a network on the way drops large packets (MTU)"
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
    try:
        digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(begin + own + end)).digest()
    except ValueError as error:  # OpenSSL takes other headers, too; or the file has just been replaced
        raise UsageError(
            f"cannot use {settings.certificate}: expected a certificate in PEM format between {ssl.PEM_HEADER} and "
            f"{ssl.PEM_FOOTER}"
        ) from error
    return _Own(serving, calling, digest)


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
