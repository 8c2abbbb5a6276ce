"""The interface of a table on a server, which `ServedDenseTable` and `ServedRowTable` implement.

What holds for both:
1. A push is accepted, then applied or discarded, once each. `accept` takes over the buffer that a push came in and
   releases it exactly once: at a refusal, or when the push is applied or discarded.
2. An update that fails breaks its table: the table refuses all later pushes and reads with the reason, until all values
   of it are loaded anew.
3. A frame of the other kind is refused here: a push with the reason, a pull as a breach of the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, Protocol

import msgspec
from safetensors.torch import load_file
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.core.effects import Measure
from paceline.core.events import ClippedPush, InvalidPush, Measured
from paceline.core.messages import Delivered, Fetched, Push, PushId
from paceline.core.partition import Range
from paceline.core.settings import ServerSettings
from paceline.core.work_queue import Life
from paceline.server.early_values import EarlyBody
from paceline.server.push_checks import SameGradients
from paceline.transport.base import Connection, Frame, Transport
from paceline.transport.buffer_pool import Buffer
from paceline.transport.buffers import LentBody
from paceline.transport.lasting_memory import LastingMemory
from paceline.update.cuts import ShardCut, TableCut
from paceline.update.rows.changes import ChangeLog
from paceline.update.rows.cuts import RowsCut
from paceline.update.rows.export import load_rows
from paceline.update.rows.layout import RowPiece
from paceline.update.rows.ops import RowOps, row_ops
from paceline.update.rows.rules import RowRule
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Hyper
from paceline.update.table import TableSpec
from paceline.wire.messages import (
    FactoredPush,
    KeysWanted,
    PullFrame,
    PushFrame,
    PushPiece,
    RowPullFrame,
    RowPushFrame,
    RowsUsed,
    Unsubscribe,
)
from paceline.wire.requests import TableOperation

Kind = Literal["shape", "rows"]  # as snapshots name it


def _change_unnoticed(_table: str) -> None:
    """Stand for a server without a core."""


class TableObserver(Protocol):
    """Is told what changes tables and is not an event of the core: the link to a replica, or a record."""

    @property
    def is_there(self) -> bool:
        """Whether it is told at all."""
        ...

    @property
    def is_wanted(self) -> bool:
        """Whether it is told, or may be later."""
        ...

    def note_push(self, frame: PushFrame | RowPushFrame, body: memoryview) -> None:
        """Take a push, whose ids are all in the frame and its body."""
        ...

    def note_look(self, frame: RowPullFrame | RowsUsed, ids: memoryview) -> None:
        """Take what counts as a use of rows, with all of their ids."""
        ...


@dataclass(slots=True)
class TableHost:
    """What the tables of one server share.

    Args:
        settings: rank of this server, and how tables are partitioned.
        transport: carries values, and allocates memory that it shares with workers.
        allowed_paths: the rules and functions that may be imported by path; None allows all.
        num_threads: returns how many threads an update may use, by the consistency of its table.
        checks_memory: overwrite memory that is free, and check that a push does not change until it is applied.
        note_changed: called with the name of a table whose values have changed by other means than a push.
        may_spill: whether a declaration may name a directory here for rows that do not fit into main memory.
        ops: gathers, scatters and sums rows.
        same_gradients: warns when workers push the same gradients.
        lasting: memory that outlives this server, for its successor; None if there is to be none.
        saver: copies there what the next update is to change.
        replica: is told of each push that is accepted; None for none.
        follows: whether the server does what another one has done: what happened at that one's times.
        time: of what the server handles now, monotonic seconds. Tables look at no other clock.
    """

    settings: ServerSettings
    transport: Transport
    allowed_paths: frozenset[str] | None = None
    num_threads: Callable[[Consistency], int] = lambda _: 1
    checks_memory: bool = False
    note_changed: Callable[[str], object] = _change_unnoticed
    may_spill: bool = True
    ops: RowOps = field(default_factory=row_ops)
    same_gradients: SameGradients = field(default_factory=SameGradients)
    lasting: LastingMemory | None = None
    saver: ThreadPoolExecutor = field(default_factory=partial(ThreadPoolExecutor, 1, "paceline-save"))
    replica: TableObserver | None = None
    follows: bool = False
    time: float = 0.0

    @property
    def name(self) -> str:
        """Name of this server, for messages."""
        return f"server {self.settings.server}"


class Acceptance(msgspec.Struct, frozen=True):
    """What became of a push or a pull that has arrived; with both fields empty it is accepted.

    `problem`: why it is refused. `wanted`: a request for its ids, which are not known here. `clips`: it is accepted,
    and its update is to be clipped by a norm to which other servers have parts.
    """

    problem: str = ""
    wanted: KeysWanted | None = None
    clips: bool = False

    def arrival(self, push: Push) -> Push | InvalidPush | ClippedPush:
        """Return the event that the push has arrived."""
        if self.problem:
            return InvalidPush(push, self.problem)
        return ClippedPush(push) if self.clips else push


ACCEPTED = Acceptance()
TO_CLIP = Acceptance(clips=True)


class PartToPublish(msgspec.Struct, frozen=True):
    """The values of a server's range of a table as they are at one moment, from element `start` on: `size_bytes`.

    Any thread may read the `cut`, once, into memory that the `transport` carries.
    """

    start: int
    size_bytes: int
    cut: ShardCut
    transport: Transport


class ServedValues(msgspec.Struct, frozen=True):
    """The body of an answer or a delivery.

    `lent` is the body if it is memory that will change; None: it does not change, or a transport maps it.
    `num_early`: bytes before it that the reader was sent ahead.
    """

    body: memoryview
    lent: LentBody | None = None
    num_early: int = 0


class SavedTable(Protocol):
    """What a table goes on from."""

    def tensors(self, span: Range) -> Mapping[str, Tensor]:
        """Return values and rule state of a range of a dense table; see `Shard.load_state`."""
        ...

    def rows(self, spec: RowTableSpec, rule: RowRule) -> Iterator[RowPiece]:
        """Return the rows of a row table, piece by piece."""
        ...


class SavedFile(msgspec.Struct, frozen=True):
    """A file that `ServedTable.save` wrote; see `SavedTable`."""

    path: Path

    def tensors(self, span: Range) -> Mapping[str, Tensor]:
        """See `SavedTable.tensors`; the file is of this range."""
        del span
        return load_file(self.path)

    def rows(self, spec: RowTableSpec, rule: RowRule) -> Iterator[RowPiece]:
        """See `SavedTable.rows`."""
        return load_rows(self.path, spec, rule)


class ServedTable(Protocol):
    """One table on one server. Used by the server's thread; reader threads only call `body_bounds`."""

    kind: ClassVar[Kind]
    keyed: ClassVar[bool]  # a pull asks for some rows
    consistency: Consistency
    broken: str  # why it refuses pushes and reads, as an update has failed; else empty
    # Why pushes that the last call of `apply` named must not be applied: it has changed nothing then.
    not_finite: Mapping[PushId, str]

    @property
    def cold(self) -> str:
        """Why no successor of this server can go on with the table, from now on; empty if one can."""
        ...

    @property
    def has_values(self) -> bool:
        """Whether there are values to read."""
        ...

    @property
    def version(self) -> int:
        """A number that grows with each update."""
        ...

    @property
    def num_applied(self) -> int:
        """How many updates are done, those of this server's predecessors included; 0 if it is cold.

        It grows by one, at once, when `apply` has done all that it does.
        """
        ...

    @property
    def hyper(self) -> tuple[Hyper, ...]:
        """The hyperparameters of the last push that had some."""
        ...

    @property
    def num_waiting(self) -> int:
        """Number of pushes that are neither applied nor discarded."""
        ...

    @property
    def num_kept(self) -> int:
        """Number of pushes that were applied as far as the core knows, and wait for a quorum: `state` merges them."""
        ...

    @property
    def value_bytes(self) -> int:
        """Bytes of values that were allocated when the table was declared."""
        ...

    def require_equal(self, spec: TableSpec | RowTableSpec) -> None:
        """Raise UsageError if a declaration of this name differs."""
        ...

    def encoded_spec(self) -> bytes:
        """Return the declaration as msgpack."""
        ...

    def add_reader(self, life: Life, *, live: bool) -> None:
        """Note that a worker has opened the table; with `live` it maps values where the transport can."""
        ...

    # -- pushes ------------------------------------------------------------------------------------------------------

    def accept(self, frame: PushFrame | RowPushFrame, body: memoryview, buffer: Buffer | None) -> Acceptance:
        """Store the gradients of a push that does not wait here yet; takes over the buffer that they lie in.

        Raises:
            PeerError: it breaks the protocol.
        """
        ...

    def accept_piece(self, piece: PushPiece, body: memoryview, connection: Connection) -> Frame | None:
        """Add a piece of a push; return the push once all of it is here, for `accept`.

        Raises:
            PeerError: it breaks the protocol.
        """
        ...

    def expand(self, push: FactoredPush, body: memoryview) -> Frame:
        """Return a push that came with factors as a frame with its whole gradient, for `accept`.

        Raises:
            PeerError: it breaks the protocol.
        """
        ...

    @property
    def has_early_readers(self) -> bool:
        """Whether a member takes values ahead of the end of the open clock."""
        ...

    def early_values(self, members: Sequence[int], clock: int) -> EarlyBody | None:
        """Return values to send ahead of the end of the open clock, if there are more by now.

        Args:
            members: ranks, in ascending order.
            clock: that is open.
        """
        ...

    def has(self, push_id: PushId) -> bool:
        """Return whether the gradients of this push wait here."""
        ...

    def measure(self, wanted: Measure) -> Measured:
        """Return the norm of the gradient that some pushes make together here, as `apply` combines them."""
        ...

    def apply(self, push_ids: Sequence[PushId], clock: int, norm: float | None = None) -> str:
        """Apply these pushes in this order as one update; return why that failed, "" if it did not.

        `norm`: of the combined gradient over all servers, where several clip it.

        Some that `accept` has not looked at may be in `not_finite` then. These and the others still wait: the caller
        discards them, and calls this again with what is left, be it nothing, which counts as an update.

        `accept` refuses what can be refused beforehand; a rule may raise all the same, or a disk may be full.
        """
        ...

    def discard(self, push_id: PushId) -> None:
        """Drop the gradients of a push; without effect if they do not wait here."""
        ...

    # -- reads -------------------------------------------------------------------------------------------------------

    def accept_pull(self, frame: PullFrame | RowPullFrame, connection: Connection, body: memoryview) -> Acceptance:
        """Note what a pull asks for, and what its sender has read.

        Raises:
            PeerError: it breaks the protocol.
        """
        ...

    def serve(self, life: Life, connection: Connection, message: Fetched | Delivered) -> ServedValues | None:
        """Return the values of an answer or a delivery; None if the answer is not wanted any more.

        Raises:
            UsageError: an update of the table has failed.
        """
        ...

    def miss_reader(self, life: Life, message: Fetched | Delivered) -> None:
        """Do what an answer or a delivery changes here that cannot leave, as there is no connection to its reader."""
        ...

    def repeat_look(self, message: RowPullFrame | RowsUsed, ids: memoryview) -> None:
        """Note what a worker reads or has read of rows, as the server that is followed has.

        Raises:
            PeerError: the ids are invalid, or the table has none.
        """
        ...

    def note_taken(self, connection: Connection, clock: int) -> None:
        """Note that a subscriber has copied the delivery of this clock."""
        ...

    def note_read(self, life: Life, message: RowsUsed | Unsubscribe, body: memoryview) -> None:
        """Note what a worker reports of the rows that it caches.

        Raises:
            PeerError: the ids are invalid.
        """
        ...

    # -- clocks and members ------------------------------------------------------------------------------------------

    def advance(self, clock: int) -> None:
        """Note that every clock below is complete."""
        ...

    def forget_worker(self, life: Life) -> None:
        """Drop all that is kept for a worker that has left, its pushes aside."""
        ...

    def forget_connection(self, connection: Connection) -> None:
        """Release memory shared over a connection that has ended."""
        ...

    def close(self) -> None:
        """Release all memory and threads."""
        ...

    # -- the whole table ---------------------------------------------------------------------------------------------

    def body_bounds(self, message: object) -> tuple[int, int]:
        """Return the least and the most bytes that may travel beside a message about this table."""
        ...

    def initialise(self, body: memoryview) -> None:
        """Set the initial values; ignored if there are values already. Raises UsageError if they do not fit."""
        ...

    def state(self) -> bytes:
        """Return values and rule state as safetensors, with what `num_kept` counts.

        Raises:
            UsageError: an update has failed.
        """
        ...

    def load_state(self, body: memoryview) -> None:
        """Replace values and rule state by those of `state`; raises PacelineError if they do not fit."""
        ...

    def cut(self, *, values_only: bool = False, since: str | None = None) -> TableCut:
        """Return what the table is now, to be read while updates go on; called between two updates.

        With `values_only`, a dense table gives no state of its rule. With `since`, rows are marked from now on as they
        change, and only those are read that have changed since these marks began, if it names the ones that there are.

        Raises:
            UsageError: an update of the table has failed.
        """
        ...

    def carry_out(self, request: TableOperation, body: memoryview, clock: int) -> memoryview:
        """Carry out a request about the whole table, and return the body of the answer.

        Raises:
            PacelineError: it failed; the message says what and where.
            SafetensorError: the tensors in its body cannot be read.
        """
        ...

    @property
    def log(self) -> ChangeLog | None:
        """The changes of rows, while readers follow them."""
        ...

    def follow(self, clock: int) -> tuple[ChangeLog, int, RowsCut]:
        """Return the log of changes, its newest entry, and the rows as they are there; called between two updates.

        The log begins with its first reader. `clock`: every clock below is complete.

        Raises:
            UsageError: the table has no rows, an update of it has failed, or memory is short.
        """
        ...

    def part_to_publish(self) -> PartToPublish:
        """Return the values here as they are now, to be copied while updates go on.

        Raises:
            UsageError: there are none yet, an update has failed, memory is short, or the table cannot be published.
        """
        ...

    def save(self, path: Path, clock: int) -> None:
        """Write values and rule state to a file, without what `num_kept` counts; changes nothing.

        Raises:
            PacelineError: an update has failed.
            OSError, SafetensorError: the file cannot be written.
        """
        ...

    def restore(self, saved: SavedTable, clock: int, version: int, hyper: tuple[Hyper, ...]) -> None:
        """Continue from what was saved at this clock and version; raises what reading it raises."""
        ...
