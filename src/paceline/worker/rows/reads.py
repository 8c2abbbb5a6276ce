"""Reads of rows in flight: the rows requested from each server, and those that have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.effects import Install, ReadDone
from paceline.core.events import WantRows
from paceline.errors import PacelineError
from paceline.update.rows.sharding import RowSharding
from paceline.wire.row_codec import RowBody
from paceline.worker.pushes import pending_future
from paceline.worker.rows.cache import UNKNOWN
from paceline.worker.rows.state import RowTableState


@dataclass(slots=True)
class RowReadInFlight:
    """One read.

    Attributes:
        table: which one.
        needs: rows must contain every update below this clock.
        ids: (n,) distinct.
        asked: by server, the positions in `ids` of the rows that it sends, as an answer or in deliveries.
        rows: (n, width), filled from the cache and as answers arrive; None if the rows are read from the cache when the
            read is finished, with own pushes made until then.
        clocks: (n,), of each row in `rows`: it contains every update below.
        future: ends when all rows have arrived.
    """

    table: str
    needs: int
    ids: Tensor
    rows: Tensor | None
    clocks: Tensor
    asked: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    future: Future[ReadDone] = field(default_factory=lambda: pending_future(ReadDone))

    def ids_for(self, server: int) -> Tensor:
        """Return the ids requested from a server."""
        return self.ids[self.asked[server]]

    def holds(self, rows: Tensor) -> bool:
        """Return whether these rows share the memory of this read."""
        return self.rows is not None and rows.untyped_storage().data_ptr() == self.rows.untyped_storage().data_ptr()

    def ids_not_of(self, servers: Sequence[int]) -> Tensor:
        """Return the ids requested from none of these servers."""
        kept = torch.ones(len(self.ids), dtype=torch.bool)
        for server in servers:
            kept[self.asked[server]] = False
        return self.ids[kept]


@dataclass(slots=True)
class RowReadsInFlight:
    """The reads of a table by request. Used under the lock of the worker node."""

    sharding: RowSharding
    _under_way: dict[int, RowReadInFlight] = field(default_factory=dict[int, RowReadInFlight])

    def plan(
        self, state: RowTableState, ids: Tensor, needs: int, delivered: list[int], *, refresh: bool
    ) -> tuple[RowReadInFlight, WantRows]:
        """Return a read of distinct ids, and its event for the core: which servers to request rows from.

        Requested are rows that are not cached, or not fresh enough.

        Args:
            state: of the table.
            ids: (n,) distinct.
            needs: as of `RowReadInFlight`.
            delivered: by server, the clock that its deliveries have reached.
            refresh: request every row.
        """
        cache = state.cache
        rows: Tensor | None = None
        clocks = torch.full((len(ids),), UNKNOWN)
        if state.reads_are_fixed and cache is not None:
            rows, clocks = cache.read(ids)[0], cache.clocks(ids)
        elif cache is None:
            rows = torch.empty((len(ids), state.down.full_width), dtype=state.down.dtype)
        reading = RowReadInFlight(state.spec.name, needs, ids, rows, clocks)
        order, counts = self.sharding.split(ids)
        fetch: list[int] = []
        deliver: list[int] = []
        for server, places in enumerate(order.split(counts)):
            brought = False
            if cache is not None and not refresh:
                clocks = cache.clocks(ids[places])
                lacking = clocks < (needs if delivered[server] < needs else 0)
                places = places[lacking]
                brought = state.is_delivered and bool((clocks[lacking] > UNKNOWN).all())
            if len(places):
                reading.asked[server] = places
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

    def install(self, effect: Install, parcel: RowBody) -> Tensor:
        """Store the answer of a server to a read; return the ids that it contains."""
        reading = self._under_way[effect.request]
        places = reading.asked[effect.server]
        reading.clocks[places] = effect.clock
        if reading.rows is not None and len(places) == len(reading.ids) and self.sharding.num_servers == 1:
            reading.rows = parcel.together  # all of them, in the order of the ids
        elif reading.rows is not None:
            self.sharding.ops.scatter(reading.rows, places, parcel.together)
        return reading.ids[places]

    def finish(self, done: ReadDone) -> None:
        """End a read."""
        reading = self._under_way.pop(done.request, None)
        if reading is not None:
            reading.future.set_result(done)

    def abandon(self, error: PacelineError) -> None:
        """End all reads with an error."""
        while self._under_way:
            _, reading = self._under_way.popitem()
            reading.future.set_exception(error)
