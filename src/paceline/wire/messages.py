"""What workers and servers say to each other beside what the core has them say, and all of it as bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.core import messages
from paceline.update.table import Hyper
from paceline.wire import requests
from paceline.wire.codec import MessageCodec


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

    `screened`: the worker has looked for NaN and infinity already, as the table demands. Servers believe it only over
    memory that is the worker's own. `checksums`: the CRC-32 of the part of each server, by rank; none where memory is
    not checked. `expected`: samples behind all pushes of this clock together, see `Contribution`.
    """

    push: messages.Push
    count: float
    absent: tuple[int, ...]
    hyper: tuple[Hyper, ...]
    screened: bool = False
    checksums: tuple[int, ...] = ()
    expected: float = 0.0


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
    """A push of rows and what they mean: samples behind it, the hyperparameters to use. The rows follow the ids.

    `expected`: as in a `PushFrame`.
    """

    push: messages.Push
    count: float
    hyper: tuple[Hyper, ...]
    keys: Keys
    expected: float = 0.0


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


@dataclass(frozen=True, slots=True)
class RowsUsed:
    """A worker to a server: in this clock I have read these rows (their ids are the body) from what I keep of them.

    It goes before the tick that ends the clock, whenever that is sent; a copy of it means nothing.
    """

    sender: messages.Sender
    table: str
    clock: int


# The position is the kind byte: append, never reorder.
_CODEC: Final = MessageCodec[object](
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
    requests.Barrier,
    requests.RequestDone,
    requests.RequestFailed,
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
    requests.ClaimWork,
    RowsUsed,
    requests.ReportWait,
)
_PUSH: Final = _CODEC.kind_byte(PushFrame)
_JOINED: Final = _CODEC.kind_byte(messages.Joined)

encode = _CODEC.encode
decode = _CODEC.decode


def is_push(header: bytes) -> bool:
    """Say whether the header of a frame is that of a push, without reading it."""
    return header[:1] == _PUSH


def is_joined(header: bytes) -> bool:
    """Return whether the header of a frame is that of the answer to a join, without reading it."""
    return header[:1] == _JOINED
