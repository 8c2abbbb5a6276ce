"""The interface of all transports: frames between two processes, whatever their meaning.

A frame is a small header (bytes) and a raw body (memory). Frames of one connection arrive whole, once and in
the order in which they were sent, until the connection ends; what was under way then may or may not have arrived.

Lifetime of a received body. Over shm and memory, when the sender took it from its transport's `allocate`, it is a view
of the sender's memory: the protocol above decides when the sender may write there again. Every other body is copied
before `send` returns, and is the receiver's own; over tcp that is every body. Either lives until the last view of it is
dropped. Treat received bodies as read-only.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, final, runtime_checkable

import msgspec

from paceline.errors import DeadlineExceeded, UsageError
from paceline.transport.buffer_pool import Buffer

EMPTY: Final = memoryview(b"")

# Returns where to put a body, given the header of its frame and its size in bytes; None for fresh memory.
AllocateBody = Callable[[bytes, int], Buffer | memoryview | None]

MAX_TOGETHER: Final = 64  # frames that are handed over together

MIN_TOKEN_BYTES: Final = 32
MAX_IDENTITY_BYTES: Final = 1024


class Frame(NamedTuple):
    """One message: `header` as sent, `body` a flat memory of bytes (`EMPTY` when there is none).

    `buffer` is set when the body lies in memory of a buffer pool: the receiver of the frame owns it and releases it.
    A tuple, as these are made faster.
    """

    header: bytes
    body: memoryview
    buffer: Buffer | None = None

    def release(self) -> None:
        """Return the body's buffer, if any, to its pool: the body must not be read afterwards."""
        if self.buffer is not None:
            self.buffer.release()


class Limits(msgspec.Struct, frozen=True):
    """Limits on what a peer may make us do: sizes in bytes per frame, counts per listener or connection."""

    # The declaration of a table names each of its parameters: this holds some ten thousand of them.
    max_header_bytes: int = 1 << 20
    max_body_bytes: int = 1 << 34
    max_segments: int = 1024
    handshake_timeout_s: float = 5.0
    max_half_open: int = 64  # handshakes at once
    max_silent: int = 512  # connected clients that have sent nothing, or wait for their handshake


class Secret(Protocol):
    """The secret that exactly the processes of one job know."""

    @property
    def job(self) -> str:
        """The name of the job."""
        ...

    def tokens(self) -> Sequence[bytes]:
        """Return the tokens that are valid now: we prove our identity with the first, peers with any of them."""
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


ANY: Final = "any"  # as a holder: any process of a job; as a job: every job


class PeerIdentity(msgspec.Struct, frozen=True):
    """The identity in a peer's certificate: its holder ("worker-3", "any") and its serial number in hexadecimal.

    Without TLS there is none, and both are empty.
    """

    holder: str = ""
    serial: str = ""

    def permit(self, role: str, rank: int) -> bool:
        """Return whether this identity allows a peer to act as that process; without a certificate, always True."""
        return self.holder in ("", ANY, f"{role}-{rank}")

    def has_role(self, role: str) -> bool:
        """Return whether this is a certificate for a process of that role, of any rank.

        >>> PeerIdentity("relay-1").has_role("relay"), PeerIdentity("any").has_role("relay")
        (True, False)
        """
        return self.holder.startswith(f"{role}-")

    def are_among(self, names: Collection[str]) -> bool:
        """Return whether the holder or the serial number is one of these names."""
        return self.holder in names or self.serial in names


NO_IDENTITY: Final = PeerIdentity()


@final
class NotServed(DeadlineExceeded):
    """A listener has taken a connection, and no process has finished the handshake there in time."""


