"""The row tables of one server: their stores, pushes that wait to be applied, pending reads and subscriptions."""

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

_MOST_PIECES = 64  # tensors of changed ids, before they are merged into one


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
        if len(self._changed) > _MOST_PIECES:
            self._changed = [self._distinct()]

    def pop_changed(self) -> Tensor:
        """Return the distinct ids of subscribed rows that have changed since the last call."""
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

_MAX_PARTS = 64  # tensors of ids, before they are merged into one
# Pending reads of one table by one worker; one with more is a misbehaving peer.
MAX_READS = 1024


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
    """One row table on this server."""

    spec: RowTableSpec
    consistency: Consistency
    store: RowStore
    up: RowBodyLayout
    down: RowBodyLayout
    subscriptions: dict[Life, Subscription] = field(default_factory=dict[Life, Subscription])
    # Pending reads by (life, request): the ids, and the clock of the reader.
    asked: dict[tuple[Life, int], tuple[Tensor, int]] = field(
        default_factory=dict[tuple[Life, int], tuple[Tensor, int]]
    )
    # By reader: the last clock for which it has reported the rows that it read from its cache.
    told: dict[Life, int] = field(default_factory=dict[Life, int])
    # By sender: lists of ids that later frames name by a digest.
    lists: dict[Life, KeyLists] = field(default_factory=dict[Life, KeyLists])
    # Pushes that have arrived and are neither applied nor discarded.
    waiting: dict[PushId, RowContribution] = field(default_factory=dict[PushId, RowContribution])
    # The ids of these; None after a push was removed, until the next one arrives.
    waiting_ids: _WaitingIds | None = None
    # Why this table refuses pushes and reads: an update of it failed, perhaps halfway.
    broken: str = ""

    @property
    def read_bytes(self) -> int:
        """Bytes of a row and its echo as a read returns them, before encoding."""
        return self.down.full_width * self.down.dtype.itemsize

    def keep_push(self, push_id: PushId, contribution: RowContribution, ops: RowOps) -> None:
        """Store the rows of a push; raises UsageError, and stores nothing, if there is no room for them."""
        if self.waiting_ids is None:
            self.waiting_ids = _WaitingIds(ops)
            for other in self.waiting.values():
                self.waiting_ids.add(other.ids)
        self.store.reserve([*self.waiting_ids.parts, contribution.ids])
        self.waiting[push_id] = contribution
        self.waiting_ids.add(contribution.ids)

    def remove_push(self, push_id: PushId) -> RowContribution:
        """Remove and return the rows of a push that waits."""
        self.waiting_ids = None
        return self.waiting.pop(push_id)

    def note_changed(self, ids: Tensor) -> None:
        """Mark these rows as changed for all subscribers; ids are distinct."""
        for subscription in self.subscriptions.values():
            subscription.note(ids)


