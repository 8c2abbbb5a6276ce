"""Handshakes: two processes authenticate each other before the first frame.

Over tcp (`TokenHandshake`): both sides send a fresh nonce, then prove that they hold the job's token by a MAC over
everything said: role, wire version, job, identity and both nonces. The client proves itself first, so a client without
the token learns nothing but the wire version, and that its proof does not hold. Neither a recording nor a reflection of
the other side's bytes passes: the nonces and the role differ.

Over tcp with TLS (`TlsHandshake`): the same, inside TLS with certificates on both sides. The MAC then covers both
certificates, too: a process in between with a certificate of its own cannot pass on the proof of another.

Over shm (`LocalHandshake`): the kernel tells each side the user of the other; only the job is compared.

A handshake reads fixed records and an identity of `MAX_IDENTITY_BYTES` at most, in TLS `MAX_TLS_HANDSHAKE_BYTES` in
all, and takes no memory sized by the peer.
"""

import hmac
import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Final, Protocol, final

import msgspec

from paceline.errors import AuthenticationFailed, PeerError, Refused, UsageError
from paceline.transport.base import MAX_IDENTITY_BYTES, NO_IDENTITY, NotServed, PeerIdentity, Secret
from paceline.transport.channel import Channel, OutOfTime, SocketChannel, read_exactly
from paceline.transport.deadline import Deadline, seconds
from paceline.transport.frames import MAGIC, WIRE_VERSION, check_greeting, what_speaks

NONCE_BYTES: Final = 32
PROOF_BYTES: Final = 32
# Sent instead of a proof: yours is not valid. A connection that ends without it was cut, and is made again.
REFUSAL: Final = bytes(PROOF_BYTES)
MAX_TLS_HANDSHAKE_BYTES: Final = 16384  # as certificates travel

_HELLO: Final = struct.Struct(f"<4sHH{NONCE_BYTES}s")  # magic, wire version, bytes of identity, client's nonce
_GREETING: Final = struct.Struct(f"<4sH{NONCE_BYTES}s")  # magic, wire version, server's nonce
_LOCAL_HELLO: Final = struct.Struct("<4sHH32s")  # magic, wire version, bytes of identity, digest of the job
_LOCAL_ANSWER: Final = struct.Struct("<4sH?")  # magic, wire version, whether the job is ours
_PEER_CREDENTIALS: Final = struct.Struct("3i")  # process, user, group


class HandshakeResult(msgspec.Struct, frozen=True):
    """The result of a handshake: the channel to use from now on, the client's identity, and the peer's certificate."""

    channel: Channel
    identity: bytes
    peer_identity: PeerIdentity = NO_IDENTITY


class Handshake(Protocol):
    """Both sides of one kind of handshake; the channel in the result may wrap the given one.

    They raise PeerError, EOFError, OSError or OutOfTime, or UsageError when our own files are not valid. They never
    close the channel.
    """

    def answer(self, channel: SocketChannel, deadline: Deadline) -> HandshakeResult:
        """Play the server."""
        ...

    def introduce(self, channel: SocketChannel, identity: bytes, server: str, deadline: Deadline) -> HandshakeResult:
        """Play the client of `server`."""
        ...


