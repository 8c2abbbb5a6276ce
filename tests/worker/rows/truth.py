"""What reads of row tables may show: every push leaves its mark in the value itself.

The k-th push of worker p to a row adds 4^k to number p of that row. So a value tells which pushes it contains, and a
push that counts twice shows as the digit 2.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.update.named_rules import Add
from paceline.update.rows.spec import FilterSpec, RowTableSpec

MOST = 25  # pushes of one worker to one row: more have no place in a float64


def spec_of(consistency: Consistency, width: int, filters: tuple[FilterSpec, ...] = ()) -> RowTableSpec:
    return RowTableSpec("t", width, "float64", Add(), str(consistency), "sum", "reject", filters=filters)


@dataclass
class Truth:
    """All pushes that were made: (worker, row) -> the clock of each."""

    consistency: Consistency
    num_workers: int
    made: dict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    dead: set[int] = field(default_factory=set)

    def rows_for(self, worker: int, clock: int, ids: list[int]) -> tuple[list[int], Tensor]:
        """Return what a worker may push to these rows now: those with room, and their marks."""
        ids = [i for i in dict.fromkeys(ids) if len(self.made[worker, i]) < MOST]
        rows = torch.zeros(len(ids), self.num_workers, dtype=torch.float64)
        for place, row in enumerate(ids):
            rows[place, worker] = 4.0 ** len(self.made[worker, row])
            self.made[worker, row].append(clock)
        return ids, rows

    def check(
        self, worker: int, needs: int, now: int, ids: Tensor, rows: Tensor, clocks: Tensor, *, own_writes: bool
    ) -> None:
        """Check a read that began with these needs and whose rows are used at clock `now`."""
        for row, values, clock in zip(ids.tolist(), rows.tolist(), clocks.tolist(), strict=True):
            assert clock >= needs, f"row {row} of clock {clock}, needed {needs}"
            for other in range(self.num_workers):
                self.check_part(worker, other, row, values[other], clock, now, own_writes=own_writes)

    def check_part(
        self, worker: int, other: int, row: int, value: float, clock: int, now: int, *, own_writes: bool
    ) -> None:
        seen, made = digits(value), self.made[other, row]
        where = f"worker {worker} at clock {now} reads row {row} of clock {clock}: of worker {other} it has {seen}"
        assert set(seen) <= {0, 1}, f"{where}: a push counts twice"
        assert len(seen) <= len(made), f"{where}, which made {made}"
        has = [bool(k < len(seen) and seen[k]) for k in range(len(made))]
        if other not in self.dead:
            missing = [k for k, at in enumerate(made) if at < clock and not has[k]]
            assert not missing, f"{where}, which made {made}: {missing} are missing"
        if self.consistency.visible == "on_clock":
            early = [k for k, at in enumerate(made) if at >= max(clock, now) and has[k]]
            assert not early, f"{where}, which made {made}: {early} are of clocks that are not complete"
        elif own_writes and other == worker:
            assert all(has), f"{where}, which made {made}: an own push is lost"

    def final(self, row: int) -> list[float]:
        """Return the row with all pushes in it."""
        return [sum(4.0**k for k in range(len(self.made[worker, row]))) for worker in range(self.num_workers)]


def digits(value: float) -> list[int]:
    """Return the digits of a number to the base 4, the lowest first."""
    number, found = int(value), list[int]()
    while number:
        number, digit = divmod(number, 4)
        found.append(digit)
    return found
