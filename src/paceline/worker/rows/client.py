"""The row tables of a worker: its reads and pushes of rows, and the frames that answer them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.effects import Forget, InstallRows, ReadDone, Release, Send, WorkerEffect
from paceline.core.events import Opened, WantPush
from paceline.core.messages import Clock, Pull, Push
from paceline.core.worker import WorkerCore, WorkerEvent
from paceline.errors import PacelineError, UsageError
from paceline.transport.base import EMPTY
from paceline.update.filters.pipeline import FilteredPush
from paceline.update.filters.traffic import RowTraffic, WireBytes
from paceline.update.rows.ops import RowOps, tell_of_refused_library
from paceline.update.rows.pending import PendingRows
from paceline.update.rows.sharding import RowSharding
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import Hyper
from paceline.wire.bounds import MAX_IDS
from paceline.wire.messages import KeysWanted, RowPullFrame, RowsUsed, Unsubscribe
from paceline.wire.row_codec import ID_BYTES, ids_body
from paceline.worker.lock import WorkerLock
from paceline.worker.pushes import PushOutcome, finished_push, refuse_endless_clock
from paceline.worker.rows.managed import Managed
from paceline.worker.rows.opened import CacheOptions, OpenedRows
from paceline.worker.rows.pushes import RowPush, RowPushes, RowPushPart, SendTo
from paceline.worker.rows.reads import RowReadInFlight, RowReadsInFlight
from paceline.worker.rows.throttle import BudgetedRows, BudgetedTables
from paceline.worker.waits import About

MAX_UNDER_WAY = 8  # unanswered pushes of one table
MAX_BURSTS_UNDER_WAY = 100  # the same under a budget, where a burst lasts 10 ms or more: those of a second
MAX_READS = 1000  # of one table in flight
MAX_REPORTS = 32  # clocks whose reads from a cache some server has not confirmed


@dataclass(slots=True)
class RowClient:
    """Reads and pushes of rows by one worker. The user's calls take the worker's lock, the others run under it."""

    core: WorkerCore
    lock: WorkerLock
    ops: RowOps
    sharding: RowSharding
    send_to: SendTo
    handle: Callable[[WorkerEvent], None]
    fail: Callable[[str], None]
    _tables: dict[str, OpenedRows] = field(default_factory=dict[str, OpenedRows])
    _row_reads: RowReadsInFlight = field(init=False)
    _pushes: RowPushes = field(default_factory=RowPushes)
    budgeted: BudgetedTables = field(init=False)

    def __post_init__(self) -> None:
        """Start without tables."""
        self._row_reads = RowReadsInFlight(self.sharding)
        self.budgeted = BudgetedTables(self.lock, self.fail)

    # -- the user's calls --------------------------------------------------------------------------------------------

    def open_table(self, spec: RowTableSpec, options: CacheOptions) -> OpenedRows:
        """Open a table that all servers have agreed on."""
        tell_of_refused_library()
        with self.lock.changed:
            opened = OpenedRows.make(spec, options, self.sharding, self.core.settings.sender.worker)
            if options.communication is not None:
                opened.budgeted = self._budgeted(opened, options.communication)
                self.budgeted.open(opened.budgeted)
            self._tables[spec.name] = opened
            self.handle(Opened(spec.name, opened.consistency, tuple(range(self.sharding.num_servers)), keyed=True))
        return opened

    def start_read(self, table: str, ids: Tensor, needs: int, *, refresh: bool) -> RowReadInFlight:
        """Start a read of distinct ids that contains every update below the clock `needs`. Does not block."""
        with self.lock.changed:
            opened = self._opened(table)
            if self._row_reads.count(table) >= MAX_READS:
                raise UsageError(
                    f"worker {self.core.settings.sender.worker} has {MAX_READS} reads of table '{table}' under way: "
                    "read more rows at a time, and finish earlier reads."
                )
            if opened.cache is not None:
                self._unsubscribe(opened, opened.cache.use(ids))
            delivered = [self.core.rows.delivered(table, server) for server in range(self.sharding.num_servers)]
            reading, want = self._row_reads.plan(opened, ids, needs, delivered, refresh=refresh)
            if opened.uses is not None:
                opened.uses.note(reading.ids_not_of(want.fetch))
            self._row_reads.add(self.core.next_request, reading)
            self.handle(want)
            if opened.budgeted is not None:
                opened.budgeted.pay(time.monotonic())
        return reading

    def finish_read(self, reading: RowReadInFlight) -> tuple[Tensor, Tensor]:
        """Return (rows with their echoes, clock of each) of a read; blocks until they have arrived.

        Rows may leave the cache between start and finish of a read, when other reads need the room or deliveries were
        lost with a connection; then they are requested once more.
        """
        with self.lock.changed:
            opened = self._opened(reading.table)
            self._wait(reading)
            if reading.rows is not None:
                if opened.cache is not None:
                    opened.cache.note_read(reading.ids, reading.rows)
                return reading.rows, reading.clocks
            assert opened.cache is not None
            while True:
                rows, here = opened.cache.read(reading.ids)
                clocks = torch.maximum(opened.cache.clocks(reading.ids), self._delivered(opened, reading.ids))
                if (here & (clocks >= reading.needs)).all():
                    opened.cache.note_read(reading.ids, rows)
                    return rows, clocks
                self._wait(self.start_read(reading.table, reading.ids, reading.needs, refresh=True))

    def push(
        self, table: str, ids: Tensor, rows: Tensor, *, count: float, hyper: tuple[Hyper, ...], expected: float = 0.0
    ) -> Future[PushOutcome]:
        """Send an update of distinct ids; blocks while too many earlier ones are in flight."""
        with self.lock.changed:
            opened = self._opened(table)
            if opened.budgeted is not None:
                opened.refuse_hyper(hyper)
                return self._push_later(opened, opened.budgeted, ids, rows)
            self._wait_for_room(opened)
            filtered = opened.pipeline.sift(ids, rows, self.core.clock, self._values(opened))
            self._note_pushed(opened, len(ids))
            opened.give_hyper(hyper)
            return self._send(opened, filtered, count, expected)

    def flush(self, table: str) -> Future[PushOutcome]:
        """Send all rows that wait for a budget (blocks for that), and all that filters have kept back."""
        with self.lock.changed:
            opened = self._opened(table)
            if opened.budgeted is not None:
                self.budgeted.send_made_by(self.core.clock, opened.budgeted)
            self._wait_for_room(opened)
            kept = opened.pipeline.flush()
            return self._send(opened, kept, 1.0) if len(kept.ids) else finished_push(PushOutcome(applied=True))

    def end_clock(self, clock: int) -> None:
        """Report rows read from caches with the tick of a clock; blocks while too many reports are unconfirmed."""
        with self.lock.changed:
            told = [opened.uses for opened in self._tables.values() if opened.uses is not None]
            self.lock.wait(
                lambda: all(uses.num_unconfirmed < MAX_REPORTS for uses in told),
                f"servers to answer the ticks of the last {MAX_REPORTS} clocks",
            )
            for uses in told:
                uses.end_clock(clock)

    def awaits_fixed_rows(self) -> bool:
        """Return whether a read is in flight whose answer depends on the clock of the servers."""
        return any(opened.reads_are_fixed and self._row_reads.count(table) for table, opened in self._tables.items())

    def num_under_way(self, table: str = "") -> int:
        """Count the unanswered pushes of a table, or of all."""
        return self._pushes.count(table)

    def held_at(self, clock: int) -> dict[str, int]:
        """Return by table how many pushes are applied when this clock is finished, without zeros."""
        nums = {table: self._pushes.num_held(table, clock) for table in self._tables}
        return {table: num for table, num in nums.items() if num}

    # -- effects of the core, and frames of servers ------------------------------------------------------------------

    def perform(self, effect: WorkerEffect, body: memoryview) -> bool:
        """Carry out an effect of the core if it is about a row table; return whether it was."""
        match effect:
            case Send(message=Push() as push) if push.table in self._tables:
                self._send_push(effect.server, push, bare=effect.bare)
            case Send(message=Pull() as pull) if pull.table in self._tables:
                self._send_pull(effect.server, pull)
            case Send(message=Clock() as tick):
                self._send_uses(effect.server, tick)
                return False
            case InstallRows():
                self._install(effect, body)
            case Forget():
                self._forget(self._tables[effect.table])
            case Release() if effect.id in self._pushes:
                self._release(effect)
            case ReadDone():
                return self._row_reads.finish(effect)
            case _:
                return False
        return True

    def on_keys_wanted(self, server: int, message: KeysWanted) -> None:
        """Send a push or a pull again with its ids, which the server does not keep."""
        if message.seq >= 0:
            self._pushes.resend_with_ids(server, message.seq, self.send_to)
            return
        asked = self.core.rows.asked(server, message.request)
        if asked is not None:
            self._send_pull(server, asked, with_ids=True)

    def on_ticked(self, server: int, clock: int) -> None:
        """Drop the reports of all clocks below this one: the server has confirmed them."""
        for opened in self._tables.values():
            if opened.uses is not None:
                opened.uses.confirmed(server, clock)

    def on_reconnected(self, server: int) -> None:
        """Send this server full ids again: lists that were in flight may be lost."""
        for opened in self._tables.values():
            opened.forget_lists(server)

    def abandon(self, error: PacelineError) -> None:
        """End all reads and pushes with an error."""
        self.budgeted.abandon(error)
        self._row_reads.abandon(error)
        self._pushes.abandon(error)

    def close(self) -> None:
        """Release all memory. Not under the lock."""
        self.budgeted.close()
        for opened in self._tables.values():
            opened.close()
        self._tables.clear()

    # -- reads -------------------------------------------------------------------------------------------------------

    def _wait(self, reading: RowReadInFlight) -> None:
        self.lock.wait(
            reading.future.done,
            f"rows of table '{reading.table}' of clock {reading.needs}",
            About(f"pull {reading.table}", reading.table, reading.needs),
        )
        reading.future.result(timeout=0)

    def _send_pull(self, server: int, pull: Pull, *, with_ids: bool = False) -> None:
        reading = self._row_reads.get(pull.request)
        if reading is None:
            return
        ids, opened = reading.ids_for(server), self._tables[pull.table]
        keys = opened.keys(server, ids, sent=with_ids)
        body = ids_body(ids) if keys.sent else EMPTY
        plain = opened.spec.width * opened.down.dtype.itemsize
        asked = WireBytes(1, len(body), len(keys.digest), 0, ID_BYTES * len(ids), plain * len(ids))
        opened.traffic += RowTraffic(pulled=asked)
        self.send_to(server, RowPullFrame(pull, keys), body)

    def _send_uses(self, server: int, tick: Clock) -> None:
        """Send a server the reports of rows read from caches, right before the tick that ends their clock."""
        for table, opened in self._tables.items():
            for clock, ids in () if opened.uses is None else opened.uses.reports(server, tick.clock):
                size_bytes = ID_BYTES * len(ids)
                opened.traffic += RowTraffic(pulled=WireBytes(1, size_bytes, plain_key_bytes=size_bytes))
                self.send_to(server, RowsUsed(self.core.settings.sender, table, clock), ids_body(ids))

    def _install(self, effect: InstallRows, body: memoryview) -> None:
        opened = self._tables[effect.table]
        if effect.request < 0:
            self._install_delivered(opened, effect, body)
            return
        reading = self._row_reads.get(effect.request)
        if reading is None:
            return
        parcel = opened.down.unpack(body, len(reading.asked[effect.server]), with_ids=False)
        opened.traffic += RowTraffic(pulled=WireBytes(value_bytes=len(body)))
        ids = self._row_reads.install(effect, parcel)
        if opened.cache is not None:
            opened.cache.install(effect.server, ids, parcel.together, effect.clock, effect.settled, effect.includes)

    def _install_delivered(self, opened: OpenedRows, effect: InstallRows, body: memoryview) -> None:
        """Store delivered rows that are still in the cache."""
        num = opened.down.num_rows(len(body))
        parcel = opened.down.unpack(body, num, with_ids=True)
        plain = opened.spec.width * opened.down.dtype.itemsize
        brought = WireBytes(1, ID_BYTES * num, 0, opened.down.row_bytes * num, ID_BYTES * num, plain * num)
        opened.traffic += RowTraffic(delivered=brought)
        cache = opened.cache
        if cache is None or parcel.ids is None:
            return
        known = cache.known(parcel.ids)
        ids, rows = parcel.ids[known], parcel.together[known]
        cache.install(effect.server, ids, rows, effect.clock, effect.settled, effect.includes)

    def _forget(self, opened: OpenedRows) -> None:
        if opened.cache is not None:
            opened.cache.clear()

    def _delivered(self, opened: OpenedRows, ids: Tensor) -> Tensor:
        """Return the clock that the deliveries of each id's server have reached."""
        clocks = torch.full((len(ids),), -1)
        if opened.is_delivered:
            order, counts = self.sharding.split(ids)
            for server, places in enumerate(order.split(counts)):
                clocks[places] = self.core.rows.delivered(opened.spec.name, server)
        return clocks

    def _unsubscribe(self, opened: OpenedRows, ids: Tensor) -> None:
        """Unsubscribe from rows that left the cache; if that is lost, servers only send more than needed."""
        if not opened.is_delivered or not len(ids):
            return
        ids = ids[~torch.isin(ids, self._row_reads.ids_of(opened.spec.name))]  # those were requested again
        order, counts = self.sharding.split(ids)
        for server, places in enumerate(order.split(counts)):
            for part in places.split(MAX_IDS) if len(places) else ():
                unsubscribe = Unsubscribe(self.core.settings.sender, opened.spec.name, self.core.next_request)
                self.send_to(server, unsubscribe, ids_body(ids[part]))

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _values(self, opened: OpenedRows) -> Callable[[Tensor], Tensor] | None:
        """Return a function that looks up cached rows, NaN for others; None if the filters need no values."""
        cache, width = opened.cache, opened.spec.width
        if cache is None or not opened.pipeline.needs_values:
            return None

        def look_up(ids: Tensor) -> Tensor:
            rows, here = cache.read(ids)
            rows[~here] = torch.nan
            return rows[:, :width]

        return look_up

    def _send(
        self, opened: OpenedRows, filtered: FilteredPush, count: float, expected: float = 0.0
    ) -> Future[PushOutcome]:
        parts = self._parts(opened, filtered)
        push = RowPush(opened, parts, count, expected, filtered.ids, filtered.change)
        if not parts:
            push.future.set_result(PushOutcome(applied=True))
            return push.future
        if opened.cache is not None and opened.replays and opened.knows_change:
            note = opened.cache.note_own if opened.budgeted is None else opened.cache.note_sent
            note(self.core.next_seq, filtered.ids, opened.change(filtered.decoded), parts)
        self._pushes.prepare(push)
        self.handle(WantPush(opened.spec.name, tuple(sorted(parts))))
        return push.future

    def _parts(self, opened: OpenedRows, filtered: FilteredPush) -> dict[int, RowPushPart]:
        """Split a push by server, without empty parts unless they count in the mean of a clock."""
        echo, everywhere = self._echo(opened, filtered.ids), opened.counts_everyone
        if self.sharding.num_servers == 1:
            if not (everywhere or len(filtered.ids)):
                return {}
            return {0: RowPushPart(filtered.ids, filtered.encoded, echo, opened.hyper_for(0))}
        order, counts = self.sharding.split(filtered.ids)
        return {
            server: RowPushPart(
                filtered.ids[at], filtered.encoded[at], None if echo is None else echo[at], opened.hyper_for(server)
            )
            for server, at in enumerate(order.split(counts))
            if everywhere or len(at)
        }

    def _echo(self, opened: OpenedRows, ids: Tensor) -> Tensor | None:
        """Return the echoes of these rows as the user read them, NaN for rows that were not read."""
        if opened.cache is None or not opened.up.echo_width:
            return None
        return opened.cache.read_echoes(ids)

    def _note_pushed(self, opened: OpenedRows, num_given: int) -> None:
        """Count the bytes that a push would take without filters."""
        item = opened.spec.width * opened.up.dtype.itemsize
        plain = WireBytes(plain_key_bytes=ID_BYTES * num_given, plain_value_bytes=item * num_given)
        opened.traffic += RowTraffic(pushed=plain)

    def _send_push(self, server: int, push: Push, *, bare: bool) -> None:
        self._pushes.send_part(server, push, self.send_to, bare=bare)

    def _release(self, effect: Release) -> None:
        ended = self._pushes.release(effect)
        if ended is None:
            return
        opened, cache = ended.opened, ended.opened.cache
        if ended.answers.refused:
            opened.resend_hyper()
            self._undo(ended)
        if cache is not None and ended.answers.refused:
            cache.refused_own(effect.id.seq, ended.ids)
        elif cache is not None:
            cache.applied_own(effect.id.seq, self._awaited(opened))
        ended.future.set_result(ended.answers.outcome())
        self.budgeted.wake()

    def _undo(self, push: RowPush) -> None:
        """Restore what filters kept back before a refused push, except for parts that a server has applied."""
        if push.change is None:
            return
        refused = torch.ones(len(push.change.ids), dtype=torch.bool)
        order, counts = self.sharding.split(push.change.ids)
        for server, places in enumerate(order.split(counts)):
            refused[places] = server not in push.answers.applied_on
        push.opened.pipeline.undo(push.change.part(refused))

    def _awaited(self, opened: OpenedRows) -> set[int]:
        """Return the servers from which older rows may still arrive."""
        name, servers = opened.spec.name, range(self.sharding.num_servers)
        delivering = {s for s in servers if opened.is_delivered and self.core.rows.delivered(name, s) >= 0}
        return delivering | self.core.rows.awaited(name)

    def _wait_for_room(self, opened: OpenedRows) -> None:
        """Wait until few enough pushes are in flight, without those held until this worker finishes its clock."""
        name, clock = opened.spec.name, self.core.clock
        num_held = self._pushes.num_held(name, clock)
        self.lock.wait(
            lambda: self._may_push(name) and self._pushes.count(name) - num_held < MAX_UNDER_WAY,
            f"servers to apply earlier pushes of table '{name}'",
            About(f"push {name}", name, self.core.oldest_push(name) + 1),
        )

    def _may_push(self, table: str) -> bool:
        """Return whether servers accept one more push; raises UsageError if they do not before the next clock."""
        if self.core.may_push(table):
            return True
        refuse_endless_clock(self.core, table)
        return False

    def _budgeted(self, opened: OpenedRows, settings: Managed) -> BudgetedRows:
        """Create the queue of pushes that wait for a budget."""
        spec, cache = opened.spec, opened.cache
        assert cache is not None
        seed = settings.seed + self.core.settings.sender.worker  # so that workers draw different numbers
        return BudgetedRows(
            spec.name,
            settings,
            opened.deferral,
            PendingRows(spec.width, opened.up.dtype, self.ops, settings.priority, seed),
            cache,
            opened.replays,
            opened.change,
            ID_BYTES + opened.up.row_bytes,
            send=lambda ids, rows: self._send(opened, opened.pipeline.sift(ids, rows, self.core.clock), 1.0),
            has_room=lambda: self.core.may_push(spec.name) and self._pushes.count(spec.name) < MAX_BURSTS_UNDER_WAY,
            traffic=lambda: opened.traffic,
            clock=lambda: self.core.clock,
        )

    def _push_later(self, opened: OpenedRows, budgeted: BudgetedRows, ids: Tensor, rows: Tensor) -> Future[PushOutcome]:
        """Queue a push of distinct ids for the budget. Does not block."""
        self._note_pushed(opened, len(ids))
        pushed = budgeted.push(ids, rows)
        self.budgeted.wake()
        return pushed

    def _opened(self, table: str) -> OpenedRows:
        self.lock.check()
        opened = self._tables.get(table)
        if opened is None:
            names = ", ".join(sorted(self._tables)) or "none"
            raise UsageError(f"row table '{table}' is not open here; open are: {names}")
        return opened
