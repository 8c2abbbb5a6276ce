"""The messages between clients and the gateway, before a client reaches the server of its namespace."""

from __future__ import annotations

import msgspec

from paceline.errors import PeerError
from paceline.job.spec import Count, Rank


class EnterRequest(msgspec.Struct, frozen=True):
    """Admit me as the worker `rank`, None for the lowest free rank, of `workers`, None for any number."""

    rank: Rank | None
    workers: Count | None
    version: str


class EnterFrame(msgspec.Struct, frozen=True):
    """What a client says of itself in the handshake: for which namespace it comes, and what for.

    `hello` is what an admitted worker says of itself to a server; without it, `ask` asks which worker it is, and
    `seeks` whether this server serves the namespace. A head that looks for a replica says both `hello` and the `ask` of
    its clients. None of them waits for a further word of the client.
    """

    namespace: str
    hello: bytes = b""
    ask: EnterRequest | None = None
    seeks: bool = False


class EnterAccepted(msgspec.Struct, frozen=True, tag="admitted"):
    """Take part soon, as this life of this worker. `size`: how many workers there are, as far as is known now.

    `servers`: addresses of all that may come to serve the namespace; empty for this server alone. `keeps_pushes`: keep
    what is applied until the replica has it, which may lag.
    """

    rank: Rank
    incarnation: int
    generation: int
    size: int
    servers: tuple[str, ...] = ()
    keeps_pushes: bool = False


class EnterRefused(msgspec.Struct, frozen=True, tag="turned-away"):
    """You cannot take part, for this reason."""

    reason: str


class EnterElsewhere(msgspec.Struct, frozen=True, tag="elsewhere"):
    """Another server serves the namespace, or has what is newest of it; `address`: where it listens, if known."""

    reason: str
    address: str


class NamespaceStanding(msgspec.Struct, frozen=True, tag="standing"):
    """What a server has of a namespace.

    Args:
        is_head: it serves the namespace, or would; else another server does.
        follows: it has the replica.
        saved: number of the view in which it has saved all that was acknowledged; 0 for none.
        head: address of the server that serves it instead, if that is known.
    """

    is_head: bool
    follows: bool = False
    saved: int = 0
    head: str = ""


Answer = EnterAccepted | EnterRefused | EnterElsewhere | NamespaceStanding

_ENTER_FRAME = msgspec.msgpack.Decoder(EnterFrame)
_ANSWER: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
_ENCODER = msgspec.msgpack.Encoder()


def encode(message: EnterFrame | Answer) -> bytes:
    """Return a message as bytes."""
    return _ENCODER.encode(message)


def decode_enter_frame(identity: bytes) -> EnterFrame:
    """Read what a client says of itself; raises PeerError when it is not valid."""
    try:
        return _ENTER_FRAME.decode(identity)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"the client does not say for which namespace it comes: {error}") from error


def decode_answer(header: bytes) -> Answer:
    """Read the answer to an `EnterRequest`; raises PeerError when it is none."""
    try:
        return _ANSWER.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"malformed answer (do both sides run the same version?): {error}") from error
