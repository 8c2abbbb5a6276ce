"""What every transport does: it carries frames between two processes and knows nothing of their meaning.

A frame is a small header (bytes) and a raw body (memory). Frames of one connection arrive whole, once and in
the order in which they were sent, until the connection ends; what was under way then may or may not have arrived.

Lifetime of a received body. Over shm and memory, when the sender took it from its transport's `allocate`, it is a view
of the sender's memory: the protocol above decides when the sender may write there again. Every other body is copied
before `send` returns, and is the receiver's own; over tcp that is every body. Either lives until the last view of it is
dropped. Treat received bodies as read-only.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from paceline.errors import UsageError
from paceline.transport.buffer_pool import Buffer

EMPTY: Final = memoryview(b"")

# Says where a body shall go, given the header of its frame and its size in bytes; None for fresh memory.
Place = Callable[[bytes, int], Buffer | memoryview | None]

MIN_TOKEN_BYTES: Final = 32
MAX_IDENTITY_BYTES: Final = 1024


@dataclass(frozen=True, slots=True)
class Frame:
    """One message: `header` as sent, `body` a flat memory of bytes (`EMPTY` when there is none).

    `buffer` is set when the body lies in lent memory: its owner is now the receiver of the frame, who releases it.
    """

    header: bytes
    body: memoryview
    buffer: Buffer | None = None

    def release(self) -> None:
        """Give lent memory back: the body is not looked at any more. Nothing happens where none is lent."""
        if self.buffer is not None:
            self.buffer.release()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a peer may make us do: sizes in bytes per frame, counts per listener or connection."""

    # The declaration of a table names each of its parameters: this holds some ten thousand of them.
    max_header_bytes: int = 1 << 20
    max_body_bytes: int = 1 << 34
    max_segments: int = 1024
    handshake_timeout_s: float = 5.0
    max_half_open: int = 64  # handshakes at once
    max_silent: int = 512  # clients that are connected and have yet to speak, or to shake hands


class Secret(Protocol):
    """What all processes of one job know, and nobody else."""

    @property
    def job(self) -> str:
        """The name of the job."""
        ...

    def tokens(self) -> Sequence[bytes]:
        """Return the tokens that hold now: with the first one we prove ourselves, others may do so with any."""
        ...


@dataclass(frozen=True, slots=True)
class Credentials:
    """The secret shared by all processes of one job. The token never appears in a repr or a message.

    Raises UsageError when the token has fewer than 32 bytes.

    >>> import os
    >>> credentials = Credentials(token=os.urandom(32), job="mnist-7")
    """

    token: bytes = field(repr=False)
    job: str

    def __post_init__(self) -> None:
        if len(self.token) < MIN_TOKEN_BYTES:
            raise UsageError(
                f"the token of job {self.job!r} has {len(self.token)} bytes, expected at least "
                f"{MIN_TOKEN_BYTES}: make one with os.urandom({MIN_TOKEN_BYTES})"
            )

    def tokens(self) -> Sequence[bytes]:
        """Return the one token; see `Secret.tokens`."""
        return (self.token,)


