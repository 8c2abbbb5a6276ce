"""Reads of rows in flight: the rows requested from each server, and those that have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.effects import InstallRows, ReadDone
from paceline.core.events import WantRows
from paceline.errors import PacelineError
from paceline.update.rows.sharding import RowSharding
from paceline.wire.row_codec import RowBody
from paceline.worker.pushes import pending_future
from paceline.worker.rows.cache import UNKNOWN
from paceline.worker.rows.opened import OpenedRows


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
    """Reads by request. Used under the lock of the worker node."""

    sharding: RowSharding
    _open: dict[int, RowReadInFlight] = field(default_factory=dict[int, RowReadInFlight])

    def plan(
        self, opened: OpenedRows, ids: Tensor, needs: int, delivered: list[int], *, refresh: bool
    ) -> tuple[RowReadInFlight, WantRows]:
        """Return a read of distinct ids, and its event for the core: which servers to request rows from.

        Requested are rows that are not cached, or not fresh enough.

        Args:
            opened: the table.
            ids: (n,) distinct.
            needs: as of `RowReadInFlight`.
            delivered: by server, the clock that its deliveries have reached.
            refresh: request every row.
        """
        cache = opened.cache
        rows: Tensor | None = None
        clocks = torch.full((len(ids),), UNKNOWN)
        if opened.reads_are_fixed and cache is not None:
            rows, clocks = cache.read(ids)[0], cache.clocks(ids)
        elif cache is None:
            rows = torch.empty((len(ids), opened.down.full_width), dtype=opened.down.dtype)
        reading = RowReadInFlight(opened.spec.name, needs, ids, rows, clocks)
        order, counts = self.sharding.split(ids)
        fetch: list[int] = []
        deliver: list[int] = []
        for server, places in enumerate(order.split(counts)):
            brought = False
            if cache is not None and not refresh:
                clocks = cache.clocks(ids[places])
                lacking = clocks < (needs if delivered[server] < needs else 0)
                places = places[lacking]
                brought = opened.is_delivered and bool((clocks[lacking] > UNKNOWN).all())
            if len(places):
                reading.asked[server] = places
                (deliver if brought else fetch).append(server)
        return reading, WantRows(opened.spec.name, needs, tuple(fetch), tuple(deliver))

    def add(self, request: int, reading: RowReadInFlight) -> None:
        """Add a read."""
        self._open[request] = reading

    def count(self, table: str) -> int:
        """Count the reads of a table in flight."""
        return sum(reading.table == table for reading in self._open.values())

    def ids_of(self, table: str) -> Tensor:
        """Return the ids of all reads of a table in flight; they may repeat."""
        none = torch.empty(0, dtype=torch.int64)
        return torch.cat([none, *(reading.ids for reading in self._open.values() if reading.table == table)])

    def get(self, request: int) -> RowReadInFlight | None:
        """Return a read in flight, None if it has ended."""
        return self._open.get(request)

    def install(self, effect: InstallRows, parcel: RowBody) -> Tensor:
        """Store the answer of a server to a read; return the ids that it contains."""
        reading = self._open[effect.request]
        places = reading.asked[effect.server]
        reading.clocks[places] = effect.clock
        if reading.rows is not None and len(places) == len(reading.ids) and self.sharding.num_servers == 1:
            reading.rows = parcel.together  # all of them, in the order of the ids
        elif reading.rows is not None:
            self.sharding.ops.scatter(reading.rows, places, parcel.together)
        return reading.ids[places]

    def finish(self, done: ReadDone) -> bool:
        """End a read; return whether it is one of these."""
        reading = self._open.pop(done.request, None)
        if reading is not None:
            reading.future.set_result(done)
        return reading is not None

    def abandon(self, error: PacelineError) -> None:
        """End all reads with an error."""
        while self._open:
            _, reading = self._open.popitem()
            reading.future.set_exception(error)
