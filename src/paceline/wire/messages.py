"""The messages on the wire: frames of pushes, pulls and rows around the core's messages, and the encoding of all kinds.

One byte for the kind, then the message in MessagePack, checked field by field. Nothing is ever unpickled, and a message
that does not match its declared fields is refused before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Generic, TypeVar, final

import msgspec

from paceline.core import messages
from paceline.errors import PeerError
from paceline.update.table import Hyper
from paceline.wire import requests

Message = TypeVar("Message")


@final
class MessageCodec(Generic[Message]):
    """Encodes and decodes messages of the given kinds. The position is the kind byte: append, never reorder."""

    def __init__(self, *kinds: type[Message]) -> None:
        self.kinds = kinds
        self._number = {kind: number for number, kind in enumerate(kinds)}
        self._encoder = msgspec.msgpack.Encoder()
        self._decoders = tuple(msgspec.msgpack.Decoder(kind) for kind in kinds)

    def kind_byte(self, kind: type[Message]) -> bytes:
        """Return the first byte of every header of this kind."""
        return bytes((self._number[kind],))

    def encode(self, message: Message) -> bytes:
        """Return the header of a frame that carries this message."""
        return bytes((self._number[type(message)],)) + self._encoder.encode(message)

    def decode(self, header: bytes) -> Message:
        """Return the message in the header of a frame.

        Raises:
            PeerError: the bytes are not a valid message.
        """
        if not header or header[0] >= len(self.kinds):
            raise PeerError(
                f"a message of unknown kind {header[:1].hex() or 'nothing'}; is the peer of another version?"
            )
        try:
            return self._decoders[header[0]].decode(memoryview(header)[1:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise PeerError(f"a malformed {self.kinds[header[0]].__name__} message: {error}") from error


@dataclass(frozen=True, slots=True)
class Hello:
    """The introduction of a connecting process: its role ("worker" or "server"), rank and life.

    `connection` counts the connections that this life has made to the listener before, so that an older one that
    arrives late does not replace a newer one.
    """

    role: str
    rank: int
    incarnation: int
    generation: int
    connection: int = 0


@dataclass(frozen=True, slots=True)
class PushFrame:
    """A push of a dense table. `count` is the number of samples, `absent` the segments without a gradient.

    `hyper`: the hyperparameters to use. `screened`: the worker has checked the gradient for NaN and infinity, as the
    table demands; servers trust this only over memory that the worker owns. `checksums`: the CRC-32 of each server's
    part, by rank; empty where memory is not checked. `expected`: samples behind all pushes of this clock together, see
    `Contribution`.
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
    """A pull, with the last request of this table whose values from this server the worker has copied.

    The server reuses the memory in which values travel: what it sent for `taken` may be overwritten.
    """

    pull: messages.Pull
    taken: int


@dataclass(frozen=True, slots=True)
class StepFrame:
    """A step of a dense table: its push, and the pull in the next clock; `taken` as in a `PullFrame`."""

    frame: PushFrame
    request: int
    needs: int
    taken: int

    @property
    def step(self) -> messages.WholeStep:
        """The step, for the core."""
        push = self.frame.push
        pull = messages.Pull(push.id.sender, self.request, push.table, push.clock + 1, self.needs)
        return messages.WholeStep(push, pull)


@dataclass(frozen=True, slots=True)
class Keys:
    """The ids of a frame about rows: how many, and whether the body begins with them (`sent`).

    `digest` identifies the list where the server caches lists of ids; else it is empty.
    """

    num: int
    digest: bytes
    sent: bool


@dataclass(frozen=True, slots=True)
class RowPushFrame:
    """A push of rows, which follow the ids in the body. `count`, `hyper` and `expected`: as in a `PushFrame`."""

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
    """From a server: I do not have the ids that this push (or, if `seq` is -1, this pull) refers to; send them."""

    table: str
    seq: int
    request: int


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """From a worker: I no longer cache these rows (their ids are the body), so do not send me their changes.

    Ignored if a read with the number `request` or a later one has arrived before, as that may have requested them.
    """

    sender: messages.Sender
    table: str
    request: int


@dataclass(frozen=True, slots=True)
class RowsUsed:
    """From a worker: in this clock I have read these rows (their ids are the body) from my cache.

    It is sent before every copy of the tick that ends the clock; the server ignores repetitions.
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
    StepFrame,
)
_PUSHES: Final = _CODEC.kind_byte(PushFrame), _CODEC.kind_byte(StepFrame)
_JOINED: Final = _CODEC.kind_byte(messages.Joined)

encode = _CODEC.encode
decode = _CODEC.decode


def is_push(header: bytes) -> bool:
    """Return whether a header is that of a `PushFrame` or a `StepFrame`, without decoding it."""
    return header[:1] in _PUSHES


def is_joined(header: bytes) -> bool:
    """Return whether a header is that of `Joined`, without decoding it."""
    return header[:1] == _JOINED
