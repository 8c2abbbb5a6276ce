"""The rows that a worker has read from its cache: servers are told, where they decide by use which rows go."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.node.rows.owners import Owners

_MOST_PIECES = 64  # of ids, before they are made one


@dataclass(slots=True)
class CacheUses:
    """Which rows were read from the cache, clock by clock, until their servers know it.

    A report of a clock is sent again with every repetition of the tick that ends it, and dropped when a server has
    answered that tick. Used under the lock of the worker node.
    """

    owners: Owners
    _read: list[Tensor] = field(default_factory=list[Tensor])  # since the clock began
    # By server: (clock, distinct ids) of what it has yet to confirm, in ascending order of clocks.
    _reports: dict[int, list[tuple[int, Tensor]]] = field(default_factory=dict[int, list[tuple[int, Tensor]]])

    def note(self, ids: Tensor) -> None:
        """Note a read of these rows, each once, from the cache."""
        if len(ids):
            self._read.append(ids)
        if len(self._read) > _MOST_PIECES:
            self._read = [self._distinct()]

    def end_clock(self, clock: int) -> None:
        """Make the reports of a clock; each row is in them once, however often it was read."""
        ids, self._read = self._distinct(), []
        order, counts = self.owners.split(ids)
        for server, places in enumerate(order.split(counts)):
            if len(places):
                self._reports.setdefault(server, []).append((clock, ids[places]))

    def reports(self, server: int, clock: int) -> list[tuple[int, Tensor]]:
        """Return the reports for a server of the clocks below this one, oldest first."""
        return [report for report in self._reports.get(server, ()) if report[0] < clock]

    def confirmed(self, server: int, clock: int) -> None:
        """Note that a server knows all clocks below this one, and with them their reports."""
        if server in self._reports:
            self._reports[server] = [report for report in self._reports[server] if report[0] >= clock]

    @property
    def num_unconfirmed(self) -> int:
        """The most reports that a server has yet to confirm."""
        return max((len(reports) for reports in self._reports.values()), default=0)

    def _distinct(self) -> Tensor:
        if not self._read:
            return torch.empty(0, dtype=torch.int64)
        return self.owners.ops.unique(torch.cat(self._read))[0]
