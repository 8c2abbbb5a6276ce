"""Reads and pushes of rows in flight: what was requested and sent, and what servers have answered."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from paceline.core.effects import Drop, Install, ReadDone, Release
from paceline.core.events import WantRows
from paceline.core.messages import Push, PushId
from paceline.errors import PacelineError
from paceline.transport.base import EMPTY
from paceline.update.filters.pipeline import KeptChange
from paceline.update.filters.traffic import RowTraffic, WireBytes
from paceline.update.placement import RowSharding
from paceline.update.table import Hyper
from paceline.wire.messages import Keys, RowPushFrame
from paceline.wire.row_codec import ID_BYTES, RowBody
from paceline.worker.dense import PendingRead
from paceline.worker.pushes import Answers, ClockCounts, PushOutcome, pending_future
from paceline.worker.rows.cache import UNKNOWN
from paceline.worker.rows.state import RowTableState
from paceline.worker.table_client import SendFrame


@dataclass(slots=True)
class RowReadInFlight:
    """One read.

    Attributes:
        table: which one.
        needs: rows must contain every update below this clock.
        ids: (n,) distinct.
        requested: by server, the positions in `ids` of the rows that it sends, as an answer or in deliveries.
        rows: (n, width), filled from the cache and as answers arrive; None if the rows are read from the cache when the
            read is finished, with own pushes made until then.
        clocks: (n,), of each row in `rows`: it contains every update below.
        started: ends when all rows have arrived.
    """

    table: str
    needs: int
    ids: Tensor
    rows: Tensor | None
    clocks: Tensor
    started: PendingRead
    requested: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    @property
    def future(self) -> Future[ReadDone]:
        """How it ends; see `PendingRead.future`."""
        return self.started.future

    def ids_for(self, server: int) -> Tensor:
        """Return the ids requested from a server."""
        places = self.requested[server]
        return self.ids if is_all(places, self.ids) else self.ids.index_select(0, places)

    def holds(self, rows: Tensor) -> bool:
        """Return whether these rows share the memory of this read."""
        return self.rows is not None and rows.untyped_storage().data_ptr() == self.rows.untyped_storage().data_ptr()

    def ids_not_of(self, servers: Sequence[int]) -> Tensor:
        """Return the ids requested from none of these servers."""
        kept = torch.ones(len(self.ids), dtype=torch.bool)
        for server in servers:
            kept[self.requested[server]] = False
        return self.ids[kept]


def is_all(places: Tensor, ids: Tensor) -> bool:
    """Return whether these positions in `ids`, of the ids of a server, are all there are, in their order."""
    return places.numel() == ids.numel()


@dataclass(slots=True)
class RowReadsInFlight:
    """The reads of a table by request. Used under the lock of the worker node."""

    sharding: RowSharding
    _under_way: dict[int, RowReadInFlight] = field(default_factory=dict[int, RowReadInFlight])

    def plan(
        self,
        state: RowTableState,
        ids: Tensor,
        needs: int,
        delivered: list[int],
        started: PendingRead,
        *,
        refresh: bool,
    ) -> tuple[RowReadInFlight, WantRows]:
        """Return a read of distinct ids, and its event for the core: which servers to request rows from.

        Requested are rows that are not cached, or not fresh enough.

        Args:
            state: of the table.
            ids: (n,) distinct.
            needs: as of `RowReadInFlight`.
            delivered: by server, the clock that its deliveries have reached.
            started: as of `RowReadInFlight`.
            refresh: request every row.
        """
        cache = state.cache
        rows: Tensor | None = None
        clocks = torch.full((ids.numel(),), UNKNOWN)
        if state.reads_are_fixed and cache is not None:
            rows, clocks = cache.read(ids)[0], cache.clocks(ids)
        elif cache is None:
            rows = torch.empty((ids.numel(), state.down.full_width), dtype=state.down.dtype)
        reading = RowReadInFlight(state.spec.name, needs, ids, rows, clocks, started)
        fetch: list[int] = []
        deliver: list[int] = []
        for server, places in enumerate(self.sharding.split(ids)):
            brought = False
            if cache is not None and not refresh:
                clocks = cache.clocks(ids[places])
                lacking = clocks < (needs if delivered[server] < needs else 0)
                places = places[lacking]
                brought = state.is_delivered and bool((clocks[lacking] > UNKNOWN).all())
            if places.numel():
                reading.requested[server] = places
                (deliver if brought else fetch).append(server)
        return reading, WantRows(state.spec.name, needs, tuple(fetch), tuple(deliver))

    def add(self, request: int, reading: RowReadInFlight) -> None:
        """Add a read."""
        self._under_way[request] = reading

    def __len__(self) -> int:
        """Count the reads in flight."""
        return len(self._under_way)

    def ids(self) -> Tensor:
        """Return the ids of all reads in flight; they may repeat."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *(reading.ids for reading in self._under_way.values())])

    def get(self, request: int) -> RowReadInFlight | None:
        """Return a read in flight, None if it has ended."""
        return self._under_way.get(request)

    def install(self, effect: Install, unpacked: RowBody) -> None:
        """Store the answer of a server to a read."""
        reading = self._under_way[effect.request]
        places = reading.requested[effect.server]
        if is_all(places, reading.ids):
            reading.clocks.fill_(effect.clock)
            reading.rows = None if reading.rows is None else unpacked.together
            return
        reading.clocks.index_fill_(0, places, effect.clock)
        if reading.rows is not None:
            self.sharding.ops.scatter(reading.rows, places, unpacked.together)

    def finish(self, done: ReadDone) -> None:
        """End a read."""
        reading = self._under_way.pop(done.request, None)
        if reading is not None:
            reading.started.end(done)

    def abandon(self, error: PacelineError) -> None:
        """End all reads with an error."""
        while self._under_way:
            _, reading = self._under_way.popitem()
            reading.started.end(None, error)


