"""A row table on a server: its store, pushes that wait to be applied, pending reads and subscriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, NoReturn

import msgspec
import torch
from msgspec.structs import replace
from safetensors.torch import load, save
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.core.effects import Measure
from paceline.core.messages import Delivered, Fetched, PushId
from paceline.core.server import LEAD
from paceline.core.work_queue import Life
from paceline.errors import PeerError, ProtocolBug, UsageError
from paceline.server.early_values import EarlyBody
from paceline.server.functions import call_over_rows
from paceline.server.memory_check import has_plenty, require_memory
from paceline.server.push_checks import push_problem
from paceline.server.served_table import (
    ACCEPTED,
    Acceptance,
    Kind,
    PartToPublish,
    SavedTable,
    ServedValues,
    TableHost,
)
from paceline.transport.base import Connection, Frame
from paceline.transport.buffer_pool import Buffer
from paceline.update.cuts import TableCut
from paceline.update.filters.check import check_filters
from paceline.update.filters.key_cache import KeyLists, digest, key_lists_of
from paceline.update.lasting import RowsMemory
from paceline.update.rows.changes import LEAST_LOG_BYTES, ChangeLog
from paceline.update.rows.column import RowColumn
from paceline.update.rows.cuts import CUT_SLOT_BYTES, RowsCut
from paceline.update.rows.export import save_rows
from paceline.update.rows.index import RowIndex
from paceline.update.rows.layout import IDS, VALUES, RowPiece, use_columns
from paceline.update.rows.ops import RowOps, tell_of_missing_library
from paceline.update.rows.rules import RowRule, row_rule
from paceline.update.rows.spec import RowTableSpec, row_differences
from paceline.update.rows.store import RowContribution, RowStore
from paceline.update.rows.walk import RowWalk, piece_slots
from paceline.update.rules import Hyper
from paceline.update.summing import num_nonfinite
from paceline.update.table import TableSpec
from paceline.wire.malformed import REQUEST_ERRORS, describe_broken_table
from paceline.wire.messages import (
    FactoredPush,
    Keys,
    KeysWanted,
    PullFrame,
    PushFrame,
    PushPiece,
    RowPullFrame,
    RowPushFrame,
    RowsUsed,
    Unsubscribe,
)
from paceline.wire.requests import (
    MAX_PUSH_BYTES,
    MAX_WAITING_READ_BYTES,
    NEXT_SLOT,
    SMALL_BYTES,
    CallFunction,
    CountRows,
    ReadRows,
    TableOperation,
    WriteRows,
    most_rows,
)
from paceline.wire.row_codec import ID_BYTES, RowBodyLayout, body_layouts, ids_body, ids_of

# Pending reads of one table by one worker; one with more is a misbehaving peer.
MAX_READS = 1024
# One piece of a row table that a worker loads: a few megabytes, unless rows are very wide.
MAX_PIECE_BYTES = 1 << 28
_PIECE_BYTES_BY_WIDTH = 64 * 16 * 8  # the least rows of a piece, with a rule of many states in float64
_MAX_PARTS = 64  # tensors of ids, before they are merged into one


@dataclass(slots=True)
class Subscription:
    """The rows that one reader keeps, and which of them have changed since its last delivery."""

    ops: RowOps
    _rows: RowIndex = field(init=False)
    _changed: list[Tensor] = field(default_factory=list[Tensor])
    _last_request: int = -1  # the newest read that was answered

    def __post_init__(self) -> None:
        """Start without rows."""
        self._rows = RowIndex(self.ops, RowColumn(1, torch.int64))

    def __len__(self) -> int:
        """Count the rows."""
        return len(self._rows)

    def add(self, ids: Tensor, request: int) -> None:
        """Subscribe to rows that a read returns; called before they can change again."""
        self._rows.add(ids)
        self._last_request = max(request, self._last_request)

    def remove(self, ids: Tensor, request: int) -> None:
        """Unsubscribe from rows, unless a read as new as this request was answered: it may have returned them."""
        if request <= self._last_request:
            return
        slots = self._rows.find(ids).unique()
        self._rows.remove(slots[slots >= 0])

    def note(self, ids: Tensor) -> None:
        """Note that rows have changed; ids are distinct."""
        mine = ids[self._rows.find(ids) >= 0]
        if len(mine):
            self._changed.append(mine)
        if len(self._changed) > _MAX_PARTS:
            self._changed = [self._distinct()]

    def pop_changed(self) -> Tensor:
        """Return the distinct ids of subscribed rows that have changed since the last call."""
        ids, self._changed = self._distinct(), []
        return ids[self._rows.find(ids) >= 0]

    def close(self) -> None:
        """Release all memory."""
        self._rows.close()

    def _distinct(self) -> Tensor:
        if not self._changed:
            return torch.empty(0, dtype=torch.int64)
        return self.ops.unique(torch.cat(self._changed))[0]


@dataclass(slots=True)
class _WaitingIds:
    """The ids of pushes that wait, possibly repeated, in a bounded number of tensors."""

    ops: RowOps
    parts: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, ids: Tensor) -> None:
        """Add the ids of one more push."""
        self.parts.append(ids)
        if len(self.parts) > _MAX_PARTS:
            self.parts = [self.ops.unique(torch.cat(self.parts))[0]]


@dataclass(slots=True)
class ServedRowTable:
    """One row table on one server; see `ServedTable`.

    Args:
        spec: the table, validated.
        host: what it shares with the other tables of the server.

    Raises:
        UsageError: its rule or a filter is not available, or it is to spill where it must not.
    """

    spec: RowTableSpec
    host: TableHost
    kind: ClassVar[Kind] = "rows"
    keyed: ClassVar[bool] = True
    consistency: Consistency = field(init=False)
    store: RowStore = field(init=False)
    broken: str = ""
    # Distinct ids of the rows that a failed update may have changed, and that were not loaded since.
    _spoilt: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    cold: str = ""
    not_finite: Mapping[PushId, str] = field(default_factory=dict[PushId, str])  # always empty: `accept` has looked
    # Pending reads by (life, request): the ids, and the clock of the reader.
    asked: dict[tuple[Life, int], tuple[Tensor, int]] = field(
        default_factory=dict[tuple[Life, int], tuple[Tensor, int]]
    )
    subscriptions: dict[Life, Subscription] = field(default_factory=dict[Life, Subscription])
    _rule: RowRule = field(init=False)
    _up: RowBodyLayout = field(init=False)
    _down: RowBodyLayout = field(init=False)
    # By reader: the last clock for which it has reported the rows that it read from its cache.
    _told: dict[Life, int] = field(default_factory=dict[Life, int])
    # By sender: lists of ids that later frames name by a digest.
    _lists: dict[Life, KeyLists] = field(default_factory=dict[Life, KeyLists])
    # Pushes that are neither applied nor discarded, and the buffers that they came in.
    _waiting: dict[PushId, tuple[RowContribution, Buffer | None]] = field(
        default_factory=dict[PushId, tuple[RowContribution, Buffer | None]]
    )
    # The ids of these; None after a push was removed, until the next one arrives.
    _waiting_ids: _WaitingIds | None = None
    log: ChangeLog | None = None  # while readers follow the table

    def __post_init__(self) -> None:
        """Create the rule and an empty store."""
        spec, host = self.spec, self.host
        self.consistency = Consistency.parse(spec.consistency)
        if spec.life.spill and not host.may_spill:
            raise UsageError(
                f"table '{spec.name}' is to spill to {spec.life.spill}, but {host.name} does not let workers choose "
                "where it writes: declare it without memory_bytes and spill."
            )
        check_filters(spec.filters)
        tell_of_missing_library()
        self._rule = row_rule(spec.rule, host.allowed_paths)
        self._up, self._down = body_layouts(spec, self._rule)
        self.store = RowStore(spec, self._rule, host.ops, self._lasting_memory())
        if host.settings.server == LEAD:  # every server has rows of it, and one warns
            host.same_gradients.watch(spec.name, self.consistency)

    def _lasting_memory(self) -> RowsMemory | None:
        """Return memory for the rows that outlives this server; None, and the reason in `cold`, if there is none."""
        spec, lasting = self.spec, self.host.lasting
        if lasting is None and not (self.host.replica is not None and self.host.replica.is_wanted):
            return None
        if use_columns(spec.life) or spec.life.admit_after > 1 or spec.life.memory_bytes:
            self.cold = f"table '{spec.name}' has rows that come and go, or lie on a disk"
        elif lasting is not None:
            try:
                return RowsMemory(lasting, spec, self._rule)
            except OSError as error:
                self.cold = f"there is no memory for table '{spec.name}' that outlives its server ({error.strerror})"
        return None

    @property
    def num_applied(self) -> int:
        """See `ServedTable.num_applied`."""
        return self.store.num_applied

    @property
    def version(self) -> int:
        """Number of updates."""
        return self.store.version

    @property
    def has_values(self) -> bool:
        """Always: a row that is not stored has its initial values."""
        return True

    @property
    def value_bytes(self) -> int:
        """Nothing: rows are stored as they are pushed."""
        return 0

    @property
    def hyper(self) -> tuple[Hyper, ...]:
        """See `ServedTable.hyper`."""
        return self.store.hyper

    @property
    def num_waiting(self) -> int:
        """See `ServedTable.num_waiting`."""
        return len(self._waiting)

    @property
    def num_kept(self) -> int:
        """Always 0: no push of rows waits for a quorum."""
        return 0

    def require_equal(self, spec: TableSpec | RowTableSpec) -> None:
        """See `ServedTable.require_equal`."""
        if not isinstance(spec, RowTableSpec):
            raise UsageError(f"table '{spec.name}' exists on {self.host.name} with rows; use another name")
        if spec != self.spec:
            server = self.host.settings.server
            raise UsageError(
                f"table '{spec.name}' exists on server {server} with other settings than this worker declares: "
                f"{' '.join(row_differences(spec, self.spec))} Every worker must declare it alike."
            )

    def encoded_spec(self) -> bytes:
        """See `ServedTable.encoded_spec`."""
        return msgspec.msgpack.encode(self.spec)

    def add_reader(self, life: Life, *, live: bool) -> None:
        """Do nothing: a reader of rows is known from its first pull."""

    # -- pushes ------------------------------------------------------------------------------------------------------

    def accept(self, frame: PushFrame | RowPushFrame, body: memoryview, buffer: Buffer | None) -> Acceptance:
        """Store the rows of a push; see `ServedTable.accept`."""
        try:
            return self._keep(frame, body, buffer)
        finally:
            if buffer is not None and frame.push.id not in self._waiting:
                buffer.release()

    def _keep(self, frame: PushFrame | RowPushFrame, body: memoryview, buffer: Buffer | None) -> Acceptance:
        if not isinstance(frame, RowPushFrame):
            return Acceptance(f"'{self.spec.name}' is a table of rows")
        problem = self.broken or push_problem(self.spec, frame)
        if not body and frame.keys.num:
            return Acceptance(problem or "its rows did not come with it")
        try:
            content = self._up.unpack(body, frame.keys.num, with_ids=frame.keys.sent)
        except PeerError as error:
            return Acceptance(str(error))
        push_id = frame.push.id
        # Of a push that is refused, too: its worker takes the list for known, and what names a list that is not here
        # has to come again, behind later pushes and reads.
        ids = self._ids((push_id.worker, push_id.incarnation), frame.keys, content.ids)
        if problem:
            return Acceptance(problem)
        num_bad = 0 if self.spec.nonfinite in ("zero", "ignore") else num_nonfinite(content.rows.view(-1))
        if num_bad:
            numel = content.rows.numel()
            return Acceptance(f"{num_bad} of its {numel} elements on {self.host.name} are NaN or infinite")
        if ids is None:
            return Acceptance(wanted=KeysWanted(self.spec.name, push_id.seq, -1))
        contribution = RowContribution(
            ids, content.rows, frame.count, frame.hyper, content.echo, frame.push.clock, frame.expected
        )
        try:
            require_memory(f"rows of table '{self.spec.name}'", ids.numel() * self.store.row_bytes)
            self._reserve(ids)
        except UsageError as error:
            return Acceptance(str(error))
        self._waiting[push_id] = contribution, buffer
        replica = self.host.replica
        if replica is not None and replica.is_there:  # with all ids, as it does not know what earlier frames named
            whole = replace(frame, keys=Keys(frame.keys.num, b"", sent=True))
            rows = body[len(body) - self._up.row_bytes * frame.keys.num :]
            replica.note_push(whole, memoryview(bytes(ids_body(ids)) + bytes(rows)))
        self.host.same_gradients.note(frame.push, content.rows.view(-1))
        return ACCEPTED

    def _reserve(self, ids: Tensor) -> None:
        """Make room for the rows of one more push; raises UsageError, and changes nothing, if there is none."""
        if self._waiting_ids is None:
            self._waiting_ids = _WaitingIds(self.host.ops)
            for other, _ in self._waiting.values():
                self._waiting_ids.add(other.ids)
        self.store.reserve([*self._waiting_ids.parts, ids])
        self._waiting_ids.add(ids)

    def accept_piece(self, piece: PushPiece, body: memoryview, connection: Connection) -> Frame | None:
        """Raise PeerError: pushes of rows come whole."""
        raise PeerError(f"a piece of a push of row table '{self.spec.name}'")

    def expand(self, push: FactoredPush, body: memoryview) -> Frame:
        """Raise PeerError: rows have no factors."""
        raise PeerError(f"factors for row table '{self.spec.name}'")

    @property
    def has_early_readers(self) -> bool:
        """Never: rows are sent when they are asked for."""
        return False

    def early_values(self, members: Sequence[int], clock: int) -> EarlyBody | None:
        """Return nothing."""
        return None

    def has(self, push_id: PushId) -> bool:
        """See `ServedTable.has`."""
        return push_id in self._waiting

    def measure(self, wanted: Measure) -> NoReturn:
        """Refuse: updates of rows are not clipped."""
        raise ProtocolBug(f"table '{self.spec.name}' has rows: an update of {len(wanted.ids)} pushes is not clipped")

    def apply(self, push_ids: Sequence[PushId], clock: int, norm: float | None = None) -> str:
        """See `ServedTable.apply`."""
        self._waiting_ids = None
        pushes = [self._waiting.pop(push_id) for push_id in push_ids]
        if not self.broken:
            try:
                self.mark_changed(self.store.apply([contribution for contribution, _ in pushes], clock))
            except REQUEST_ERRORS as error:
                self.broken = describe_broken_table(self.spec.name, self.host.settings.server, error)
                ids, _ = self.host.ops.unique(torch.cat([contribution.ids for contribution, _ in pushes]))
                self._spoilt = self.store.stored(ids)
                self._end_log(self.broken)
        for _, buffer in pushes:
            if buffer is not None:
                buffer.release()
        return self.broken

    def discard(self, push_id: PushId) -> None:
        """See `ServedTable.discard`."""
        _, buffer = self._waiting.pop(push_id, (None, None))
        self._waiting_ids = None
        if buffer is not None:
            buffer.release()

    # -- reads -------------------------------------------------------------------------------------------------------

    def accept_pull(self, frame: PullFrame | RowPullFrame, connection: Connection, body: memoryview) -> Acceptance:
        """Store which rows a pull asks for; see `ServedTable.accept_pull`."""
        if not isinstance(frame, RowPullFrame):
            raise PeerError(f"dense pull of row table '{self.spec.name}'")
        pull = frame.pull
        life = pull.sender.worker, pull.sender.incarnation
        ids = self._ids(life, frame.keys, ids_of(body) if frame.keys.sent else None)
        if ids is None:
            return Acceptance(wanted=KeysWanted(self.spec.name, -1, pull.request))
        if sum(reader == life for reader, _ in self.asked) >= MAX_READS:
            raise PeerError(f"worker {life[0]} has more than {MAX_READS} reads of table '{self.spec.name}' waiting")
        num_others = sum(
            len(asked) for key, (asked, _) in self.asked.items() if key[0] == life and key[1] != pull.request
        )
        problem = self._size_problem(life[0], len(ids), num_others)
        if problem:
            return Acceptance(problem)
        self.asked[life, pull.request] = ids, pull.clock
        self._note_look(replace(frame, keys=Keys(len(ids), b"", sent=True)), ids)
        return ACCEPTED

    def _note_look(self, frame: RowPullFrame | RowsUsed, ids: Tensor) -> None:
        replica = self.host.replica
        if self.store.counts_use and replica is not None and replica.is_there:
            replica.note_look(frame, ids_body(ids))

    def _size_problem(self, worker: int, num: int, num_waiting: int) -> str:
        """Return why the answer to a read, or all pending answers together, would take too much memory; or ""."""
        row_bytes, most = self._down.full_width * self._down.dtype.itemsize, most_rows(self._down.full_width)
        if num > most:
            return (
                f"worker {worker} asks for {num} rows of table '{self.spec.name}' at once, {row_bytes} bytes each: "
                f"expected at most {most}"
            )
        if (num + num_waiting) * row_bytes > MAX_WAITING_READ_BYTES:
            return (
                f"worker {worker} waits for {num_waiting} rows of table '{self.spec.name}', {row_bytes} bytes each, "
                f"and asks for {num} more: expected at most {MAX_WAITING_READ_BYTES} bytes together"
            )
        return ""

    def serve(self, life: Life, connection: Connection, message: Fetched | Delivered) -> ServedValues | None:
        """Return the rows that a read asked for, or subscribed rows that have changed; see `ServedTable.serve`."""
        asked = self.asked.pop((life, message.request), None) if isinstance(message, Fetched) else None
        if self.broken:
            raise UsageError(self.broken)
        if isinstance(message, Delivered):
            ids = self._subscription(life).pop_changed()
            return ServedValues(self._down.pack_rows(ids, self.store.read(ids)))
        if asked is None:
            return None
        ids, clock = asked
        if self.consistency.deliver == "on_clock":
            self._subscription(life).add(ids, message.request)
        # The reader may be ahead of the slowest worker, whose clock decides which unused rows expire.
        return ServedValues(self._down.pack_rows(None, self.store.read(ids, max(clock, message.clock))))

    def miss_reader(self, life: Life, message: Fetched | Delivered) -> None:
        """Count the rows as used that a read has asked for: whether it is answered decides nothing."""
        asked = self.asked.pop((life, message.request), None) if isinstance(message, Fetched) else None
        if asked is not None and not self.broken and self.store.counts_use:
            ids, clock = asked
            self.store.use(ids, max(clock, message.clock))

    def repeat_look(self, message: RowPullFrame | RowsUsed, ids: memoryview) -> None:
        """See `ServedTable.repeat_look`."""
        if isinstance(message, RowPullFrame):
            sender = message.pull.sender
            self.asked[(sender.worker, sender.incarnation), message.pull.request] = ids_of(ids), message.pull.clock
        else:
            self.note_read((message.sender.worker, message.sender.incarnation), message, ids)

    def note_taken(self, connection: Connection, clock: int) -> None:
        """Do nothing: rows travel in memory of their own."""

    def note_read(self, life: Life, message: RowsUsed | Unsubscribe, body: memoryview) -> None:
        """Count rows as used once a clock, or end subscriptions; see `ServedTable.note_read`."""
        ids = ids_of(body)
        if isinstance(message, Unsubscribe):
            if life in self.subscriptions:
                self.subscriptions[life].remove(ids, message.request)
        elif message.clock > self._told.get(life, -1):
            self._told[life] = message.clock
            self._note_look(message, ids)
            self.store.use(ids, message.clock)

    def mark_changed(self, ids: Tensor) -> None:
        """Mark these rows as changed, or gone, for all subscribers and readers; ids are distinct."""
        if self.log is not None:
            self._log_changes(self.log, ids)
        for subscription in self.subscriptions.values():
            subscription.note(ids)

    def _subscription(self, life: Life) -> Subscription:
        found = self.subscriptions.get(life)
        if found is None:
            found = self.subscriptions[life] = Subscription(self.host.ops)
        return found

    def _ids(self, life: Life, keys: Keys, sent: Tensor | None) -> Tensor | None:
        """Return the ids of a frame; None if it names a list that is not kept here."""
        name = self.spec.name
        if sent is not None and len(sent) != keys.num:
            raise PeerError(f"worker {life[0]} announced {keys.num} ids and sent {len(sent)}")
        if not keys.digest:
            return sent
        lists = self._lists.get(life) or key_lists_of(self.spec.filters)
        if lists is None:
            raise PeerError(f"table '{name}' keeps no lists of ids, but worker {life[0]} names one")
        self._lists[life] = lists
        if sent is None:
            found = lists.get(keys.digest)
            return found if found is not None and len(found) == keys.num else None
        if keys.digest != digest(name, self.host.settings.server, sent):
            raise PeerError(f"worker {life[0]} sent ids of table '{name}' under a digest of other ids")
        lists.put(keys.digest, sent.clone())
        return sent

    # -- clocks and members ------------------------------------------------------------------------------------------

    def advance(self, clock: int) -> None:
        """Remove expired rows, and mark them as changed for their subscribers."""
        expired = self.store.advance(clock)
        if len(expired):
            self.mark_changed(expired)
        if self.log is not None:
            self.log.note_clock(clock)

    def forget_worker(self, life: Life) -> None:
        """See `ServedTable.forget_worker`."""
        self._lists.pop(life, None)
        self._told.pop(life, None)
        self.asked = {key: ids for key, ids in self.asked.items() if key[0] != life}
        subscription = self.subscriptions.pop(life, None)
        if subscription is not None:
            subscription.close()

    def forget_connection(self, connection: Connection) -> None:
        """Do nothing: rows travel in memory of their own."""

    def close(self) -> None:
        """See `ServedTable.close`."""
        self._end_log("the server has ended")
        self.store.close()
        for subscription in self.subscriptions.values():
            subscription.close()
        self.subscriptions.clear()
        self._waiting.clear()

    # -- the whole table ---------------------------------------------------------------------------------------------

    def body_bounds(self, message: object) -> tuple[int, int]:
        """See `ServedTable.body_bounds`."""
        match message:
            case RowPushFrame():
                num_bytes = max(0, message.keys.num) * (self._up.row_bytes + ID_BYTES * message.keys.sent)
                return num_bytes, min(num_bytes, MAX_PUSH_BYTES)
            case WriteRows():
                return 0, max(MAX_PIECE_BYTES, self.spec.width * _PIECE_BYTES_BY_WIDTH)
            case _:
                return 0, SMALL_BYTES

    def initialise(self, body: memoryview) -> None:
        """Refuse: rows have initial values of their own."""
        raise self._has_no_shape()

    def state(self) -> bytes:
        """Refuse: rows are read in pieces."""
        raise self._has_no_shape()

    def load_state(self, body: memoryview) -> None:
        """Refuse: rows are written in pieces."""
        raise self._has_no_shape()

    def _has_no_shape(self) -> UsageError:
        return UsageError(f"table '{self.spec.name}' on {self.host.name} has rows, and no shape")

    def cut(self, *, values_only: bool = False, since: str | None = None) -> TableCut:
        """Return the rows of now; see `ServedTable.cut`."""
        return self._cut(values_only=values_only, since=since)

    def _cut(self, *, values_only: bool, since: str | None = None) -> RowsCut:
        if self.broken:
            raise UsageError(self.broken)
        require_memory(f"a cut of table '{self.spec.name}'", CUT_SLOT_BYTES * self.store.num_slots)
        return self.store.cut(has_plenty, values_only=values_only, since=since)

    # -- readers that are no workers ---------------------------------------------------------------------------------

    def follow(self, clock: int) -> tuple[ChangeLog, int, RowsCut]:
        """Begin the log if there is none; see `ServedTable.follow`."""
        cut = self._cut(values_only=True)
        if self.log is None:
            limit_bytes = max(LEAST_LOG_BYTES, len(self.store) * self.store.row_bytes // 4)
            self.log = ChangeLog(limit_bytes, clock)
        return self.log, self.log.sequence, cut

    def _log_changes(self, log: ChangeLog, ids: Tensor) -> None:
        if log.is_unread:
            self._end_log("no reader had asked for it for a long time")
        elif len(ids):
            log.append(*self.store.find_values(ids))

    def _end_log(self, why: str) -> None:
        log, self.log = self.log, None
        if log is not None:
            log.end(why)

    def carry_out(self, request: TableOperation, body: memoryview, clock: int) -> memoryview:
        """Run a function over the rows here, count, read or write them; see `ServedTable.carry_out`."""
        if self.broken and not isinstance(request, WriteRows):
            raise UsageError(self.broken)
        match request:
            case CallFunction():
                return call_over_rows(request, self.store, clock, self.host, self.mark_changed)
            case CountRows():
                return memoryview(msgspec.msgpack.encode(self.store.statistics()))
            case ReadRows():
                return self._packed_piece(request.start_slot, values_only=request.values_only)
            case WriteRows():
                self._write(load(bytes(body)), clock)
                return memoryview(b"")

    def _packed_piece(self, start_slot: int, *, values_only: bool) -> memoryview:
        if start_slot < 0:
            raise UsageError(f"there is no slot {start_slot}")
        piece = self.store.rows(start_slot, piece_slots(self.store))
        columns = {VALUES: piece.values} if values_only else dict(piece.columns)
        next_slot = torch.tensor(-1 if piece.next_slot is None else piece.next_slot)
        return memoryview(save({IDS: piece.ids, NEXT_SLOT: next_slot, **columns}))

    def _write(self, tensors: Mapping[str, Tensor], clock: int) -> None:
        columns = dict(tensors)
        ids = columns.pop(IDS, torch.empty(0))
        if ids.dim() != 1 or ids.dtype != torch.int64:
            raise UsageError(f"rows of table '{self.spec.name}' came without ids")
        self.store.reserve([*(waiting.ids for waiting, _ in self._waiting.values()), ids])
        self.store.load(RowPiece(ids, columns), clock)
        self._spoilt = self._spoilt[~torch.isin(self._spoilt, ids)]
        if not len(self._spoilt):
            self.broken = ""  # all that a failed update may have changed is replaced
        self.mark_changed(ids)
        self.host.note_changed(self.spec.name)

    def part_to_publish(self) -> PartToPublish:
        """Refuse: rows are not published."""
        raise UsageError(f"table '{self.spec.name}' has rows, which cannot be published: publish tables with a shape")

    def save(self, path: Path, clock: int) -> None:
        """See `ServedTable.save`."""
        if self.broken:
            raise UsageError(self.broken)
        walk = RowWalk(self.store, clock, self.mark_changed)
        save_rows(path, self.spec, self._rule, walk.pieces(), len(self.store))

    def restore(self, saved: SavedTable, clock: int, version: int, hyper: tuple[Hyper, ...]) -> None:
        """See `ServedTable.restore`."""
        for piece in saved.rows(self.spec, self._rule):
            self.store.load(piece, clock)
        self.store.restore(version, hyper)
