"""A row table of a worker: its reads and pushes of rows, and the frames that answer them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self, final

import torch
from torch import Tensor

from paceline.core.effects import Drop, Forget, Install, ReadDone, Release
from paceline.core.events import Opened, Timeout, WantPush
from paceline.core.messages import Fetched, Pull, Push
from paceline.core.table_reads import TableReads
from paceline.errors import PacelineError, PeerError, ProtocolBug, UsageError
from paceline.transport.base import EMPTY
from paceline.update.filters.pipeline import FilteredPush
from paceline.update.filters.traffic import RowTraffic, WireBytes
from paceline.update.hyper_checks import pushed_problem
from paceline.update.placement import RowSharding
from paceline.update.rows.ops import RowOps, tell_of_missing_library
from paceline.update.rows.pending import PendingRows
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import Hyper
from paceline.wire.messages import (
    EarlyValues,
    FetchedRest,
    KeysWanted,
    PullFrame,
    RowPullFrame,
    RowPushFrame,
    RowsUsed,
    Unsubscribe,
)
from paceline.wire.requests import MAX_IDS, MAX_JOINED_BYTES, DeclareRows
from paceline.wire.row_codec import ID_BYTES, ids_body
from paceline.worker.dense import PendingRead
from paceline.worker.pushes import PushOutcome, finished_push, may_push
from paceline.worker.rows.in_flight import RowPush, RowPushes, RowPushPart, RowReadInFlight, RowReadsInFlight
from paceline.worker.rows.managed import Managed
from paceline.worker.rows.state import CacheOptions, RowTableState
from paceline.worker.rows.throttle import BudgetedRows
from paceline.worker.table_client import ClientContext
from paceline.worker.waits import About

MAX_UNDER_WAY = 8  # unanswered pushes of one table
MAX_BURSTS_UNDER_WAY = 100  # the same under a budget, where a burst lasts 10 ms or more: those of a second
MAX_READS = 1000  # of one table in flight
MAX_REPORTS = 32  # clocks whose reads from a cache some server has not confirmed


@final
class DistinctIds:
    """Finds the distinct ids among those of a call, and knows those of the call before.

    A step pushes the ids that it has pulled. To compare them takes a twentieth to a fiftieth of finding them again, and
    sees what a script has written into its tensor meanwhile.
    """

    def __init__(self, search: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        self._search = search  # `RowOps.unique`
        # Ids of the last call, the distinct ones, and their places. One attribute, as several threads may ask.
        self._last: tuple[Tensor | None, Tensor, Tensor | None] = (None, torch.empty(0, dtype=torch.int64), None)

    def among(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the distinct ones of ids (n,) in order of appearance, and the place of each id among them, (n,).

        Without places if no id repeats: then they are the ids, in memory of their own. Nothing may write to either.
        """
        known, distinct, places = self._last
        if torch.equal(ids, distinct):
            return distinct, None
        if known is not None and torch.equal(ids, known):
            return distinct, places
        with torch.inference_mode(mode=False):  # a later call may save the places for its backward pass
            distinct, places = self._search(ids)
            known = ids.clone() if len(distinct) < len(ids) else None
        if known is None:
            places = None
        self._last = known, distinct, places
        return distinct, places


