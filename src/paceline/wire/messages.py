"""The messages on the wire, how they are encoded, and which role may send which.

Frames of pushes, pulls and rows lie around the core's messages. One byte for the kind, then the message in MessagePack,
checked field by field. Nothing is ever unpickled, and a message that does not match its declared fields is refused
before it is used; so is one that carries the identity of another peer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Final, Generic, Literal, TypeAlias, TypeVar, final

import msgspec

from paceline.core import messages
from paceline.core.messages import PushId, Sender
from paceline.core.settings import MAX_WORKERS
from paceline.core.worker import MAX_TOGETHER
from paceline.errors import AuthenticationFailed, PeerError, UsageError
from paceline.transport.base import EMPTY, Connection
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
        """Return the header of a frame that carries this message.

        Raises:
            UsageError: it has what cannot be encoded, which a script gave.
        """
        try:
            return bytes((self._number[type(message)],)) + self._encoder.encode(message)
        except (OverflowError, UnicodeEncodeError, TypeError) as error:
            raise UsageError(
                f"a {type(message).__name__} cannot be sent ({error}): expected whole numbers of 64 bits, and texts of "
                "Unicode characters alone"
            ) from error

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


class Hello(msgspec.Struct, frozen=True):
    """The introduction of a connecting process: its role ("worker" or "server"), rank and life.

    `connection` counts the connections that this life has made to the listener before, so that an older one that
    arrives late does not replace a newer one.
    """

    role: str
    rank: int
    incarnation: int
    generation: int
    connection: int = 0


class PushFrame(msgspec.Struct, frozen=True):
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


class PullFrame(msgspec.Struct, frozen=True):
    """A pull, with the last request of this table whose values from this server the worker has copied.

    The server reuses the memory in which values travel: what it sent for `taken` may be overwritten.
    """

    pull: messages.Pull
    taken: int


class Keys(msgspec.Struct, frozen=True):
    """The ids of a frame about rows: how many, and whether the body begins with them (`sent`).

    `digest` identifies the list where the server caches lists of ids; else it is empty.
    """

    num: int
    digest: bytes
    sent: bool


class RowPushFrame(msgspec.Struct, frozen=True):
    """A push of rows, which follow the ids in the body. `count`, `hyper` and `expected`: as in a `PushFrame`."""

    push: messages.Push
    count: float
    hyper: tuple[Hyper, ...]
    keys: Keys
    expected: float = 0.0


class StepFrame(msgspec.Struct, frozen=True):
    """A step: pushes, the tick that ends their clock, and pulls of dense tables.

    `ends`: the clock below which all are finished, -1 without a tick. `sizes`: the bytes of each push in the body, each
    at the next multiple of 8. `row_pushes` come after the others, and with their ids.
    """

    pushes: tuple[PushFrame, ...]
    ends: int
    pulls: tuple[PullFrame, ...]
    sizes: tuple[int, ...]
    row_pushes: tuple[RowPushFrame, ...] = ()

    @property
    def all_pushes(self) -> tuple[PushFrame | RowPushFrame, ...]:
        """The pushes, in the order of their bodies."""
        return (*self.pushes, *self.row_pushes)

    @property
    def step(self) -> messages.WholeStep:
        """The step, for the core."""
        pushes = tuple([frame.push for frame in (*self.pushes, *self.row_pushes)])
        pulls = tuple([frame.pull for frame in self.pulls])
        sender = pulls[0].sender if pulls else pushes[0].id.sender
        return messages.WholeStep(pushes, None if self.ends < 0 else messages.Clock(sender, self.ends), pulls)

    def check(self) -> None:
        """Raise PeerError for a step of nothing, or of too much, or of rows whose ids do not come with them."""
        num_pushes = len(self.pushes) + len(self.row_pushes)
        if not (num_pushes or self.pulls) or max(num_pushes, len(self.pulls)) > MAX_TOGETHER:
            raise PeerError(f"a step has {num_pushes} pushes and {len(self.pulls)} pulls")
        if len(self.sizes) != num_pushes or min(self.sizes, default=0) < 0:
            raise PeerError(f"a step of {num_pushes} pushes has bodies of {self.sizes[:3]} bytes")
        for frame in self.row_pushes:
            if frame.keys.digest or not frame.keys.sent:
                raise PeerError(f"a step pushes rows of table '{frame.push.table[:200]}' without their ids")

    @property
    def body_bytes(self) -> int:
        """The bytes of the body of the frame, with those between two pushes."""
        return _starts(self.sizes)[-1]

    def bodies(self, body: memoryview) -> list[memoryview]:
        """Return the body of each push, as views of the body of the frame; raises PeerError if it has other bytes."""
        if len(self.sizes) == 1 and self.sizes[0] == len(body):
            return [body]
        starts = _starts(self.sizes)
        if starts[-1] != len(body):
            raise PeerError(f"a step of {len(self.sizes)} pushes came with {len(body)} bytes, expected {starts[-1]}")
        return [body[start : start + size] for start, size in zip(starts, self.sizes, strict=False)]


PushPart: TypeAlias = tuple[PushFrame | RowPushFrame, memoryview]  # and its body


def step_of(
    parts: Sequence[PushPart], ends: int = -1, pulls: tuple[PullFrame, ...] = ()
) -> tuple[StepFrame, list[memoryview]]:
    """Return a step, and the bodies of its pushes in their order."""
    frames, bodies = list[PushFrame](), list[memoryview]()
    row_frames, row_bodies = list[RowPushFrame](), list[memoryview]()
    for frame, body in parts:
        if isinstance(frame, PushFrame):
            frames.append(frame)
            bodies.append(body)
        else:
            row_frames.append(frame)
            row_bodies.append(body)
    bodies += row_bodies
    sizes = tuple([body.nbytes for body in bodies])
    return StepFrame(tuple(frames), ends, pulls, sizes, tuple(row_frames)), bodies


def _starts(sizes: Sequence[int]) -> list[int]:
    """Return where in the body of a step each push begins, and where the last one ends."""
    if len(sizes) == 1:
        return [0, sizes[0]]
    return list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))


def joined(bodies: Sequence[memoryview]) -> memoryview:
    r"""Return the body of a step: that of its only push, or a copy of all.

    >>> bytes(joined([memoryview(b"abc"), memoryview(b"de")]))
    b'abc\x00\x00\x00\x00\x00de\x00\x00\x00\x00\x00\x00'
    """
    if len(bodies) < 2:
        return bodies[0] if bodies else EMPTY
    starts = _starts([body.nbytes for body in bodies])
    whole = memoryview(bytearray(starts[-1]))
    for body, start in zip(bodies, starts, strict=False):
        whole[start : start + body.nbytes] = body
    return whole


class RowPullFrame(msgspec.Struct, frozen=True):
    """A pull of rows; the answer has them in the order of the ids."""

    pull: messages.Pull
    keys: Keys


class KeysWanted(msgspec.Struct, frozen=True):
    """From a server: I do not have the ids that this push (or, if `seq` is -1, this pull) refers to; send them."""

    table: str
    seq: int
    request: int


class Unsubscribe(msgspec.Struct, frozen=True):
    """From a worker: I no longer cache these rows (their ids are the body), so do not send me their changes.

    Ignored if a read with the number `request` or a later one has arrived before, as that may have requested them.
    """

    sender: messages.Sender
    table: str
    request: int


class RowsUsed(msgspec.Struct, frozen=True):
    """From a worker: in this clock I have read these rows (their ids are the body) from my cache.

    It is sent before every copy of the tick that ends the clock; the server ignores repetitions.
    """

    sender: messages.Sender
    table: str
    clock: int


class PushPiece(msgspec.Struct, frozen=True):
    """A piece of a push of a dense table that is sent in several, in order; its body begins `at` this byte of the push.

    Its sender reads the table in the next clock, and takes `EarlyValues`. With the last piece the push has arrived.
    """

    push: PushFrame
    at: int


class EarlyValues(msgspec.Struct, frozen=True):
    """From a server: values of a dense table after `clock`, if no worker that pushes in it is lost; from byte `at` on.

    They count if a `FetchedRest` says so.
    """

    table: str
    clock: int
    at: int


class FetchedRest(msgspec.Struct, frozen=True):
    """The values that a pull asked for: `num_early` bytes of them are those that came as `EarlyValues` before."""

    fetched: messages.Fetched
    num_early: int


class FactoredMatrix(msgspec.Struct, frozen=True):
    """A matrix whose gradient comes as factors: its index among the parameters of the table, and the samples."""

    index: int
    num_samples: int


class FactoredPush(msgspec.Struct, frozen=True):
    """A push of a dense table with factors in the place of some gradients; `update.factors.pack` makes its body.

    `matrices`: by index, in ascending order. `checksum`: the CRC-32 of the body; None where memory is not checked.
    """

    push: PushFrame
    matrices: tuple[FactoredMatrix, ...]
    checksum: int | None = None


_ALIGNMENT: Final = 8  # bytes of the widest number

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
    PushPiece,
    EarlyValues,
    FetchedRest,
    requests.ListTables,
    requests.BeginCut,
    requests.ReadCut,
    requests.EndCut,
    requests.PublishTable,
    messages.Repeated,
    messages.Replicated,
    FactoredPush,
)
_PUSHES: Final = tuple(map(_CODEC.kind_byte, (PushFrame, StepFrame, PushPiece)))
_JOINED: Final = _CODEC.kind_byte(messages.Joined)
_SAID_AGAIN: Final = tuple(map(_CODEC.kind_byte, (messages.Held, KeysWanted)))

encode = _CODEC.encode
decode = _CODEC.decode


def is_push(header: bytes) -> bool:
    """Return whether a header is that of a push, a step or a piece of a push, without decoding it."""
    return header[:1] in _PUSHES


def is_joined(header: bytes) -> bool:
    """Return whether a header is that of `Joined`, without decoding it."""
    return header[:1] == _JOINED


def is_said_again(header: bytes) -> bool:
    """Return whether a header is of an answer that a push gets each time it is repeated, without decoding it."""
    return header[:1] in _SAID_AGAIN


Role = Literal["worker", "server", "reader"]

# The role that may send each message to a server; None for messages to workers, and for those of handshakes.
SENDERS: Final[dict[type, Role | None]] = {
    Hello: None,
    PushFrame: "worker",
    PullFrame: "worker",
    StepFrame: "worker",
    PushPiece: "worker",
    FactoredPush: "worker",
    EarlyValues: None,
    FetchedRest: None,
    RowPushFrame: "worker",
    RowPullFrame: "worker",
    Unsubscribe: "worker",
    RowsUsed: "worker",
    KeysWanted: None,
    messages.Join: "worker",
    messages.Leave: "worker",
    messages.Clock: "worker",
    messages.Taken: "worker",
    messages.Repeated: "worker",
    messages.Joined: None,
    messages.Left: None,
    messages.Held: None,
    messages.Applied: None,
    messages.PushRefused: None,
    messages.Ticked: None,
    messages.Fetched: None,
    messages.Delivered: None,
    messages.PullRefused: None,
    messages.WorkerRefused: None,
    messages.Replicated: None,
    messages.Follow: "server",
    messages.Closed: "server",
    requests.Declare: "worker",
    requests.DeclareRows: "worker",
    requests.Describe: "worker",
    requests.Initialise: "worker",
    requests.AwaitValues: "worker",
    requests.SaveState: "worker",
    requests.LoadState: "worker",
    requests.Barrier: "worker",
    requests.ClaimWork: "worker",
    requests.ReportWait: "worker",
    requests.CallFunction: "worker",
    requests.CountRows: "worker",
    requests.ReadRows: "worker",
    requests.WriteRows: "worker",
    requests.ListTables: "worker",
    requests.BeginCut: "worker",
    requests.ReadCut: "worker",
    requests.EndCut: "worker",
    requests.PublishTable: "worker",
    requests.RequestDone: None,
    requests.RequestFailed: None,
}


_MOST_CLOCKS: Final = 1 << 63


def check_sender(hello: Hello, message: object, num_servers: int) -> None:
    """Raise PeerError unless the peer's role may send this message, and the message carries the peer's identity."""
    if SENDERS[type(message)] != hello.role:
        raise PeerError(f"a {hello.role} may not say {type(message).__name__}")
    if isinstance(message, StepFrame):
        message.check()
        pushes = (*message.pushes, *message.row_pushes)
        _check_worker(hello, *[part.push.id for part in pushes], *[part.pull.sender for part in message.pulls])
        if message.ends >= _MOST_CLOCKS:
            raise PeerError(f"{hello.role} {hello.rank} ends clock {message.ends}")
    elif isinstance(message, PushFrame | RowPushFrame):
        _check_worker(hello, message.push.id)
    elif isinstance(message, PushPiece | FactoredPush):
        _check_worker(hello, message.push.push.id)
    elif isinstance(message, PullFrame | RowPullFrame):
        _check_worker(hello, message.pull.sender)
    elif isinstance(
        message,
        messages.Join | messages.Leave | messages.Clock | messages.Taken | messages.Repeated | Unsubscribe | RowsUsed,
    ):
        _check_worker(hello, message.sender)
    elif isinstance(message, messages.Follow | messages.Closed):
        _check_server(hello, message, num_servers)


def check_caller(hello: object, connection: Connection) -> Hello:
    """Return the caller's introduction.

    Raises PeerError: it has none, or no rank that there can be, or its certificate is for another process.
    """
    if not isinstance(hello, Hello):
        raise PeerError("the peer did not introduce itself")
    if not 0 <= hello.rank < MAX_WORKERS:
        raise PeerError(f"it calls itself {hello.role} {hello.rank}, expected a rank from 0 to {MAX_WORKERS - 1}")
    if not connection.peer_identity.permit(hello.role, hello.rank):
        holder = connection.peer_identity.holder
        raise PeerError(f"it calls itself {hello.role} {hello.rank}, but its certificate is for {holder}")
    return hello


def check_server(connection: Connection, rank: int, role: str = "server") -> None:
    """Raise AuthenticationFailed, and close the connection, if its certificate is not for this (data) server."""
    if not connection.peer_identity.permit(role, rank):
        connection.close()
        name = "data server" if role == "data" else role
        raise AuthenticationFailed(
            f"{connection.peer} should be {name} {rank}, but its certificate is for {connection.peer_identity.holder}; "
            "do not trust it"
        )


def check_source(connection: Connection) -> None:
    """Raise AuthenticationFailed, and close the connection, if its certificate is for no server of versions.

    Those are a server of its own, which has rank 0, and relays of any rank.
    """
    shown = connection.peer_identity
    if not shown.permit("server", 0) and not shown.has_role("relay"):
        connection.close()
        raise AuthenticationFailed(
            f"{connection.peer} should be a server or a relay, but its certificate is for {shown.holder}; do not trust "
            "it"
        )


def _check_worker(hello: Hello, *said_by: PushId | Sender) -> None:
    """Raise PeerError for a message with the identity of another worker or incarnation."""
    for said in said_by:
        if (said.worker, said.incarnation) != (hello.rank, hello.incarnation):
            raise PeerError(
                f"{hello.role} {hello.rank} (incarnation {hello.incarnation}) speaks as worker {said.worker} "
                f"(incarnation {said.incarnation})"
            )


def _check_server(hello: Hello, message: messages.Follow | messages.Closed, num_servers: int) -> None:
    follows = isinstance(message, messages.Follow)
    is_negative = message.norm is not None and message.norm < 0.0
    if not 0 <= hello.rank < num_servers or (follows and message.server != hello.rank) or is_negative:
        raise PeerError(f"{message} came from server {hello.rank} of {num_servers}")