class Connection(Protocol):
    """One end of an open connection; either end may send at any time.

    Where bytes are carried, an exception that is none of those below, as the handler of a signal raises it in the
    middle of a frame, ends the connection: what follows would be taken for the rest of that frame.
    """

    @property
    def peer(self) -> str:
        """The address of the peer, for messages, e.g. "127.0.0.1:4711"."""
        ...

    @property
    def identity(self) -> bytes:
        """The identity that the connecting side sent in the handshake; the same at both ends."""
        ...

    @property
    def peer_identity(self) -> PeerIdentity:
        """The identity in the peer's certificate."""
        ...

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        """Send one frame; blocks until the transport has accepted it. Thread-safe.

        Raises DeadlineExceeded (the connection stays usable if not one byte of the frame had left, and is over
        otherwise), ConnectionLost, or UsageError for a frame over the limits or a body that is not contiguous.
        """
        ...

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        """Send these frames (header and body) in order and together, if none has to wait for the other end.

        Returns whether they were sent: all of them or none. Raises as `send` does, except that the connection is over
        after DeadlineExceeded. Thread-safe.
        """
        ...

    def has_room(self, body: memoryview) -> bool:
        """Return whether `send` would take this body without waiting for the other end. Does not block."""
        ...

    def receive(self, *, timeout_s: float, place: AllocateBody | None = None) -> Frame:
        """Wait for the next frame. One thread at a time.

        `place` is called once for each body that is copied and not empty. It returns writable memory of exactly the
        body's size, or a buffer, which becomes the frame's; or None for fresh memory. A PeerError that it raises is
        raised here, and the connection is over.

        Raises DeadlineExceeded (the connection stays usable; a frame half received is continued by the next call, so
        a timeout of 0 takes what is here and does not block),
        ConnectionLost, PeerError for bytes that are not a frame within the limits (the connection is then over), or
        UsageError when `place` gave memory of another size.
        """
        ...

    def has_frame(self) -> bool:
        """Return whether the next frame is here already. Called by the thread that receives; does not block."""
        ...

    def fileno(self) -> int | None:
        """Return a descriptor that is readable while there is something to receive, apart from what `has_frame` finds.

        None if there is no such descriptor, or no more: then only `receive` can wait.
        """
        ...

    def close(self) -> None:
        """End the connection; wakes threads blocked in send and receive with ConnectionLost. May be repeated.

        Call it even after ConnectionLost: nothing else frees the descriptors.
        """
        ...


class Listener(Protocol):
    """Accepts connections. Handshakes run in the background, so a slow or hostile client does not delay others."""

    @property
    def address(self) -> str:
        """The address to pass to `connect`, e.g. "tcp://127.0.0.1:40123"."""
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
    """One way to carry frames: a factory of listeners and connections."""

    @property
    def name(self) -> str:
        """The scheme of its addresses, e.g. "tcp"."""
        ...

    @property
    def maps_memory(self) -> bool:
        """Whether an allocated body arrives as a read-only mapping of memory that its owner alone can write."""
        ...

    def allocate(self, size_bytes: int) -> memoryview:
        """Return writable memory whose content travels without a copy where the transport can (shm, memory).

        It may be sent over every connection that this transport made or accepted, also over several at once, and any
        view that lies wholly inside it will do as a body. It stays allocated until its last view is dropped, whatever
        becomes of the connections. Does not block; raises UsageError for a negative size.
        """
        ...

    def listen(self, address: str) -> Listener:
        """Open a listener at `address`; raises UsageError when the address is in use or not permitted."""
        ...

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> Connection:
        """Connect to `address`; blocks until the handshake is done.

        `identity`, at most 1024 bytes, is seen by the listening side. Raises UsageError (bad address), PeerError
        (no listener there, other wire version), AuthenticationFailed (other token or job) or DeadlineExceeded, which
        is NotServed where the connection was taken.
        """
        ...


@runtime_checkable
class SocketListener(Listener, Protocol):
    """A listener on a socket of the kernel, in whose place another process can go on listening.

    While that process comes up, clients that connect wait in the kernel instead of being refused.
    """

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        ...


@runtime_checkable
class HandsOver(Protocol):
    """A transport whose listeners can be taken over by another process."""

    def listen_again(self, address: str, descriptor: int) -> SocketListener:
        """Go on with a socket that listens at `address` already, and own its descriptor."""
        ...


@runtime_checkable
class MeasuresSilence(Protocol):
    """A connection that knows for how long the other machine was not heard, whatever its processes do."""

    def silent_s(self) -> float:
        """Return for how many seconds nothing has come, not even that the other machine has what was sent."""
        ...


@runtime_checkable
class SharesMemory(Protocol):
    """A transport that can let peers map memory that it has not allocated."""

    def share(self, memory: memoryview, descriptor: int) -> None:
        """Let this memory travel like allocated memory, while a view of it exists.

        `memory` is a mapping of the whole file that is open at `descriptor`. Raises OSError.
        """
        ...


@runtime_checkable
class LeavesMachine(Protocol):
    """A transport that may lead to other machines."""

    def leaves_machine(self, address: str) -> bool:
        """Return whether this address is another machine's, over a line that is slower than memory."""
        ...


def check_identity(identity: bytes) -> None:
    """Raise UsageError when `identity` is longer than a handshake may carry."""
    if len(identity) > MAX_IDENTITY_BYTES:
        raise UsageError(f"the identity has {len(identity)} bytes, at most {MAX_IDENTITY_BYTES} are allowed")


def strip_scheme(address: str, scheme: str) -> str:
    """Return `address` without its scheme ("tcp://" for example), if it has one."""
    found, separator, rest = address.partition("://")
    if not separator:
        return address
    if found != scheme:
        raise UsageError(f"{address!r} is not an address of the {scheme} transport, expected {scheme}://...")
    return rest