@dataclass(slots=True)
class RowClient:
    """One row table of a worker; see `TableClient`. The user's calls take the worker's lock.

    Every call that blocks raises as `WorkerNode` says.

    Args:
        state: of the open table.
        context: what all tables of the worker share.
        budget: settings of the budget of this table, if there is one.
    """

    state: RowTableState
    context: ClientContext
    budget: Managed | None = None
    name: str = field(init=False)
    sharding: RowSharding = field(init=False)  # which server has which rows
    ops: RowOps = field(init=False)  # on rows, of this process
    distinct: DistinctIds = field(init=False)
    _budgeted: BudgetedRows | None = None  # pushes that wait for a budget
    _reads: RowReadsInFlight = field(init=False)
    _pushes: RowPushes = field(init=False)
    _core_reads: TableReads = field(init=False)
    _weight: tuple[float, float] = 1.0, 0.0  # samples of the last push, and those expected of all workers
    _pushed_in: int = -1  # the clock of the last push
    _flushed_in: int = -1  # the clock of the last flush that counts in a mean

    def __post_init__(self) -> None:
        """Open the table in the core."""
        state = self.state
        self.name, self.sharding, self.ops = state.spec.name, self.context.row_sharding, self.context.row_sharding.ops
        self.distinct = DistinctIds(self.ops.unique)
        self._reads, self._pushes = (
            RowReadsInFlight(self.sharding),
            RowPushes(state.is_held, self.context.core.settings.keeps_pushes),
        )
        if self.budget is not None:
            self._budgeted = self._make_budgeted(self.budget)
            self.context.throttle.add(self._budgeted)
        servers = tuple(range(self.sharding.num_servers))
        self.context.handle(Opened(self.name, state.consistency, servers, keyed=True))
        self._core_reads = self.context.core.reads(self.name)

    @classmethod
    def open(cls, context: ClientContext, spec: RowTableSpec, options: CacheOptions) -> Self:
        """Declare a row table to all servers and open it; blocks and raises as `DenseClient.open` does."""
        # First, so that options which contradict the declaration leave no table on the servers.
        state = RowTableState.make(spec, options, context.row_sharding, context.core.settings.sender.worker)
        context.rpc.call_all(lambda number: DeclareRows(number, spec), f"servers to agree on table '{spec.name}'")
        tell_of_missing_library()
        with context.lock.changed:
            client = cls(state, context, options.communication)
            context.add(spec.name, client, state.consistency)
        return client

    @property
    def has_budget(self) -> bool:
        """Whether pushes wait for a budget."""
        return self._budgeted is not None

    # -- the user's calls --------------------------------------------------------------------------------------------

    def start_read(self, ids: Tensor, needs: int, *, refresh: bool) -> RowReadInFlight:
        """Start a read of distinct ids that contains every update below the clock `needs`. Does not block."""
        context, state = self.context, self.state
        with context.lock.changed:
            context.lock.check()
            if len(self._reads) >= MAX_READS:
                raise UsageError(
                    f"worker {context.core.settings.sender.worker} has {MAX_READS} reads of table '{self.name}' under "
                    "way: read more rows at a time, and finish earlier reads."
                )
            if state.cache is not None:
                self._unsubscribe(state.cache.use(ids))
            delivered = [self._core_reads.reached(server) for server in range(self.sharding.num_servers)]
            started = PendingRead(context.core.clock, context.lock.changed)
            reading, want = self._reads.plan(state, ids, needs, delivered, started, refresh=refresh)
            if state.uses is not None:
                state.uses.note(reading.ids_not_of(want.fetch))
            self._reads.add(context.core.next_request, reading)
            context.handle(want)
            if self._budgeted is not None:
                self._budgeted.pay(time.monotonic())
        return reading

    def wait_read(self, reading: RowReadInFlight) -> tuple[Tensor, Tensor]:
        """Return (rows with their echoes, clock of each) of a read; blocks until they have arrived.

        Rows may leave the cache between start and finish of a read, when other reads need the room or deliveries were
        lost with a connection; then they are requested once more.
        """
        with self.context.lock.changed:
            self.context.lock.check()
            cache = self.state.cache
            self._wait(reading)
            if reading.rows is not None:
                if cache is not None:
                    cache.note_read(reading.ids, reading.rows)
                return reading.rows, reading.clocks
            assert cache is not None
            while True:
                rows, here = cache.read(reading.ids)
                clocks = torch.maximum(cache.clocks(reading.ids), self._delivered(reading.ids))
                if (here & (clocks >= reading.needs)).all():
                    cache.note_read(reading.ids, rows)
                    return rows, clocks
                self._wait(self.start_read(reading.ids, reading.needs, refresh=True))

    def push(
        self, ids: Tensor, rows: Tensor, *, count: float, hyper: tuple[Hyper, ...], expected: float = 0.0
    ) -> Future[PushOutcome]:
        """Send an update of distinct ids; blocks while too many earlier ones are in flight."""
        state = self.state
        with self.context.lock.changed:
            self.context.lock.check()
            if self._budgeted is not None:
                state.refuse_hyper(hyper)
                self._note_pushed(ids.numel())
                pushed = self._budgeted.push(ids, rows)
                self.context.throttle.wake()
                return pushed
            problem = pushed_problem(state.spec, hyper)
            if problem:  # not sent: servers would refuse it, and each later push that brings it again
                return finished_push(PushOutcome(applied=False, reason=problem))
            if self._flushed_in == self.context.core.clock:
                if not ids.numel():  # the flush counts for this worker
                    return finished_push(PushOutcome(applied=True))
                raise self._two_in_a_mean(is_flush=False)
            self._wait_for_room()
            filtered = state.pipeline.sift(ids, rows, self.context.core.clock, self._values())
            self._note_pushed(ids.numel())
            state.give_hyper(hyper)
            self._pushed_in = self.context.core.clock
            self._weight = (count, expected) if count else self._weight
            return self._send(filtered, count, expected)

    def flush(self) -> Future[PushOutcome]:
        """Send all rows that wait for a budget (blocks for that), and all that filters have kept back.

        Where an update is a mean, that counts as the pushes from which it was kept back: with their weight, and also
        where nothing was kept back on this worker.
        """
        with self.context.lock.changed:
            self.context.lock.check()
            self._send_budgeted(self.context.core.clock)
            self._wait_for_room()
            counts = self.state.counts_all_workers and self.state.pipeline.keeps_back and self._pushed_in >= 0
            if counts and self._flushed_in == self.context.core.clock:
                return finished_push(PushOutcome(applied=True))
            if counts and self._pushed_in == self.context.core.clock:
                raise self._two_in_a_mean(is_flush=True)
            kept = self.state.pipeline.flush()
            if not (counts or len(kept.ids)):
                return finished_push(PushOutcome(applied=True))
            self._flushed_in = self.context.core.clock if counts else -1
            return self._send(kept, *self._weight)

    def clear_cache(self) -> None:
        """Drop all cached rows: they have changed otherwise than by a push."""
        with self.context.lock.changed:
            self._clear_cache()

    # -- effects of the core -----------------------------------------------------------------------------------------

    def send_push(self, server: int, push: Push, *, bare: bool) -> None:
        """Send a server its part of a push, unless it has answered."""
        part = self._pushes.part(server, push, bare=bare)
        if part is not None:
            self.context.send(server, *part)

    def push_part(self, server: int, push: Push) -> tuple[RowPushFrame, memoryview] | None:
        """Return a server's part of a push, None if the server has answered it."""
        return self._pushes.part(server, push, bare=False)

    def pull_part(self, server: int, pull: Pull) -> PullFrame:
        """Raise ProtocolBug: pulls of rows are sent each by itself."""
        raise ProtocolBug(f"table '{self.name}' has rows, and {pull} travels in no step")

    def send_pull(self, server: int, pull: Pull, *, with_ids: bool = False) -> None:
        """Send a server the ids of a read; `with_ids` even if it should know them."""
        reading, state = self._reads.get(pull.request), self.state
        if reading is None:
            return
        ids = reading.ids_for(server)
        keys = state.keys(server, ids, sent=with_ids)
        body = ids_body(ids) if keys.sent else EMPTY
        plain = state.spec.width * state.down.dtype.itemsize
        requested = WireBytes(1, len(body), len(keys.digest), 0, ID_BYTES * keys.num, plain * keys.num)
        state.traffic += RowTraffic(pulled=requested)
        self.context.send(server, RowPullFrame(pull, keys), body)

    def install(self, effect: Install, body: memoryview) -> None:
        """Store the rows of an answer or a delivery."""
        if effect.request < 0:
            self._install_delivered(effect, body)
            return
        reading, state = self._reads.get(effect.request), self.state
        if reading is None:
            return
        unpacked = state.down.unpack(body, reading.requested[effect.server].numel(), with_ids=False)
        state.traffic += RowTraffic(pulled=WireBytes(value_bytes=len(body)))
        self._reads.install(effect, unpacked)
        if state.cache is not None:
            ids, rows = reading.ids_for(effect.server), unpacked.together
            state.cache.install(effect.server, ids, rows, effect.clock, effect.settled, effect.includes)

    def forget(self, effect: Forget) -> None:
        """Drop all cached rows."""
        self._clear_cache()

    def release(self, effect: Release) -> None:
        """Note the answer to one part of a push; end the push when all parts are answered."""
        ended = self._pushes.release(effect)
        if ended is None:
            return
        cache = self.state.cache
        if ended.answers.refused:
            self.state.resend_hyper()
            self._undo(ended)
        if cache is not None and ended.answers.refused:
            cache.refused_own(effect.id.seq, ended.ids)
        elif cache is not None:
            cache.applied_own(effect.id.seq, self._awaited())
        ended.future.set_result(ended.answers.outcome())
        if self._budgeted is not None:
            self.context.throttle.wake()

    def drop(self, effect: Drop) -> None:
        """Forget a part that was kept."""
        self._pushes.drop(effect)

    def finish_read(self, done: ReadDone) -> None:
        """End the future of a read."""
        self._reads.finish(done)

    # -- clocks ------------------------------------------------------------------------------------------------------

    def prepare_tick(self, clock: int) -> None:
        """Send the rows that may wait no longer; blocks for their budget, and while many reports are unconfirmed."""
        self._send_budgeted(self.state.deferral.due(clock))
        uses = self.state.uses
        if uses is not None:
            self.context.lock.wait(
                lambda: uses.num_unconfirmed < MAX_REPORTS,
                f"servers to answer the ticks of the last {MAX_REPORTS} clocks",
            )

    def end_clock(self, clock: int) -> None:
        """Make the report of the rows that were read from the cache."""
        if self.state.uses is not None:
            self.state.uses.end_clock(clock)

    def send_before_tick(self, server: int, clock: int) -> None:
        """Send a server the reports of rows read from the cache in the clocks that the tick ends."""
        for ended, ids in () if self.state.uses is None else self.state.uses.reports(server, clock):
            size_bytes = ID_BYTES * len(ids)
            self.state.traffic += RowTraffic(pulled=WireBytes(1, size_bytes, plain_key_bytes=size_bytes))
            used = RowsUsed(self.context.core.settings.sender, self.name, ended)
            self.context.send(server, used, ids_body(ids), urgent=True)  # like the tick that follows it

    def note_ticked(self, server: int, clock: int) -> None:
        """Drop the reports that the server has confirmed."""
        if self.state.uses is not None:
            self.state.uses.confirmed(server, clock)

    def holds_ticks(self) -> bool:
        """Return whether a read is in flight whose answer depends on the clock of the servers."""
        return self.state.reads_are_fixed and len(self._reads) > 0

    # -- connections and memory --------------------------------------------------------------------------------------

    def receive_buffer(self, server: int, message: Fetched, size_bytes: int) -> memoryview | None:
        """Return None: rows are copied to their places."""
        return None

    def place_early(self, server: int, message: EarlyValues | FetchedRest, size_bytes: int) -> memoryview | None:
        """Raise PeerError: rows come when they are asked for."""
        raise PeerError(f"table '{self.name}' has rows, of which server {server} sends no {type(message).__name__}")

    def early_body(self, server: int, message: FetchedRest) -> memoryview | None:
        """Raise PeerError: rows come when they are asked for."""
        raise PeerError(f"table '{self.name}' has rows, of which server {server} sends no {type(message).__name__}")

    def note_received(self, server: int, message: Fetched) -> None:
        """Change nothing: servers do not lend memory for rows."""

    def on_keys_wanted(self, server: int, message: KeysWanted) -> None:
        """Send a push or a pull again with its ids, which the server does not keep."""
        if message.seq >= 0:
            self._pushes.resend_with_ids(server, message.seq, self.context.send)
            return
        pull = self._core_reads.unanswered_pull(server, message.request)
        if pull is not None:
            self.send_pull(server, pull, with_ids=True)

    def on_reconnected(self, server: int) -> None:
        """Send this server full ids again: lists that were in flight may be lost."""
        self.state.forget_lists(server)

    # -- pushes under way, and the end -------------------------------------------------------------------------------

    def flush_pushes(self, clock: int) -> None:
        """Send rows that wait for a budget, which blocks while it is used up, and pushes that wait for their clock."""
        self._send_budgeted(clock)
        self.context.handle(Timeout())

    def _send_budgeted(self, clock: int) -> None:
        """Send the rows of this clock or before that wait for a budget; blocks while it is used up."""
        if self._budgeted is not None:
            self.context.throttle.wait_sent(self._budgeted, clock)

    def num_under_way(self) -> int:
        """Count the pushes that some server has not answered."""
        return len(self._pushes)

    def num_held(self, clock: int) -> int:
        """Count the pushes that are applied when this worker finishes this clock."""
        return self._pushes.num_held(clock)

    def num_kept_back(self) -> int:
        """Count the rows that filters keep back, without those of which only a rounding error is left."""
        return self.state.pipeline.num_kept_back

    def abandon(self, error: PacelineError) -> None:
        """End all futures with an error; rows that wait for a budget are not sent."""
        if self._budgeted is not None:
            self._budgeted.abandon(error)
        self._reads.abandon(error)
        self._pushes.abandon(error)

    def close(self) -> None:
        """Release all memory."""
        if self._budgeted is not None:
            self._budgeted.close()
        self.state.close()

    # -- reads -------------------------------------------------------------------------------------------------------

    def _wait(self, reading: RowReadInFlight) -> None:
        self.context.lock.wait(
            reading.started.is_over,
            f"rows of table '{reading.table}' of clock {reading.needs}",
            About(f"pull {reading.table}", reading.table, reading.needs),
        )
        if reading.started.error is not None:
            raise reading.started.error
        self.context.lock.check()  # since the last answer the table may have been closed

    def _install_delivered(self, effect: Install, body: memoryview) -> None:
        """Store delivered rows that are still in the cache."""
        state = self.state
        num = state.down.num_rows(len(body))
        unpacked = state.down.unpack(body, num, with_ids=True)
        plain = state.spec.width * state.down.dtype.itemsize
        brought = WireBytes(1, ID_BYTES * num, 0, state.down.row_bytes * num, ID_BYTES * num, plain * num)
        state.traffic += RowTraffic(delivered=brought)
        cache = state.cache
        if cache is None or unpacked.ids is None:
            return
        known = cache.known(unpacked.ids)
        ids, rows = unpacked.ids[known], unpacked.together[known]
        cache.install(effect.server, ids, rows, effect.clock, effect.settled, effect.includes)

    def _clear_cache(self) -> None:
        if self.state.cache is not None:
            self.state.cache.clear()

    def _delivered(self, ids: Tensor) -> Tensor:
        """Return the clock that the deliveries of each id's server have reached."""
        clocks = torch.full((len(ids),), -1)
        if self.state.is_delivered:
            for server, places in enumerate(self.sharding.split(ids)):
                clocks[places] = self._core_reads.reached(server)
        return clocks

    def _unsubscribe(self, ids: Tensor) -> None:
        """Unsubscribe from rows that left the cache; if that is lost, servers only send more than needed."""
        if not self.state.is_delivered or not len(ids):
            return
        ids = ids[~torch.isin(ids, self._reads.ids())]  # those were requested again
        core = self.context.core
        for server, places in enumerate(self.sharding.split(ids)):
            for part in places.split(MAX_IDS) if len(places) else ():
                unsubscribe = Unsubscribe(core.settings.sender, self.name, core.next_request)
                self.context.send(server, unsubscribe, ids_body(ids[part]))

    # -- pushes ------------------------------------------------------------------------------------------------------

    def _values(self) -> Callable[[Tensor], Tensor] | None:
        """Return a function that looks up cached rows, NaN for others; None if the filters need no values."""
        cache, width = self.state.cache, self.state.spec.width
        if cache is None or not self.state.pipeline.needs_values:
            return None

        def look_up(ids: Tensor) -> Tensor:
            rows, here = cache.read(ids)
            rows[~here] = torch.nan
            return rows[:, :width]

        return look_up

    def _send(self, filtered: FilteredPush, count: float, expected: float = 0.0) -> Future[PushOutcome]:
        state, parts = self.state, self._parts(filtered)
        if not parts:
            return finished_push(PushOutcome(applied=True))
        if state.cache is not None and state.replays and state.knows_change:
            note = state.cache.note_own if self._budgeted is None else state.cache.note_sent
            note(self.context.core.next_seq, filtered.ids, state.change(filtered.decoded), parts)
        made = self.context.core.next_push(self.name)
        push = RowPush(state, parts, count, expected, filtered.ids, made, filtered.change)
        self._pushes.add(push)
        self.context.handle(WantPush(self.name, tuple(sorted(parts)), may_wait=self._may_wait(filtered)))
        return push.future

    def _two_in_a_mean(self, *, is_flush: bool) -> UsageError:
        """Return why this push or flush cannot be in this clock: each would have a share of its mean."""
        core = self.context.core
        return UsageError(
            f"table '{self.name}', worker {core.settings.sender.worker}, clock {core.clock}: "
            f"{'flush() follows a push' if is_flush else 'a push follows flush()'} in the same clock, whose update is "
            f"a mean (scale='{self.state.spec.scale}') in which each would count by itself, and so too little. Call "
            "clock() between the two, or declare the table with scale='sum'."
        )

    def _may_wait(self, filtered: FilteredPush) -> bool:
        """Return whether a push may wait for the end of its clock, when servers apply it."""
        state = self.state
        size_bytes = len(filtered.ids) * (ID_BYTES + state.up.row_bytes)
        is_fit = state.is_held and not state.lists_ids and self._budgeted is None
        return is_fit and size_bytes <= MAX_JOINED_BYTES

    def _parts(self, filtered: FilteredPush) -> dict[int, RowPushPart]:
        """Split a push by server, without empty parts unless they count in the mean of a clock."""
        state, echo = self.state, self._echo(filtered.ids)
        everywhere = state.counts_all_workers
        if self.sharding.num_servers == 1:
            if not (everywhere or filtered.ids.numel()):
                return {}
            return {0: RowPushPart(filtered.ids, filtered.encoded, echo, state.hyper_for(0))}
        return {
            server: RowPushPart(
                filtered.ids.index_select(0, at),
                self._rows_at(filtered.encoded, at),
                None if echo is None else self._rows_at(echo, at),
                state.hyper_for(server),
            )
            for server, at in enumerate(self.sharding.split(filtered.ids))
            if everywhere or at.numel()
        }

    def _rows_at(self, rows: Tensor, places: Tensor) -> Tensor:
        """Return copies of some rows of a matrix."""
        out = rows.new_empty((places.numel(), rows.shape[1]))
        self.ops.gather(rows, places, out)
        return out

    def _echo(self, ids: Tensor) -> Tensor | None:
        """Return the echoes of these rows as the user read them, NaN for rows that were not read."""
        state = self.state
        if state.cache is None or not state.up.echo_width:
            return None
        return state.cache.read_echoes(ids)

    def _note_pushed(self, num_given: int) -> None:
        """Count the bytes that a push would take without filters."""
        item = self.state.spec.width * self.state.up.dtype.itemsize
        plain = WireBytes(plain_key_bytes=ID_BYTES * num_given, plain_value_bytes=item * num_given)
        self.state.traffic += RowTraffic(pushed=plain)

    def _undo(self, push: RowPush) -> None:
        """Restore what filters kept back before a refused push, except for parts that a server has applied."""
        if push.change is None:
            return
        refused = torch.ones(len(push.change.ids), dtype=torch.bool)
        for server, places in enumerate(self.sharding.split(push.change.ids)):
            refused[places] = server not in push.answers.applied_on
        self.state.pipeline.undo(push.change.part(refused))

    def _awaited(self) -> set[int]:
        """Return the servers from which older rows may still arrive."""
        servers, reads = range(self.sharding.num_servers), self._core_reads
        delivering = {s for s in servers if self.state.is_delivered and reads.reached(s) >= 0}
        return delivering | reads.awaited()

    def _wait_for_room(self) -> None:
        """Wait until few enough pushes are in flight, without those held until this worker finishes its clock."""
        name, core = self.name, self.context.core
        num_held = self._pushes.num_held(core.clock)

        def has_room() -> bool:
            return may_push(core, name) and len(self._pushes) - num_held < MAX_UNDER_WAY

        if not has_room():  # what the wait is about takes a look at all pushes
            about = About(f"push {name}", name, core.oldest_push(name) + 1)
            self.context.lock.wait(has_room, f"servers to apply earlier pushes of table '{name}'", about)
            self.context.lock.check()  # as after every wait: the table may have been closed

    def _make_budgeted(self, settings: Managed) -> BudgetedRows:
        """Create the queue of pushes that wait for a budget."""
        state, core, spec = self.state, self.context.core, self.state.spec
        assert state.cache is not None
        seed = settings.seed + core.settings.sender.worker  # so that workers draw different numbers
        return BudgetedRows(
            spec.name,
            settings,
            state.deferral,
            PendingRows(spec.width, state.up.dtype, self.ops, settings.priority, seed),
            state.cache,
            state.replays,
            state.change,
            ID_BYTES + state.up.row_bytes,
            send=lambda ids, rows: self._send(state.pipeline.sift(ids, rows, core.clock), 1.0),
            has_room=lambda: core.may_push(spec.name) and len(self._pushes) < MAX_BURSTS_UNDER_WAY,
            traffic=lambda: state.traffic,
            clock=lambda: core.clock,
        )