class RowPushPart(msgspec.Struct, frozen=True):
    """One server's part of a push: ids (n,), encoded rows uint8 (n, bytes a row), echoes (n, echo width)."""

    ids: Tensor
    encoded: Tensor
    echo: Tensor | None
    hyper: tuple[Hyper, ...]


@dataclass(slots=True)
class RowPush:
    """One push from the user's call to the last server's answer.

    `kept` are parts that are applied, and that servers would lack which go on in the place of those that have them.
    """

    state: RowTableState
    parts: dict[int, RowPushPart]  # by server. Invariant: exactly those that have not answered
    count: float
    expected: float
    ids: Tensor  # of all parts
    push: Push
    change: KeptChange | None = None  # how it changed what filters keep back
    future: Future[PushOutcome] = field(default_factory=lambda: pending_future(PushOutcome))
    answers: Answers = field(default_factory=Answers)
    kept: dict[int, RowPushPart] = field(default_factory=dict[int, RowPushPart])

    def frame(self, server: int, *, bare: bool, with_ids: bool = False) -> tuple[RowPushFrame, memoryview]:
        """Return a server's part and its body; `bare` without rows, `with_ids` with ids even if it should know them."""
        part = self.parts[server] if server in self.parts else self.kept[server]
        if bare:
            keys = Keys(len(part.ids), b"", sent=False)
            return RowPushFrame(self.push, self.count, part.hyper, keys, self.expected), EMPTY
        keys = self.state.keys(server, part.ids, sent=with_ids)
        body = self.state.up.pack(part.ids if keys.sent else None, part.encoded, part.echo)
        key_bytes = ID_BYTES * keys.num if keys.sent else 0
        self.state.traffic += RowTraffic(pushed=WireBytes(1, key_bytes, len(keys.digest), len(body) - key_bytes))
        return RowPushFrame(self.push, self.count, part.hyper, keys, self.expected), body


@dataclass(slots=True)
class RowPushes:
    """The pushes of a row table in flight. Used under the lock of the worker node.

    `held`: servers hold pushes until their clock is complete. `keeps`: parts that are applied are kept until `drop`.
    """

    held: bool
    keeps: bool = False
    _under_way: dict[PushId, RowPush] = field(default_factory=dict[PushId, RowPush])
    _kept: dict[PushId, RowPush] = field(default_factory=dict[PushId, RowPush])  # those with parts that are kept
    _counts: ClockCounts = field(default_factory=ClockCounts)

    def __len__(self) -> int:
        """Count the pushes in flight."""
        return len(self._under_way)

    def num_held(self, clock: int) -> int:
        """Count the pushes that servers hold until this clock is complete."""
        return self._counts.of_clock(clock) if self.held else 0

    def add(self, push: RowPush) -> None:
        """Add a push that is about to be sent."""
        self._under_way[push.push.id] = push
        self._counts.add(push.push)

    def part(self, server: int, push: Push, *, bare: bool) -> tuple[RowPushFrame, memoryview] | None:
        """Return a server's part of a push and its body, None if the server has answered already."""
        found = self._under_way.get(push.id)
        if found is None or server not in found.parts:
            found = self._kept.get(push.id)
            return None if found is None or server not in found.kept else found.frame(server, bare=False, with_ids=True)
        return found.frame(server, bare=bare)

    def resend_with_ids(self, server: int, seq: int, send: SendFrame) -> None:
        """Send a server its part again with its ids, which it does not keep any more."""
        for push_id, push in [*self._under_way.items(), *self._kept.items()]:
            if push_id.seq == seq and (server in push.parts or server in push.kept):
                send(server, *push.frame(server, bare=False, with_ids=True))
                return

    def release(self, effect: Release) -> RowPush | None:
        """Note the answer of a server; return the push once all have answered."""
        push = self._under_way.get(effect.id)
        if push is None:
            return None
        part = push.parts.pop(effect.server, None)
        if self.keeps and not effect.refused and part is not None:
            push.kept[effect.server] = part
            self._kept[effect.id] = push
        push.answers.note(effect)
        if push.parts:
            return None
        self._counts.remove(push.push)
        return self._under_way.pop(effect.id)

    def drop(self, effect: Drop) -> None:
        """Forget a part that was kept."""
        push = self._kept.get(effect.id)
        if push is not None:
            push.kept.pop(effect.server, None)
            if not push.kept:
                del self._kept[effect.id]

    def abandon(self, error: PacelineError) -> None:
        """End all pushes with an error: whether they were applied is unknown."""
        while self._under_way:
            _, push = self._under_way.popitem()
            push.future.set_exception(error)
        self._kept.clear()
        self._counts = ClockCounts()
