"""What a core may ask its driver to do. Effects are performed in the order given: apply, then reply."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.messages import BetweenServers, Delivered, Fetched, FromServer, FromWorker, PushId

# -- of a server -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the tensor of this push until an `Apply` or `Discard` names it."""

    id: PushId


@dataclass(frozen=True, slots=True)
class Apply:
    """Update the table with these pushes in this order, as one update; then forget their tensors.

    If that fails, tell the core by `Unapplied`, and perform no `Reply` of this turn that says `Applied` of them.
    """

    table: str
    ids: tuple[PushId, ...]


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget the tensor of this push; it is never applied."""

    id: PushId


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this to that life of that worker; nothing happens if it is not connected."""

    worker: int
    incarnation: int
    message: FromServer


@dataclass(frozen=True, slots=True)
class Serve:
    """Send this with the table's values beside it, as they are now."""

    worker: int
    incarnation: int
    message: Fetched | Delivered


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this to another server."""

    server: int
    message: BetweenServers


@dataclass(frozen=True, slots=True)
class Advanced:
    """For the record: every clock of `table` below `clock` is complete here."""

    table: str
    clock: int


@dataclass(frozen=True, slots=True)
class MembershipChanged:
    """For the record: who came and went; `change` is "joined", "left" or "died"."""

    worker: int
    incarnation: int
    change: str
    reason: str = ""


ServerEffect = Hold | Apply | Discard | Reply | Serve | Tell | Advanced | MembershipChanged


# -- of a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send this to a server; a `Push` goes with its tensor beside it, unless it is `bare`: the server has it."""

    server: int
    message: FromWorker
    bare: bool = False


@dataclass(frozen=True, slots=True)
class Install:
    """Take the values that came with the message at hand into the cached copy of the table."""

    server: int
    table: str
    settled: int
    includes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class InstallRows:
    """Take in the rows that came with the message at hand: the answer to `request`, or (-1) rows that changed."""

    server: int
    table: str
    request: int
    clock: int
    settled: int
    includes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the rows of a table that this server has sent: it may have sent newer ones that did not come."""

    server: int
    table: str


@dataclass(frozen=True, slots=True)
class Release:
    """This server has answered this push for good: the part of the tensor meant for it may be reused."""

    server: int
    id: PushId
    refused: str = ""


@dataclass(frozen=True, slots=True)
class JoinDone:
    """The worker takes part, at this clock."""

    clock: int


@dataclass(frozen=True, slots=True)
class ReadDone:
    """The cached copy of the table is fresh enough; `clock` is the oldest clock among its parts."""

    request: int
    table: str
    clock: int
    source: str


@dataclass(frozen=True, slots=True)
class LeaveDone:
    """Every server knows that this worker has left."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The worker cannot go on; the reason is for a person."""

    reason: str


WorkerEffect = Send | Install | InstallRows | Forget | Release | JoinDone | ReadDone | LeaveDone | Fail
