"""The row tables of a worker: which rows are asked for and pushed, and what comes back."""

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
from paceline.worker.pushes import PushOutcome, refuse_endless_clock, settled
from paceline.worker.rows.managed import Managed
from paceline.worker.rows.opened import CacheOptions, OpenedRows
from paceline.worker.rows.pushes import RowPush, RowPushes, RowPushPart, Say
from paceline.worker.rows.reads import RowReadInFlight, RowReadsInFlight
from paceline.worker.rows.throttle import BudgetedRows, BudgetedTables
from paceline.worker.waits import About

MAX_UNDER_WAY = 8  # pushes of one table that servers have yet to answer
MAX_BURSTS_UNDER_WAY = 100  # the same under a budget, which a burst uses up for 10 ms or more: a second's worth
MAX_READS = 1000  # of one table that are under way
MAX_REPORTS = 32  # clocks whose reads from a cache some server has yet to be known to have heard of


@dataclass(slots=True)
class RowClient:
    """Reads and pushes of rows by one worker. The user's calls take the lock of its node, the others are under it."""

    core: WorkerCore
    waiting: WorkerLock
    ops: RowOps
    owners: RowSharding
    say: Say
    handle: Callable[[WorkerEvent], None]
    fail: Callable[[str], None]
    _tables: dict[str, OpenedRows] = field(default_factory=dict[str, OpenedRows])
    _row_reads: RowReadsInFlight = field(init=False)
    _pushes: RowPushes = field(default_factory=RowPushes)
    budgeted: BudgetedTables = field(init=False)

    def __post_init__(self) -> None:
        """Start without tables."""
        self._row_reads = RowReadsInFlight(self.owners)
        self.budgeted = BudgetedTables(self.waiting, self.fail)

    # -- the user's calls --------------------------------------------------------------------------------------------

    def open(self, spec: RowTableSpec, options: CacheOptions) -> OpenedRows:
        """Work with a table that all servers have agreed on."""
        tell_of_refused_library()
        with self.waiting.changed:
            opened = OpenedRows.make(spec, options, self.owners, self.core.settings.sender.worker)
            if options.communication is not None:
                opened.budgeted = self._budgeted(opened, options.communication)
                self.budgeted.open(opened.budgeted)
            self._tables[spec.name] = opened
            self.handle(Opened(spec.name, opened.consistency, tuple(range(self.owners.num_servers)), keyed=True))
        return opened

    def begin(self, table: str, ids: Tensor, needs: int, *, refresh: bool) -> RowReadInFlight:
        """Begin a read of distinct ids that contains every update below the clock `needs`. Does not block."""
        with self.waiting.changed:
            opened = self._opened(table)
            if self._row_reads.count(table) >= MAX_READS:
                raise UsageError(
                    f"worker {self.core.settings.sender.worker} has {MAX_READS} reads of table '{table}' under way: "
                    "ask for more rows at a time, and take what came."
                )
            if opened.cache is not None:
                self._unsubscribe(opened, opened.cache.use(ids))
            delivered = [self.core.rows.delivered(table, server) for server in range(self.owners.num_servers)]
            reading, want = self._row_reads.plan(opened, ids, needs, delivered, refresh=refresh)
            if opened.uses is not None:
                opened.uses.note(reading.ids_not_of(want.fetch))
            self._row_reads.begin(self.core.next_request, reading)
            self.handle(want)
            if opened.budgeted is not None:
                opened.budgeted.pay(time.monotonic())
        return reading

    def take(self, reading: RowReadInFlight) -> tuple[Tensor, Tensor]:
        """Return (rows with their echoes, clock of each) of a read; blocks until they are there.

        A row goes from the cache between its read and this call when other reads need the room, or when deliveries were
        lost with a connection; then it is asked for once more.
        """
        with self.waiting.changed:
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
                self._wait(self.begin(reading.table, reading.ids, reading.needs, refresh=True))

    def push(
        self, table: str, ids: Tensor, rows: Tensor, *, count: float, hyper: tuple[Hyper, ...], expected: float = 0.0
    ) -> Future[PushOutcome]:
        """Send an update of distinct ids; blocks while too many earlier ones are under way."""
        with self.waiting.changed:
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
        """Send all that waits for a budget, for which this blocks, and all that filters have kept back."""
        with self.waiting.changed:
            opened = self._opened(table)
            if opened.budgeted is not None:
                self.budgeted.send_made_by(self.core.clock, opened.budgeted)
            self._wait_for_room(opened)
            kept = opened.pipeline.flush()
            return self._send(opened, kept, 1.0) if len(kept.ids) else settled(PushOutcome(applied=True))

    def end_clock(self, clock: int) -> None:
        """Have the tick of a clock say which rows were read from a cache; blocks while many such are unanswered."""
        with self.waiting.changed:
            told = [opened.uses for opened in self._tables.values() if opened.uses is not None]
            self.waiting.wait(
                lambda: all(uses.num_unconfirmed < MAX_REPORTS for uses in told),
                f"servers to answer the ticks of the last {MAX_REPORTS} clocks",
            )
            for uses in told:
                uses.end_clock(clock)

    def awaits_fixed_rows(self) -> bool:
        """Say whether a read is under way whose answer depends on the clock that servers have come to."""
        return any(opened.reads_are_fixed and self._row_reads.count(table) for table, opened in self._tables.items())

    def num_under_way(self, table: str = "") -> int:
        """Count the pushes of a table, or of all, that some server has yet to answer."""
        return self._pushes.count(table)

    def held_at(self, clock: int) -> dict[str, int]:
        """Return how many pushes each table has that are applied when this clock is finished, of tables with any."""
        nums = {table: self._pushes.num_held(table, clock) for table in self._tables}
        return {table: num for table, num in nums.items() if num}

    # -- what happens ------------------------------------------------------------------------------------------------

    def perform(self, effect: WorkerEffect, body: memoryview) -> bool:
        """Do what the core asks for, if it is about a row table; say whether it was."""
        match effect:
            case Send(message=Push() as push) if push.table in self._tables:
                self._say_push(effect.server, push, bare=effect.bare)
            case Send(message=Pull() as pull) if pull.table in self._tables:
                self._say_pull(effect.server, pull)
            case Send(message=Clock() as tick):
                self._say_uses(effect.server, tick)
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
        """Send again, with the ids, what a server could not read without them."""
        if message.seq >= 0:
            self._pushes.say_with_ids(server, message.seq, self.say)
            return
        asked = self.core.rows.asked(server, message.request)
        if asked is not None:
            self._say_pull(server, asked, with_ids=True)

    def on_ticked(self, server: int, clock: int) -> None:
        """Note that a server knows all clocks below this one."""
        for opened in self._tables.values():
            if opened.uses is not None:
                opened.uses.confirmed(server, clock)

    def on_reconnected(self, server: int) -> None:
        """Send this server ids in full again: it may lack lists that were on their way."""
        for opened in self._tables.values():
            opened.forget_lists(server)

    def abandon(self, error: PacelineError) -> None:
        """End all that is under way with an error."""
        self.budgeted.abandon(error)
        self._row_reads.abandon(error)
        self._pushes.abandon(error)

    def close(self) -> None:
        """Let go of all memory. Not under the lock."""
        self.budgeted.close()
        for opened in self._tables.values():
            opened.close()
        self._tables.clear()

    # -- reads -------------------------------------------------------------------------------------------------------

    def _wait(self, reading: RowReadInFlight) -> None:
        self.waiting.wait(
            reading.future.done,
            f"rows of table '{reading.table}' of clock {reading.needs}",
            About(f"pull {reading.table}", reading.table, reading.needs),
        )
        reading.future.result(timeout=0)

    def _say_pull(self, server: int, pull: Pull, *, with_ids: bool = False) -> None:
        reading = self._row_reads.get(pull.request)
        if reading is None:
            return
        ids, opened = reading.ids_for(server), self._tables[pull.table]
        keys = opened.keys(server, ids, sent=with_ids)
        body = ids_body(ids) if keys.sent else EMPTY
        plain = opened.spec.width * opened.down.dtype.itemsize
        asked = WireBytes(1, len(body), len(keys.digest), 0, ID_BYTES * len(ids), plain * len(ids))
        opened.traffic += RowTraffic(pulled=asked)
        self.say(server, RowPullFrame(pull, keys), body)

    def _say_uses(self, server: int, tick: Clock) -> None:
        """Send a server what was read from caches in the clocks that a tick ends, right before that."""
        for table, opened in self._tables.items():
            for clock, ids in () if opened.uses is None else opened.uses.reports(server, tick.clock):
                size_bytes = ID_BYTES * len(ids)
                opened.traffic += RowTraffic(pulled=WireBytes(1, size_bytes, plain_key_bytes=size_bytes))
                self.say(server, RowsUsed(self.core.settings.sender, table, clock), ids_body(ids))

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
        """Take in rows that changed; those that went from the cache meanwhile stay away."""
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
        """Return for each id the clock that the deliveries of its server have reached."""
        clocks = torch.full((len(ids),), -1)
        if opened.is_delivered:
            order, counts = self.owners.split(ids)
            for server, places in enumerate(order.split(counts)):
                clocks[places] = self.core.rows.delivered(opened.spec.name, server)
        return clocks

    def _unsubscribe(self, opened: OpenedRows, ids: Tensor) -> None:
        """Tell the servers that rows are kept no longer; if that is lost they send in vain what changes."""
        if not opened.is_delivered or not len(ids):
            return
        ids = ids[~torch.isin(ids, self._row_reads.ids_of(opened.spec.name))]  # those are on their way here again
        order, counts = self.owners.split(ids)
        for server, places in enumerate(order.split(counts)):
            for part in places.split(MAX_IDS) if len(places) else ():
                unsubscribe = Unsubscribe(self.core.settings.sender, opened.spec.name, self.core.next_request)
                self.say(server, unsubscribe, ids_body(ids[part]))

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _values(self, opened: OpenedRows) -> Callable[[Tensor], Tensor] | None:
        """Return what looks up rows as this worker has read them, NaN for others; None where nothing is kept."""
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
        """Cut a push by server, of those that get some of it, or all whose mean it counts in."""
        echo, everywhere = self._echo(opened, filtered.ids), opened.counts_everyone
        if self.owners.num_servers == 1:
            if not (everywhere or len(filtered.ids)):
                return {}
            return {0: RowPushPart(filtered.ids, filtered.encoded, echo, opened.hyper_for(0))}
        order, counts = self.owners.split(filtered.ids)
        return {
            server: RowPushPart(
                filtered.ids[at], filtered.encoded[at], None if echo is None else echo[at], opened.hyper_for(server)
            )
            for server, at in enumerate(order.split(counts))
            if everywhere or len(at)
        }

    def _echo(self, opened: OpenedRows, ids: Tensor) -> Tensor | None:
        """Return what the user was given beside the values of these rows, NaN for rows that were not read."""
        if opened.cache is None or not opened.up.echo_width:
            return None
        return opened.cache.read_echoes(ids)

    def _note_pushed(self, opened: OpenedRows, num_given: int) -> None:
        """Count what a push would have taken without filters."""
        item = opened.spec.width * opened.up.dtype.itemsize
        plain = WireBytes(plain_key_bytes=ID_BYTES * num_given, plain_value_bytes=item * num_given)
        opened.traffic += RowTraffic(pushed=plain)

    def _say_push(self, server: int, push: Push, *, bare: bool) -> None:
        self._pushes.say(server, push, self.say, bare=bare)

    def _release(self, effect: Release) -> None:
        ended = self._pushes.release(effect)
        if ended is None:
            return
        opened, cache = ended.opened, ended.opened.cache
        if ended.answers.refused:
            opened.tell_again()
            self._undo(ended)
        if cache is not None and ended.answers.refused:
            cache.refused_own(effect.id.seq, ended.ids)
        elif cache is not None:
            cache.applied_own(effect.id.seq, self._awaited(opened))
        ended.future.set_result(ended.answers.outcome())
        self.budgeted.wake()

    def _undo(self, push: RowPush) -> None:
        """Keep back of a refused push's rows what was kept back before it, but where a server has applied its part."""
        if push.change is None:
            return
        refused = torch.ones(len(push.change.ids), dtype=torch.bool)
        order, counts = self.owners.split(push.change.ids)
        for server, places in enumerate(order.split(counts)):
            refused[places] = server not in push.answers.applied_on
        push.opened.pipeline.undo(push.change.part(refused))

    def _awaited(self, opened: OpenedRows) -> set[int]:
        """Return the servers from which rows may come that they have made before this moment."""
        name, servers = opened.spec.name, range(self.owners.num_servers)
        delivering = {s for s in servers if opened.is_delivered and self.core.rows.delivered(name, s) >= 0}
        return delivering | self.core.rows.awaited(name)

    def _wait_for_room(self, opened: OpenedRows) -> None:
        """Wait until few enough pushes are under way; those that wait for this worker's own clock do not count."""
        name, clock = opened.spec.name, self.core.clock
        num_held = self._pushes.num_held(name, clock)
        self.waiting.wait(
            lambda: self._may_push(name) and self._pushes.count(name) - num_held < MAX_UNDER_WAY,
            f"servers to apply earlier pushes of table '{name}'",
            About(f"push {name}", name, self.core.oldest_push(name) + 1),
        )

    def _may_push(self, table: str) -> bool:
        """Return whether servers take one more push; raises UsageError where they do not before the clock is over."""
        if self.core.may_push(table):
            return True
        refuse_endless_clock(self.core, table)
        return False

    def _budgeted(self, opened: OpenedRows, settings: Managed) -> BudgetedRows:
        """Return what lets the pushes of a table wait for a budget."""
        spec, cache = opened.spec, opened.cache
        assert cache is not None
        seed = settings.seed + self.core.settings.sender.worker  # so that workers draw differently
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
        """Let a push of distinct ids wait for the budget. Does not block."""
        self._note_pushed(opened, len(ids))
        pushed = budgeted.push(ids, rows)
        self.budgeted.wake()
        return pushed

    def _opened(self, table: str) -> OpenedRows:
        self.waiting.check()
        opened = self._tables.get(table)
        if opened is None:
            names = ", ".join(sorted(self._tables)) or "none"
            raise UsageError(f"row table '{table}' is not open here; open are: {names}")
        return opened
