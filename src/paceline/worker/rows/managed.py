"""Managed communication: settings under which a worker sums its pushes of rows, and sends them within a budget."""

from __future__ import annotations

import math
from typing import Final, get_args

import msgspec

from paceline.core.calls import checked
from paceline.core.consistency import Consistency, Deferral
from paceline.errors import UsageError
from paceline.update.filters.check import CODECS
from paceline.update.rows.pending import Priority
from paceline.update.rows.spec import RowTableSpec

# Two bursts may go at once, see `SendRate`. While each takes a hundredth of a second, no second carries more than 2 %
# above the budget. Below some bytes headers would weigh too much: small budgets are kept within longer windows.
_BURST_S: Final = 0.01
_LEAST_BURST_BYTES: Final = 4000
_ALLOWED_FILTERS: Final = (*CODECS, "key_cache")  # those that send all they are given


class Managed(msgspec.Struct, frozen=True):
    """Settings of managed communication of one worker and one row table; made by `managed`."""

    budget_mbps: float
    priority: Priority = "relative_magnitude"
    hold: int | None = None
    chunk_kb: float = 100.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Validate the settings."""
        for name, number in (("budget_mbps", self.budget_mbps), ("chunk_kb", self.chunk_kb)):
            if not (math.isfinite(number) and number > 0):
                raise UsageError(f"Managed communication: {name} is {number}, expected a finite number above 0.")
        if self.priority not in get_args(Priority):
            choices = ", ".join(get_args(Priority))
            raise UsageError(f"Managed communication: priority is '{self.priority}', expected one of {choices}.")
        if self.hold is not None and self.hold < 0:
            raise UsageError(f"Managed communication: hold is {self.hold}, expected 0 or more clocks.")

    def deferral(self, spec: RowTableSpec, *, sums: bool) -> Deferral:
        """Return how long updates of a table wait; without a `hold` half of what its reads allow.

        Args:
            spec: of the table.
            sums: whether its rule may be given the sum of several pushes in place of these.

        Raises:
            UsageError: the table leaves no room for waiting, or less than `hold`, or a filter chooses what goes when.
        """
        table, consistency = spec.name, Consistency.parse(spec.consistency)
        choosing = [each.name for each in spec.filters if each.name not in _ALLOWED_FILTERS]
        if choosing:
            raise UsageError(
                f"table '{table}': filter {choosing[0]} and managed communication would both choose what is sent when. "
                "Leave out one of them."
            )
        bound = consistency.bound
        if not bound or consistency.lowest is not None or consistency.visible != "on_arrival":
            raise UsageError(
                f"table '{table}': managed communication lets updates wait, which '{consistency}' does not allow. Give "
                "it a staleness bound of 1 or more: consistency='ssp:2' or 'essp:2', for example."
            )
        if not sums:
            raise UsageError(
                f"table '{table}': managed communication sums pushes before they are sent, for which the rule "
                f"{spec.rule.name} has to add: take update.Add(), or update.SGD without momentum and weight decay."
            )
        hold = self.clocks_held(consistency)
        if hold > bound:
            raise UsageError(
                f"table '{table}': updates would be held for {hold} clocks, but '{consistency}' promises reads that "
                f"lack the last {bound} at most. Lower hold, or raise the bound."
            )
        return Deferral(consistency, hold)

    def clocks_held(self, consistency: Consistency) -> int:
        """Return for how many clocks updates of a table may wait: all its workers have to say the same.

        >>> managed(1.0).clocks_held(Consistency.parse("ssp:5")), managed(1.0, hold=1).clocks_held(Consistency(5))
        (2, 1)
        """
        return (consistency.bound or 0) // 2 if self.hold is None else self.hold

    @property
    def bytes_per_s(self) -> float:
        """The budget in bytes."""
        return self.budget_mbps * 1e6 / 8

    @property
    def burst_bytes(self) -> float:
        """The largest number of bytes sent at a time."""
        return min(self.chunk_kb * 1000, max(_LEAST_BURST_BYTES, self.bytes_per_s * _BURST_S))


@checked
def managed(
    budget_mbps: float,
    *,
    priority: Priority = "relative_magnitude",
    hold: int | None = None,
    chunk_kb: float = 100.0,
    seed: int = 0,
) -> Managed:
    """Let this worker sum its pushes to a row table, and send them within a clock as far as a budget allows.

    For tables whose rule adds (`Add`, plain `SGD`) under a staleness bound of 1 or more. What is sent first is what
    changes most, so that other workers see it soon. What has waited `hold` clocks goes before the clock is finished:
    half of the budget is for that, and where this is not enough `clock` blocks until the rest is sent. Each worker may
    choose for itself, but for `hold`, which all workers of a table must give alike.

    Args:
        budget_mbps: what this worker may send for the table, in millions of bits a second, headers included; from
            3.2 Mbit/s on, no second carries 2 % more (below, no window that is long enough for 400 kB). Reads are not
            held up, but what they send counts.
        priority: "relative_magnitude" sends rows first whose numbers have changed most against their values, "fifo"
            those that wait longest, "random" any.
        hold: for how many clocks an update may wait; by default half of the staleness bound. Reads keep the table's
            promise: they wait for others as under a bound that is smaller by `hold`, so a worker that opens the table
            with another one, or without this, is refused.
        chunk_kb: what is sent at a time, in thousands of bytes; never more than the budget carries in 10 ms, or 4 kB.
        seed: of the draws of "random".

    Raises:
        UsageError: a number is out of range.

    Example:
        >>> import paceline
        >>> with paceline.connect() as ps:
        ...     items = ps.table(
        ...         "items",
        ...         rows=2,
        ...         update=paceline.update.Add(),
        ...         consistency="ssp:4",
        ...         communication=paceline.managed(budget_mbps=10),
        ...     )
        ...     for _ in range(3):
        ...         _ = items.push([7], [[1.0, 0.5]])
        ...         _ = ps.clock()
        ...     items.pull([7])  # own pushes are there at once
        tensor([[3.0000, 1.5000]])
    """
    return Managed(budget_mbps, priority, hold, chunk_kb, seed)
