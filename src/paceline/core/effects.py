"""Effects: what a core tells its driver to do, performed in the order given (apply, then reply)."""

from __future__ import annotations

from collections.abc import Collection

import msgspec
from msgspec.structs import replace

from paceline.core.messages import BetweenServers, Delivered, Fetched, FromServer, FromWorker, PushId

# -- of a server -----------------------------------------------------------------------------------------------------


class Hold(msgspec.Struct, frozen=True):
    """Keep the tensor of this push until an `Apply` or `Discard` names it."""

    table: str
    id: PushId


class Measure(msgspec.Struct, frozen=True):
    """Pass `Measured` with the norm of the gradient that these pushes of this clock make together here."""

    table: str
    ids: tuple[PushId, ...]
    clock: int


class Apply(msgspec.Struct, frozen=True):
    """Update the table with these pushes in this order, as one update; then forget their tensors.

    `norm`: of the combined gradient over all servers, where several of them clip it.
    If that fails, pass `Unapplied` to the core, and drop what else of this turn says that they are applied. If some of
    them turn out to be not finite, pass `NotFinite` for each of these, make the update without them, and drop likewise.
    """

    table: str
    ids: tuple[PushId, ...]
    norm: float | None = None

    def without(self, pushes: Collection[PushId]) -> Apply:
        """Return the update that leaves these pushes out."""
        return replace(self, ids=tuple(push_id for push_id in self.ids if push_id not in pushes))


class Discard(msgspec.Struct, frozen=True):
    """Forget the tensor of this push; it is never applied."""

    table: str
    id: PushId


class Reply(msgspec.Struct, frozen=True):
    """Send a message to one life of a worker; dropped if it is not connected."""

    worker: int
    incarnation: int
    message: FromServer


class Serve(msgspec.Struct, frozen=True):
    """Send a message together with the table's current values."""

    worker: int
    incarnation: int
    message: Fetched | Delivered

    def without(self, pushes: Collection[PushId]) -> Serve:
        """Return values that do not say of these pushes that they are in them."""
        gone = {push.seq for push in pushes if (push.worker, push.incarnation) == (self.worker, self.incarnation)}
        includes = tuple(seq for seq in self.message.includes if seq not in gone)
        return replace(self, message=replace(self.message, includes=includes))


class Tell(msgspec.Struct, frozen=True):
    """Send a message to another server."""

    server: int
    message: BetweenServers


class Advanced(msgspec.Struct, frozen=True):
    """For the record: every clock of `table` below `clock` is complete here."""

    table: str
    clock: int


class BoundMoved(msgspec.Struct, frozen=True):
    """For the record: the adaptive bound of `table` is `bound` here from now on, for pulls that come.

    `waiting` is the share of their time in which workers waited for values, and `staleness` how many clocks these
    lacked on average, in the window before.
    """

    table: str
    before: int
    bound: int
    waiting: float
    staleness: float


class MembershipChanged(msgspec.Struct, frozen=True):
    """For the record: a worker's life began or ended; `change` is "joined", "left" or "died"."""

    worker: int
    incarnation: int
    change: str
    reason: str = ""

    def is_loss_to(self, members: Collection[int]) -> bool:
        """Return whether these go on without a worker that has died; not where it has another life among them."""
        return self.change == "died" and len(members) > 0 and self.worker not in members


ServerEffect = Hold | Measure | Apply | Discard | Reply | Serve | Tell | Advanced | BoundMoved | MembershipChanged


# -- of a worker -----------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send a message to a server; a `Push` carries its tensor, unless it is `bare`: the server has the tensor."""

    server: int
    message: FromWorker
    bare: bool = False


class Install(msgspec.Struct, frozen=True):
    """Cache the values that came with the current message: the answer to `request`, or with -1 a delivery.

    They contain every update of the clocks below `clock`, and own pushes below `settled` and those in `includes`.
    """

    server: int
    table: str
    request: int
    clock: int
    settled: int
    includes: tuple[int, ...]


class Forget(msgspec.Struct, frozen=True):
    """Drop what is cached of a table from this server: deliveries of newer values may have been lost."""

    server: int
    table: str


class Release(msgspec.Struct, frozen=True):
    """The server's final answer to a push has arrived: its part of the tensor may be reused.

    A worker that keeps pushes keeps a copy of one that is applied, until `Drop`.
    """

    server: int
    table: str
    id: PushId
    refused: str = ""


class Drop(msgspec.Struct, frozen=True):
    """The server's replica has this push, which is applied: its part need not be kept any more."""

    server: int
    table: str
    id: PushId


class JoinDone(msgspec.Struct, frozen=True):
    """The worker takes part, at this clock."""

    clock: int


class ReadDone(msgspec.Struct, frozen=True):
    """A read is complete: the cached copy is fresh enough; `clock` is the oldest clock among its parts."""

    request: int
    table: str
    clock: int
    source: str


class LeaveDone(msgspec.Struct, frozen=True):
    """Every server knows that this worker has left."""


class Fail(msgspec.Struct, frozen=True):
    """The worker cannot continue; the reason is for the user."""

    reason: str


WorkerEffect = Send | Install | Forget | Release | Drop | JoinDone | ReadDone | LeaveDone | Fail
