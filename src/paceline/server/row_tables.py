"""The row tables of one server: their stores, pushes that wait to be applied, and what readers have asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.core.messages import Delivered, Fetched, PushId
from paceline.core.server import LEAD
from paceline.errors import PeerError, UsageError
from paceline.server.hyperparameters import objection
from paceline.server.memory_check import require_memory, require_room
from paceline.server.same_gradients import SameGradients
from paceline.update.filters.check import check_filters
from paceline.update.filters.key_cache import KeyLists, digest, key_lists_of
from paceline.update.rows.column import RowColumn
from paceline.update.rows.index import RowIndex
from paceline.update.rows.ops import RowOps, tell_of_refused_library
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import RowTableSpec, row_differences
from paceline.update.rows.store import RowContribution, RowStore
from paceline.update.summing import num_nonfinite
from paceline.wire.bounds import MAX_WAITING_READ_BYTES, most_rows
from paceline.wire.malformed import MISHAPS, broken_story
from paceline.wire.messages import Keys, KeysWanted, RowPullFrame, RowPushFrame, RowsUsed, Unsubscribe
from paceline.wire.row_codec import RowBodyLayout, body_layouts, ids_of

_MOST_PIECES = 64  # of changed ids, before they are made one


@dataclass(slots=True)
class Subscription:
    """The rows that one reader has asked for, and which of them have changed since it was last sent some."""

    ops: RowOps
    _rows: RowIndex = field(init=False)
    _changed: list[Tensor] = field(default_factory=list[Tensor])
    _last_request: int = -1  # of the reads that were answered

    def __post_init__(self) -> None:
        """Start with no row."""
        self._rows = RowIndex(self.ops, RowColumn(1, torch.int64))

    def __len__(self) -> int:
        """Count the rows."""
        return len(self._rows)

    def add(self, ids: Tensor, request: int) -> None:
        """Send these rows, for which a read asked, when they change; called before anything else changes them."""
        self._rows.add(ids)
        self._last_request = max(request, self._last_request)

    def remove(self, ids: Tensor, request: int) -> None:
        """Send these rows no longer, unless a read was answered that is not older than this one: it may be of them."""
        if request <= self._last_request:
            return
        slots = self._rows.find(ids).unique()
        self._rows.remove(slots[slots >= 0])

    def note(self, ids: Tensor) -> None:
        """Note that rows have changed; each id is there once."""
        mine = ids[self._rows.find(ids) >= 0]
        if len(mine):
            self._changed.append(mine)
        if len(self._changed) > _MOST_PIECES:
            self._changed = [self._distinct()]

    def take(self) -> Tensor:
        """Return the ids of the rows to be sent now, each once, and begin anew."""
        ids, self._changed = self._distinct(), []
        return ids[self._rows.find(ids) >= 0]

    def close(self) -> None:
        """Let go of all memory."""
        self._rows.close()

    def _distinct(self) -> Tensor:
        if not self._changed:
            return torch.empty(0, dtype=torch.int64)
        return self.ops.unique(torch.cat(self._changed))[0]


Life = tuple[int, int]  # (rank, incarnation) of a worker

_MAX_PARTS = 64  # tensors of ids that are put together
# Of one worker, more reads of one table than this may not wait: a misbehaving peer.
MAX_READS = 1024


@dataclass(slots=True)
class _WaitingIds:
    """The ids of pushes that wait, each at least once: a few tensors, however many pushes there are."""

    ops: RowOps
    parts: list[Tensor] = field(default_factory=list[Tensor])

    def add(self, ids: Tensor) -> None:
        """Note the ids of one more push."""
        self.parts.append(ids)
        if len(self.parts) > _MAX_PARTS:
            self.parts = [self.ops.unique(torch.cat(self.parts))[0]]


@dataclass(slots=True)
class ServedRowTable:
    """One row table on this server."""

    spec: RowTableSpec
    consistency: Consistency
    store: RowStore
    up: RowBodyLayout
    down: RowBodyLayout
    subscriptions: dict[Life, Subscription] = field(default_factory=dict[Life, Subscription])
    # What readers that have yet to be answered asked for, by life and request; and at which clock of theirs.
    asked: dict[tuple[Life, int], tuple[Tensor, int]] = field(
        default_factory=dict[tuple[Life, int], tuple[Tensor, int]]
    )
    # The last clock of which each reader has told what it read from its cache.
    told: dict[Life, int] = field(default_factory=dict[Life, int])
    # Lists of ids that a digest may stand for, by who sent them.
    lists: dict[Life, KeyLists] = field(default_factory=dict[Life, KeyLists])
    # Pushes that have arrived and are neither applied nor discarded.
    waiting: dict[PushId, RowContribution] = field(default_factory=dict[PushId, RowContribution])
    # The ids of these; None after one of them has gone, until the next has come.
    waiting_ids: _WaitingIds | None = None
    # Why this table takes no more pushes and is not read: an update of it failed, perhaps halfway.
    broken: str = ""

    @property
    def read_bytes(self) -> int:
        """Bytes of a row and its echo as they are read, before they are encoded."""
        return self.down.full_width * self.down.dtype.itemsize

    def keep(self, push_id: PushId, contribution: RowContribution, ops: RowOps) -> None:
        """Keep what a push brings; raises UsageError, and keeps nothing, if there is no room for its rows."""
        if self.waiting_ids is None:
            self.waiting_ids = _WaitingIds(ops)
            for other in self.waiting.values():
                self.waiting_ids.add(other.ids)
        self.store.reserve([*self.waiting_ids.parts, contribution.ids])
        self.waiting[push_id] = contribution
        self.waiting_ids.add(contribution.ids)

    def take(self, push_id: PushId) -> RowContribution:
        """Return what a push that waits has brought, and keep it no longer."""
        self.waiting_ids = None
        return self.waiting.pop(push_id)

    def note_changed(self, ids: Tensor) -> None:
        """Have these rows, each once, sent to those who keep them."""
        for subscription in self.subscriptions.values():
            subscription.note(ids)


@dataclass(slots=True)
class RowTables:
    """What one server holds of row tables.

    Args:
        server: its rank.
        ops: what moves rows.
        allowed_paths: limits which rules may be imported by path; None allows all.
        may_spill: whether workers may name a directory here, for rows that have no place in main memory.
        same: looks whether workers push the same gradients.
    """

    server: int
    ops: RowOps
    allowed_paths: frozenset[str] | None = None
    may_spill: bool = True
    same: SameGradients = field(default_factory=SameGradients)
    tables: dict[str, ServedRowTable] = field(default_factory=dict[str, ServedRowTable])

    def __contains__(self, table: str) -> bool:
        """Say whether there is a row table of this name."""
        return table in self.tables

    def declare(self, spec: RowTableSpec) -> Consistency:
        """Make a table, or check that it is the one that exists; return its consistency.

        Raises:
            UsageError: the table exists and differs, or its rule or its memory cannot be had.
        """
        known = self.tables.get(spec.name)
        if known is not None and known.spec != spec:
            lines = " ".join(row_differences(spec, known.spec))
            raise UsageError(
                f"table '{spec.name}' exists on server {self.server} with other settings than this worker declares: "
                f"{lines} Every worker must declare it alike."
            )
        if known is None:
            spec.validate()
        consistency = Consistency.parse(spec.consistency)
        if known is None:
            if spec.life.spill and not self.may_spill:
                raise UsageError(
                    f"table '{spec.name}' is to spill to {spec.life.spill}, but server {self.server} writes where its "
                    "own user says and nowhere else: declare it without memory_bytes and spill."
                )
            check_filters(spec.filters)
            tell_of_refused_library()
            require_room(spec.name, 0, len(self.tables), f"server {self.server}")
            rule = row_rule(spec.rule, self.allowed_paths)
            up, down = body_layouts(spec, rule)
            self.tables[spec.name] = ServedRowTable(spec, consistency, RowStore(spec, rule, self.ops), up, down)
            if self.server == LEAD:  # every server has rows of it, and one tells
                self.same.watch(spec.name, consistency)
        return consistency

    # -- pushes ------------------------------------------------------------------------------------------------------

    def accept(self, frame: RowPushFrame, body: memoryview) -> str | KeysWanted:
        """Keep what a push brings; return why it may not be applied, or nothing, or that its ids are wanted."""
        served = self.tables.get(frame.push.table)
        if served is None:
            return f"there is no table of rows '{frame.push.table[:200]}' on server {self.server}"
        problem = served.broken or _objection(served.spec, frame)
        if not problem and not body and frame.keys.num:
            problem = "its rows did not come with it"
        if problem:
            return problem
        try:
            parcel = served.up.unpack(body, frame.keys.num, with_ids=frame.keys.sent)
        except PeerError as error:
            return str(error)
        num_bad = 0 if served.spec.nonfinite in ("zero", "ignore") else num_nonfinite(parcel.rows.view(-1))
        if num_bad:
            return f"{num_bad} of its {parcel.rows.numel()} elements on server {self.server} are NaN or infinite"
        life = frame.push.id.worker, frame.push.id.incarnation
        ids = self._ids(served, life, frame.keys, parcel.ids)
        if ids is None:
            return KeysWanted(frame.push.table, frame.push.id.seq, -1)
        contribution = RowContribution(
            ids, parcel.rows, frame.count, frame.hyper, parcel.echo, frame.push.clock, frame.expected
        )
        try:
            require_memory(f"rows of table '{served.spec.name}'", len(ids) * served.store.row_bytes)
            served.keep(frame.push.id, contribution, self.ops)
        except UsageError as error:
            return str(error)
        self.same.note(frame.push, parcel.rows.view(-1))
        return ""

    def has(self, push_id: PushId) -> bool:
        """Say whether what a push of this name brought waits here, for whichever table."""
        return any(push_id in served.waiting for served in self.tables.values())

    def apply(self, table: str, push_ids: Sequence[PushId], clock: int) -> str:
        """Update a table with these pushes in this order, as one update; return why that could not be done, or nothing.

        What can be known before is refused in `accept`. If an update fails all the same (a rule that gives up, a disk
        that breaks), the table takes no more pushes and is not read, and says why; others go on.
        """
        served = self.tables[table]
        contributions = [served.take(push_id) for push_id in push_ids]
        if served.broken:
            return served.broken
        try:
            changed = served.store.apply(contributions, clock)
        except MISHAPS as error:
            served.broken = broken_story(table, self.server, error)
            return served.broken
        served.note_changed(changed)
        return ""

    def discard(self, push_id: PushId) -> None:
        """Forget what a push brought."""
        for served in self.tables.values():
            if push_id in served.waiting:
                served.take(push_id)

    # -- reads -------------------------------------------------------------------------------------------------------

    def ask(self, frame: RowPullFrame, body: memoryview) -> KeysWanted | None:
        """Note which rows a pull asks for; return that its ids are wanted, if they are.

        Raises:
            PeerError: the ids make no sense, or the worker has too many reads waiting.
            UsageError: the answer would be larger than one may be; nothing has changed.
        """
        served = self.tables.get(frame.pull.table)
        if served is None:
            return None
        life = frame.pull.sender.worker, frame.pull.sender.incarnation
        sent = ids_of(body) if frame.keys.sent else None
        ids = self._ids(served, life, frame.keys, sent)
        if ids is None:
            return KeysWanted(frame.pull.table, -1, frame.pull.request)
        request = frame.pull.request
        if sum(reader == life for reader, _ in served.asked) >= MAX_READS:
            raise PeerError(f"worker {life[0]} has more than {MAX_READS} reads of table '{served.spec.name}' waiting")
        others = sum(len(asked) for key, (asked, _) in served.asked.items() if key[0] == life and key[1] != request)
        _require_bounded(served, life[0], len(ids), others)
        served.asked[life, request] = ids, frame.pull.clock
        return None

    def objection(self, life: Life, table: str, request: int) -> str:
        """Return why a table is not read, and forget what the request asked for; or nothing."""
        served = self.tables[table]
        if served.broken:
            served.asked.pop((life, request), None)
        return served.broken

    def answer(self, life: Life, message: Fetched) -> memoryview | None:
        """Return the rows that a read asked for; None if it is not known any more what those were."""
        served = self.tables[message.table]
        asked = served.asked.pop((life, message.request), None)
        if asked is None:
            return None
        ids, clock = asked
        if served.consistency.deliver == "on_clock":
            self._subscription(served, life).add(ids, message.request)
        # The reader may be ahead of the slowest, by whose clock rows go that were not used for long.
        return served.down.pack_rows(None, served.store.read(ids, max(clock, message.clock)))

    def delivery(self, life: Life, message: Delivered) -> memoryview:
        """Return the rows of a subscriber that have changed since it was last sent some."""
        served = self.tables[message.table]
        ids = self._subscription(served, life).take()
        return served.down.pack_rows(ids, served.store.read(ids))

    def use(self, life: Life, message: RowsUsed, body: memoryview) -> None:
        """Count rows as used that a worker has read from its cache, once for each clock.

        Raises:
            PeerError: the ids make no sense.
        """
        served, ids = self.tables.get(message.table), ids_of(body)
        if served is not None and message.clock > served.told.get(life, -1):
            served.told[life] = message.clock
            served.store.use(ids, message.clock)

    def unsubscribe(self, life: Life, message: Unsubscribe, body: memoryview) -> None:
        """Send a worker these rows no longer."""
        served = self.tables.get(message.table)
        if served is not None and life in served.subscriptions:
            served.subscriptions[life].remove(ids_of(body), message.request)

    # -- the course of things ----------------------------------------------------------------------------------------

    def advance(self, table: str, clock: int) -> None:
        """Let rows go whose time is over; their readers are sent the values that they have from now on."""
        served = self.tables[table]
        gone = served.store.advance(clock)
        if len(gone):
            served.note_changed(gone)

    def forget(self, life: Life) -> None:
        """Drop what is kept for a worker that takes part no longer."""
        for served in self.tables.values():
            served.lists.pop(life, None)
            served.told.pop(life, None)
            served.asked = {key: ids for key, ids in served.asked.items() if key[0] != life}
            subscription = served.subscriptions.pop(life, None)
            if subscription is not None:
                subscription.close()

    def clear(self) -> None:
        """Let go of all tables: nobody is served any more."""
        for served in self.tables.values():
            served.store.close()
            for subscription in served.subscriptions.values():
                subscription.close()
        self.tables.clear()

    def _subscription(self, served: ServedRowTable, life: Life) -> Subscription:
        found = served.subscriptions.get(life)
        if found is None:
            found = served.subscriptions[life] = Subscription(self.ops)
        return found

    def _ids(self, served: ServedRowTable, life: Life, keys: Keys, sent: Tensor | None) -> Tensor | None:
        """Return the ids that a frame is about; None if it names a list that is not kept here."""
        if sent is not None and len(sent) != keys.num:
            raise PeerError(f"worker {life[0]} announced {keys.num} ids and sent {len(sent)}")
        if not keys.digest:
            return sent
        lists = served.lists.get(life) or key_lists_of(served.spec.filters)
        if lists is None:
            raise PeerError(f"table '{served.spec.name}' keeps no lists of ids, but worker {life[0]} names one")
        served.lists[life] = lists
        if sent is None:
            found = lists.get(keys.digest)
            return found if found is not None and len(found) == keys.num else None
        if keys.digest != digest(served.spec.name, self.server, sent):
            raise PeerError(f"worker {life[0]} sent ids of table '{served.spec.name}' under a digest of other ids")
        lists.put(keys.digest, sent.clone())
        return sent


def _require_bounded(served: ServedRowTable, worker: int, num: int, num_waiting: int) -> None:
    """Refuse a read whose answer would take too much memory, or too much beside those that are waited for."""
    row_bytes, most = served.read_bytes, most_rows(served.down.full_width)
    if num > most:
        raise UsageError(
            f"worker {worker} asks for {num} rows of table '{served.spec.name}' at once, {row_bytes} bytes each: "
            f"expected at most {most}"
        )
    if (num + num_waiting) * row_bytes > MAX_WAITING_READ_BYTES:
        raise UsageError(
            f"worker {worker} waits for {num_waiting} rows of table '{served.spec.name}', {row_bytes} bytes each, and "
            f"asks for {num} more: expected at most {MAX_WAITING_READ_BYTES} bytes together"
        )


def _objection(spec: RowTableSpec, frame: RowPushFrame) -> str:
    """Say why what came beside the rows makes no sense, or nothing."""
    for count in (frame.count, frame.expected):
        if not (isfinite(count) and count >= 0):
            return f"it stands for {count} samples, expected a number >= 0"
    if len(frame.hyper) > 1:
        return f"it carries hyperparameters of {len(frame.hyper)} groups, '{spec.name}' has 1"
    problem = objection(frame.hyper[0], spec.rule.groups[0]) if frame.hyper else ""
    return f"hyperparameters: {problem}" if problem else ""