@dataclass(slots=True)
class RowTables:
    """All row tables of one server. Used by the server's thread; `BodyLimits` only looks tables up.

    Args:
        server: rank of this server.
        ops: gathers, scatters and sums rows.
        allowed_paths: the rules that may be imported by path; None allows all.
        may_spill: whether a declaration may name a directory here for rows that do not fit into main memory.
        same: warns when workers push the same gradients.
    """

    server: int
    ops: RowOps
    allowed_paths: frozenset[str] | None = None
    may_spill: bool = True
    same: SameGradients = field(default_factory=SameGradients)
    tables: dict[str, ServedRowTable] = field(default_factory=dict[str, ServedRowTable])

    def __contains__(self, table: str) -> bool:
        """Return whether there is a row table of this name."""
        return table in self.tables

    def declare(self, spec: RowTableSpec) -> Consistency:
        """Create a table, or check that the existing one has the same settings; return its consistency.

        Raises:
            UsageError: the table exists with other settings, its rule is not available, or memory is short.
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
                    f"table '{spec.name}' is to spill to {spec.life.spill}, but server {self.server} does not let "
                    "workers choose where it writes: declare it without memory_bytes and spill."
                )
            check_filters(spec.filters)
            tell_of_refused_library()
            require_room(spec.name, 0, len(self.tables), f"server {self.server}")
            rule = row_rule(spec.rule, self.allowed_paths)
            up, down = body_layouts(spec, rule)
            self.tables[spec.name] = ServedRowTable(spec, consistency, RowStore(spec, rule, self.ops), up, down)
            if self.server == LEAD:  # every server has rows of it, and one warns
                self.same.watch(spec.name, consistency)
        return consistency

    # -- pushes ------------------------------------------------------------------------------------------------------

    def accept(self, frame: RowPushFrame, body: memoryview) -> str | KeysWanted:
        """Store the rows of a push; return why it is refused, "" if it is accepted, or a request for its ids."""
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
            served.keep_push(frame.push.id, contribution, self.ops)
        except UsageError as error:
            return str(error)
        self.same.note(frame.push, parcel.rows.view(-1))
        return ""

    def has(self, push_id: PushId) -> bool:
        """Return whether the rows of this push wait here, for any table."""
        return any(push_id in served.waiting for served in self.tables.values())

    def apply(self, table: str, push_ids: Sequence[PushId], clock: int) -> str:
        """Apply these pushes in this order as one update; return why that failed, "" if it did not.

        `accept` refuses what can be refused beforehand. If an update fails all the same (a rule that raises, a disk
        error), the table refuses all later pushes and reads with the reason; other tables go on.
        """
        served = self.tables[table]
        contributions = [served.remove_push(push_id) for push_id in push_ids]
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
        """Drop the rows of a push."""
        for served in self.tables.values():
            if push_id in served.waiting:
                served.remove_push(push_id)

    # -- reads -------------------------------------------------------------------------------------------------------

    def accept_pull(self, frame: RowPullFrame, body: memoryview) -> KeysWanted | None:
        """Store which rows a pull asks for; return a request for its ids if their digest is not known here.

        Raises:
            PeerError: the ids are invalid, or the worker has too many reads waiting.
            UsageError: the answer would be too large; nothing has changed.
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

    def check_read(self, life: Life, table: str, request: int) -> str:
        """Return why a table cannot be read, "" if it can; forgets the request if it cannot."""
        served = self.tables[table]
        if served.broken:
            served.asked.pop((life, request), None)
        return served.broken

    def answer_pull(self, life: Life, message: Fetched) -> memoryview | None:
        """Return the rows that a read asked for; None if the request is not known any more."""
        served = self.tables[message.table]
        asked = served.asked.pop((life, message.request), None)
        if asked is None:
            return None
        ids, clock = asked
        if served.consistency.deliver == "on_clock":
            self._subscription(served, life).add(ids, message.request)
        # The reader may be ahead of the slowest worker, whose clock decides which unused rows expire.
        return served.down.pack_rows(None, served.store.read(ids, max(clock, message.clock)))

    def pack_delivery(self, life: Life, message: Delivered) -> memoryview:
        """Return the subscribed rows that have changed since the last delivery, with their ids."""
        served = self.tables[message.table]
        ids = self._subscription(served, life).pop_changed()
        return served.down.pack_rows(ids, served.store.read(ids))

    def use(self, life: Life, message: RowsUsed, body: memoryview) -> None:
        """Count rows as used that a worker has read from its cache, once a clock.

        Raises:
            PeerError: the ids are invalid.
        """
        served, ids = self.tables.get(message.table), ids_of(body)
        if served is not None and message.clock > served.told.get(life, -1):
            served.told[life] = message.clock
            served.store.use(ids, message.clock)

    def unsubscribe(self, life: Life, message: Unsubscribe, body: memoryview) -> None:
        """End the subscription of a worker to these rows."""
        served = self.tables.get(message.table)
        if served is not None and life in served.subscriptions:
            served.subscriptions[life].remove(ids_of(body), message.request)

    # -- clocks and membership ---------------------------------------------------------------------------------------

    def advance(self, table: str, clock: int) -> None:
        """Remove expired rows, and mark them as changed for their subscribers."""
        served = self.tables[table]
        gone = served.store.advance(clock)
        if len(gone):
            served.note_changed(gone)

    def forget(self, life: Life) -> None:
        """Drop everything kept for a worker that has left."""
        for served in self.tables.values():
            served.lists.pop(life, None)
            served.told.pop(life, None)
            served.asked = {key: ids for key, ids in served.asked.items() if key[0] != life}
            subscription = served.subscriptions.pop(life, None)
            if subscription is not None:
                subscription.close()

    def clear(self) -> None:
        """Release all tables, when the server closes."""
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
        """Return the ids of a frame; None if it names a list that is not kept here."""
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
    """Raise UsageError if the answer to a read, or all pending answers together, would take too much memory."""
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
    """Return why the fields beside the rows are invalid, "" if they are valid."""
    for count in (frame.count, frame.expected):
        if not (isfinite(count) and count >= 0):
            return f"it stands for {count} samples, expected a number >= 0"
    if len(frame.hyper) > 1:
        return f"it carries hyperparameters of {len(frame.hyper)} groups, '{spec.name}' has 1"
    problem = objection(spec.rule.name, frame.hyper[0], spec.rule.groups[0]) if frame.hyper else ""
    return f"hyperparameters: {problem}" if problem else ""