@final
class TokenHandshake:
    """Mutual proof of the job's token."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret

    def answer(self, channel: Channel, deadline: Deadline, bound: bytes = b"") -> HandshakeResult:
        """Play the server; see `Handshake.answer`. `bound` is what the proofs hold for alone: both certificates."""
        magic, version, identity_bytes, theirs = _HELLO.unpack(read_exactly(channel, _HELLO.size, deadline))
        if magic != MAGIC or identity_bytes > MAX_IDENTITY_BYTES:
            known = what_speaks(magic)
            raise PeerError(f"the client is not a Paceline peer{f' but {known}' if known else ''}")
        ours = os.urandom(NONCE_BYTES)
        channel.write([_GREETING.pack(MAGIC, WIRE_VERSION, ours)], deadline)
        check_greeting(magic, version, "the client")
        identity = read_exactly(channel, identity_bytes, deadline)
        proof = read_exactly(channel, PROOF_BYTES, deadline)
        said = bound, identity, theirs, ours
        token = self._token_behind(proof, self._transcript(b"client", *said))
        if token is None:
            with suppress(OSError, OutOfTime):  # it may have gone away
                channel.write([REFUSAL], deadline)
            raise AuthenticationFailed("the client did not prove that it belongs to this job")
        channel.write([hmac.digest(token, self._transcript(b"server", *said), "sha256")], deadline)
        return HandshakeResult(channel, identity)

    def introduce(
        self, channel: Channel, identity: bytes, server: str, deadline: Deadline, bound: bytes = b""
    ) -> HandshakeResult:
        """Play the client; see `Handshake.introduce` and `answer`."""
        token = self._secret.tokens()[0]
        ours = os.urandom(NONCE_BYTES)
        channel.write([_HELLO.pack(MAGIC, WIRE_VERSION, len(identity), ours) + identity], deadline)
        magic, version, theirs = _read_greeting(channel, _GREETING, server, deadline)
        _check_server(magic, version, server)
        said = bound, identity, ours, theirs
        channel.write([hmac.digest(token, self._transcript(b"client", *said), "sha256")], deadline)
        proof = read_exactly(channel, PROOF_BYTES, deadline)
        if proof == REFUSAL:
            raise AuthenticationFailed(
                f"{server} refused the proof of our token: the token or the job {self._secret.job!r} is not the one it "
                "was started with"
            )
        if not hmac.compare_digest(proof, hmac.digest(token, self._transcript(b"server", *said), "sha256")):
            raise AuthenticationFailed(
                f"{server} did not prove that it belongs to job {self._secret.job!r}; do not trust it"
            )
        return HandshakeResult(channel, identity)

    def _token_behind(self, proof: bytes, transcript: bytes) -> bytes | None:
        """Return the token that the client has proven, if any; all tokens are tried, so the time reveals nothing."""
        held = [
            token
            for token in self._secret.tokens()
            if hmac.compare_digest(proof, hmac.digest(token, transcript, "sha256"))
        ]
        return held[0] if held else None

    def _transcript(
        self, role: bytes, bound: bytes, identity: bytes, client_nonce: bytes, server_nonce: bytes
    ) -> bytes:
        job = self._secret.job.encode()
        return _joined((role, WIRE_VERSION.to_bytes(2), job, bound, identity, client_nonce, server_nonce))


@final
class LocalHandshake:
    """Same machine, same user (as the kernel says), same job."""

    def __init__(self, job: str) -> None:
        self._job = job

    def answer(self, channel: Channel, deadline: Deadline) -> HandshakeResult:
        """Play the server; see `Handshake.answer`."""
        magic, version, identity_bytes, digest = _LOCAL_HELLO.unpack(read_exactly(channel, _LOCAL_HELLO.size, deadline))
        if magic != MAGIC or identity_bytes > MAX_IDENTITY_BYTES:
            raise PeerError("the client is not a Paceline peer")
        ours = hmac.compare_digest(digest, self._digest())
        channel.write([_LOCAL_ANSWER.pack(MAGIC, WIRE_VERSION, ours)], deadline)
        check_greeting(magic, version, "the client")
        if not ours:
            raise AuthenticationFailed("the client belongs to another job")
        return HandshakeResult(channel, read_exactly(channel, identity_bytes, deadline))

    def introduce(self, channel: Channel, identity: bytes, server: str, deadline: Deadline) -> HandshakeResult:
        """Play the client; see `Handshake.introduce`."""
        hello = _LOCAL_HELLO.pack(MAGIC, WIRE_VERSION, len(identity), self._digest())
        channel.write([hello + identity], deadline)
        magic, version, same_job = _LOCAL_ANSWER.unpack(read_exactly(channel, _LOCAL_ANSWER.size, deadline))
        _check_server(magic, version, server)
        if not same_job:
            raise AuthenticationFailed(f"{server} belongs to another job than {self._job!r}")
        return HandshakeResult(channel, identity)

    def _digest(self) -> bytes:
        return hmac.digest(b"paceline job", self._job.encode(), "sha256")


def introduce_within(
    handshake: Handshake, channel: SocketChannel, identity: bytes, server: str, *, timeout_s: float, deadline: Deadline
) -> HandshakeResult:
    """Play the client; on failure, close the channel and raise an error that names the server."""
    try:
        return handshake.introduce(channel, identity, server, deadline)
    except OutOfTime:
        channel.close()
        raise NotServed(
            f"waited {seconds(timeout_s)} for the handshake with {server}: it took the connection and "
            "did not finish; it may be stopped, busy, or no Paceline server, or a network on the way drops large "
            "packets (MTU)"
        ) from None
    except (EOFError, OSError) as error:
        channel.close()
        raise PeerError(
            f"{server} closed the connection during the handshake ({str(error) or 'end of stream'}): it may be busy or "
            "shutting down, want TLS, or be no Paceline server"
        ) from error
    except UsageError as error:
        channel.close()
        raise AuthenticationFailed(f"cannot prove to {server} who we are: {error}") from error
    except PeerError:
        channel.close()
        raise


def check_same_user(sock: socket.socket, peer: str) -> int:
    """Return the process id behind a Unix socket; raises AuthenticationFailed when its user is not ours."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    process, user, _ = _PEER_CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise AuthenticationFailed(f"{peer} runs as user {user}, expected our own user {os.geteuid()}")
    return process


def _read_greeting(
    channel: Channel, layout: struct.Struct, server: str, deadline: Deadline
) -> tuple[bytes, int, bytes]:
    """Read a server's greeting; its first bytes separately, as another program may never send the rest."""
    magic = read_exactly(channel, len(MAGIC), deadline)
    check_greeting(magic, WIRE_VERSION, server)
    return layout.unpack(magic + read_exactly(channel, layout.size - len(MAGIC), deadline))


def _joined(parts: Iterable[bytes]) -> bytes:
    """Join parts so that no two lists of them become the same."""
    return b"".join(len(part).to_bytes(4) + part for part in parts)


def _check_server(magic: bytes, version: int, server: str) -> None:
    if magic == MAGIC and version != WIRE_VERSION:
        raise Refused(
            f"{server} speaks wire version {version}, expected {WIRE_VERSION}: install the same paceline on both sides"
        )
    check_greeting(magic, version, server)