ANY: Final = "any"  # in the place of a holder, any process of a job; in that of a job, every job


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What a peer's certificate says: whom it is for ("worker-3", "any"), and its serial number in hexadecimal.

    Without TLS there is none, and both are empty.
    """

    holder: str = ""
    serial: str = ""

    def permit(self, role: str, rank: int) -> bool:
        """Say whether a peer with these papers may call itself so; where there are none, anybody may."""
        return self.holder in ("", ANY, f"{role}-{rank}")

    def are_among(self, names: Collection[str]) -> bool:
        """Say whether the holder or the serial number is one of these names."""
        return self.holder in names or self.serial in names


NO_IDENTITY: Final = PeerIdentity()


class Connection(Protocol):
    """One end of an open connection; either end may send at any time."""

    @property
    def peer(self) -> str:
        """Who is at the other end, for messages, e.g. "127.0.0.1:4711"."""
        ...

    @property
    def identity(self) -> bytes:
        """What the connecting side said of itself in the handshake; the same at both ends."""
        ...

    @property
    def peer_identity(self) -> PeerIdentity:
        """What the certificate of the other end says."""
        ...

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        """Send one frame; blocks until the carrier has taken it. Any thread may call this.

        Raises DeadlineExceeded (the connection stays usable if not one byte of the frame had left, and is over
        otherwise), ConnectionLost, or UsageError for a frame over the limits or a body that is not contiguous.
        """
        ...

    def has_room(self, body: memoryview) -> bool:
        """Return whether `send` would take this body without waiting for the other end. Does not block."""
        ...

    def receive(self, *, timeout_s: float, place: Place | None = None) -> Frame:
        """Wait for the next frame. One thread at a time.

        `place` is asked, once a frame, where a body goes that is not the sender's memory and not empty: into writable
        memory of exactly its size, of which the frame then has a view (and the buffer, where it gave one), or (None)
        into fresh memory. When it raises PeerError, that comes out here and the connection is over.

        Raises DeadlineExceeded (the connection stays usable; a frame half received is continued by the next call),
        ConnectionLost, PeerError for bytes that are not a frame within the limits (the connection is then over), or
        UsageError when `place` gave memory of another size.
        """
        ...

    def close(self) -> None:
        """End the connection; wakes threads blocked in send and receive with ConnectionLost. May be repeated.

        Owed even after ConnectionLost: only this frees the descriptors.
        """
        ...


class Listener(Protocol):
    """Where others connect to. Handshakes run beside `accept`: a slow or hostile client delays nobody."""

    @property
    def address(self) -> str:
        """What to pass to `connect`, e.g. "tcp://127.0.0.1:40123"."""
        ...

    def accept(self, *, timeout_s: float) -> Connection:
        """Wait for the next connection whose handshake succeeded.

        Raises DeadlineExceeded, or ConnectionLost once the listener is closed.
        """
        ...

    def close(self) -> None:
        """Stop listening; connections already accepted live on. Wakes a blocked accept. May be repeated."""
        ...


class Transport(Protocol):
    """A way to carry frames: makes listeners and connections."""

    @property
    def name(self) -> str:
        """The scheme of its addresses, e.g. "tcp"."""
        ...

    @property
    def maps_memory(self) -> bool:
        """Whether an allocated body arrives as a mapping: it shows what its owner writes, and nobody else can."""
        ...

    def allocate(self, size_bytes: int) -> memoryview:
        """Give writable memory whose content travels without a copy where the carrier can (shm, memory).

        It may be sent over every connection that this transport made or accepted, also over several at once, and any
        view that lies wholly inside it will do as a body. It stays allocated until its last view is dropped, whatever
        becomes of the connections. Does not block; raises UsageError for a negative size.
        """
        ...

    def listen(self, address: str) -> Listener:
        """Open a listener at `address`; raises UsageError when that place is taken or not permitted."""
        ...

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> Connection:
        """Connect to `address`; blocks until the handshake is done.

        `identity`, at most 1024 bytes, is seen by the listening side. Raises UsageError (bad address), PeerError
        (nobody there, other wire version), AuthenticationFailed (other token or job) or DeadlineExceeded.
        """
        ...


def check_identity(identity: bytes) -> None:
    """Raise UsageError when `identity` is longer than a handshake may carry."""
    if len(identity) > MAX_IDENTITY_BYTES:
        raise UsageError(f"the identity has {len(identity)} bytes, at most {MAX_IDENTITY_BYTES} are allowed")


def strip_scheme(address: str, scheme: str) -> str:
    """Take "tcp://" or the like off `address`; an address without a scheme is taken as it is."""
    found, separator, rest = address.partition("://")
    if not separator:
        return address
    if found != scheme:
        raise UsageError(f"{address!r} is not an address of the {scheme} transport, expected {scheme}://...")
    return rest
