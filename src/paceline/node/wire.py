"""Messages as bytes: one byte that names the kind, then the message in MessagePack, checked field by field.

Nothing is ever unpickled, and a message that does not match its declared fields is refused before it is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from paceline.core import messages
from paceline.errors import PeerError
from paceline.node import requests
from paceline.tensors.table import Hyper


@dataclass(frozen=True, slots=True)
class Hello:
    """Who connects: its role ("worker" or "server"), rank and life.

    `connection` counts the connections that this life has made to the listener before: what arrives late over an
    earlier one cannot take the place of a newer one.
    """

    role: str
    rank: int
    incarnation: int
    generation: int
    connection: int = 0


@dataclass(frozen=True, slots=True)
class PushFrame:
    """A push and what its tensor means: samples behind it, parts without gradient, the hyperparameters to use.

    `screened`: the worker has looked for NaN and infinity already, as the table demands.
    """

    push: messages.Push
    count: float
    absent: tuple[int, ...]
    hyper: tuple[Hyper, ...]
    screened: bool = False


@dataclass(frozen=True, slots=True)
class PullFrame:
    """A pull, and the last request of this table whose values from this server the worker has taken in.

    Values travel in memory that is used again; this says that what was sent for `taken` may be overwritten.
    """

    pull: messages.Pull
    taken: int


@dataclass(frozen=True, slots=True)
class Keys:
    """The ids of a frame about rows: how many, and whether they lead its body.

    `digest` names the whole list where the server keeps lists; empty where it does not.
    """

    num: int
    digest: bytes
    sent: bool


@dataclass(frozen=True, slots=True)
class RowPushFrame:
    """A push of rows and what they mean: samples behind it, the hyperparameters to use. The rows follow the ids."""

    push: messages.Push
    count: float
    hyper: tuple[Hyper, ...]
    keys: Keys


@dataclass(frozen=True, slots=True)
class RowPullFrame:
    """A pull of rows; the answer has them in the order of the ids."""

    pull: messages.Pull
    keys: Keys


@dataclass(frozen=True, slots=True)
class KeysWanted:
    """A server to a worker: I do not have the list that this push (or, where `seq` is -1, this pull) names: send it."""

    table: str
    seq: int
    request: int


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """A worker to a server: I keep these rows no longer (their ids are the body), so do not send me what changes.

    It means nothing if a read of the number `request` or a later one has come before: that may have asked for them.
    """

    sender: messages.Sender
    table: str
    request: int


# The position is the kind byte: append, never reorder.
_KINDS: tuple[type, ...] = (
    Hello,
    PushFrame,
    messages.Join,
    messages.Leave,
    messages.Clock,
    PullFrame,
    messages.Taken,
    messages.Joined,
    messages.Left,
    messages.Held,
    messages.Applied,
    messages.PushRefused,
    messages.Ticked,
    messages.Fetched,
    messages.Delivered,
    messages.PullRefused,
    messages.WorkerRefused,
    messages.Follow,
    messages.Closed,
    requests.Declare,
    requests.Initialise,
    requests.AwaitValues,
    requests.SaveState,
    requests.LoadState,
    requests.Meet,
    requests.Done,
    requests.Failed,
    RowPushFrame,
    RowPullFrame,
    KeysWanted,
    Unsubscribe,
    requests.DeclareRows,
    requests.CallFunction,
    requests.CountRows,
    requests.ReadRows,
    requests.WriteRows,
    requests.Describe,
    requests.TakePiece,
)
_NUMBER: dict[type, int] = {kind: number for number, kind in enumerate(_KINDS)}
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS = tuple(msgspec.msgpack.Decoder(kind) for kind in _KINDS)


def encode(message: object) -> bytes:
    """Return the header of a frame that carries this message."""
    return bytes((_NUMBER[type(message)],)) + _ENCODER.encode(message)


def is_push(header: bytes) -> bool:
    """Say whether the header of a frame is that of a push, without reading it."""
    return header[:1] == bytes((_NUMBER[PushFrame],))


def decode(header: bytes) -> object:
    """Return the message in the header of a frame.

    Raises:
        PeerError: the bytes are not one of our messages.
    """
    if not header or header[0] >= len(_KINDS):
        raise PeerError(f"a message of unknown kind {header[:1].hex() or 'nothing'}; is the peer of another version?")
    try:
        return _DECODERS[header[0]].decode(memoryview(header)[1:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"a malformed {_KINDS[header[0]].__name__} message: {error}") from error
