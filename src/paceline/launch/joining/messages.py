"""Messages between a run and the `paceline join` whose workers take part in it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from paceline.core.settings import MAX_WORKERS
from paceline.errors import PeerError, UsageError
from paceline.job.spec import Count, Rank
from paceline.launch.rendezvous.liveness_lock import ProcessInfo
from paceline.observe.trace import BoundedSeconds
from paceline.transport.base import Limits

JOB: Final = "paceline join"  # name in the proof of the token
ADDRESS_NAME: Final = "join.address"  # in the folder of a run: where it answers
LIMITS: Final = Limits(max_header_bytes=1 << 20, max_body_bytes=0)
SEND_TIMEOUT_S: Final = 5.0  # messages are small, and taken at once


class JoinRequest(msgspec.Struct, frozen=True, tag="request"):
    """Give me so many places. First message of `paceline join`.

    Attributes:
        num: of places, all or none.
        process: where `paceline join` runs, and which paceline it is.
        pid: its number there.
        program: digest of the script that its workers run; empty to join with any.
        ranks: of the places that its certificates are for; None for any.
        shares_folder: whether its workers have the folder of the run, and those that the run was told of.
    """

    num: Count
    process: ProcessInfo
    pid: Annotated[int, msgspec.Meta(ge=1)]
    program: Annotated[str, msgspec.Meta(max_length=64)] = ""
    ranks: Annotated[tuple[Rank, ...], msgspec.Meta(max_length=MAX_WORKERS)] | None = None
    shares_folder: bool = False


class WorkerExited(msgspec.Struct, frozen=True, tag="exited"):
    """The worker of this place has ended; the exit code is minus the number of the signal that killed it."""

    rank: Rank
    exit_code: Annotated[int, msgspec.Meta(ge=-255, le=255)]


class WorkerTrace(msgspec.Struct, frozen=True, tag="trace"):
    """What a worker of another machine has written down, as whole lines of its trace; `now_s` on the clock there."""

    rank: Rank
    now_s: BoundedSeconds
    lines: Annotated[bytes, msgspec.Meta(max_length=1 << 19)]


class JoinAccepted(msgspec.Struct, frozen=True, tag="accepted"):
    """Start workers in these places, each a rank and an incarnation. `spec` is that of the run, as JSON."""

    spec: bytes
    places: tuple[tuple[Rank, Annotated[int, msgspec.Meta(ge=0)]], ...]


class JoinRefused(msgspec.Struct, frozen=True, tag="refused"):
    """You get no place, for this reason."""

    reason: str


class WorkerOrder(msgspec.Struct, frozen=True, tag="order"):
    """Have the worker of this place leave after its step, end as the run does, or killed."""

    rank: Rank
    order: Literal["leave", "end", "kill"]


FromJoiner = JoinRequest | WorkerExited | WorkerTrace
FromRun = JoinAccepted | JoinRefused | WorkerOrder

_Message = TypeVar("_Message")
_ENCODER = msgspec.msgpack.Encoder()
_FROM_JOINER: msgspec.msgpack.Decoder[FromJoiner] = msgspec.msgpack.Decoder(FromJoiner)
_FROM_RUN: msgspec.msgpack.Decoder[FromRun] = msgspec.msgpack.Decoder(FromRun)


def encode(message: FromJoiner | FromRun) -> bytes:
    """Return a message as bytes."""
    return _ENCODER.encode(message)


def decode_from_joiner(header: bytes) -> FromJoiner:
    """Read what `paceline join` says; raises PeerError when it is not valid."""
    return _decoded(_FROM_JOINER, header)


def decode_from_run(header: bytes) -> FromRun:
    """Read what a run says; raises PeerError when it is not valid."""
    return _decoded(_FROM_RUN, header)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], header: bytes) -> _Message:
    try:
        return decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"malformed message (do both sides run the same version?): {error}") from error


def program_digest(script: Path) -> str:
    """Return what tells one script from another: a digest of its content. Raises UsageError if it cannot be read."""
    try:
        return hashlib.sha256(script.read_bytes()).hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read the script {script}: {error.strerror}") from error
