"""Sees that workers push the same gradients, as happens when each trains on all samples instead of a part of them.

Only the first clocks of a table are looked at, and of a gradient only some numbers, so that it costs nothing later.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.core.messages import Push
from paceline.observe.notices import tell

CLOCKS: Final = 4  # of a table that are looked at
_SAMPLES: Final = 4096  # numbers of a gradient that are looked at
_MAX_WORKERS: Final = 64
# Gradients with fewer different numbers may be alike by chance, or on purpose: counts, ones, a single weight.
_FEWEST: Final = 8
# Where updates show on arrival, workers have the same values in their first clock only. What is seen once has to be
# beyond doubt.
_FEWEST_AT_ONCE: Final = 16


@dataclass(slots=True)
class _Watched:
    """The digests of one table."""

    held: bool  # workers read the same values in each clock
    first: int = -1  # clock
    # By clock and worker. Invariant: 0 for a gradient that proves nothing.
    digests: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])

    def look(self, worker: int, clock: int, gradient: Tensor) -> tuple[int, list[int]] | None:
        """Take in a push; return another worker that pushes the same, and the clocks that show it, once they do."""
        self.first = clock if self.first < 0 else self.first
        if not self.first <= clock < self.first + CLOCKS:
            return None
        found = self.digests.setdefault(clock, {})
        if worker in found or len(found) == _MAX_WORKERS:
            return None
        own = found[worker] = _digest(gradient, _FEWEST if self.held else _FEWEST_AT_ONCE)
        for other, digest in found.items():
            if other != worker and own and digest == own:
                clocks = [clock, *self._earlier(worker, other, own)]
                if len(clocks) > 1 or not self.held:
                    return other, sorted(clocks)
        return None

    def _earlier(self, worker: int, other: int, now: int) -> list[int]:
        """Return clocks in which two workers pushed the same, but not the same as now: what never changes is meant."""
        clocks = (
            clock
            for clock, found in self.digests.items()
            if found.get(worker, 0) not in (0, now) and found.get(worker) == found.get(other)
        )
        return list(clocks)[:1]


@dataclass(slots=True)
class SameGradients:
    """What one server sees of workers that push the same; it is told once, for the first table."""

    tell: Callable[[str], None] = tell
    _tables: dict[str, _Watched] = field(default_factory=dict[str, _Watched])
    _is_told: bool = False

    def watch(self, table: str, consistency: Consistency) -> None:
        """Look at the first pushes of a table."""
        if not self._is_told:
            self._tables[table] = _Watched(consistency.visible == "on_clock")

    def note(self, push: Push, gradient: Tensor) -> None:
        """Take in a push of (elements here,), and tell if it is the same as that of another worker."""
        watched = self._tables.get(push.table)
        seen = None if watched is None else watched.look(push.id.worker, push.clock, gradient)
        if seen is None:
            return
        other, clocks = seen
        first, second = sorted((other, push.id.worker))
        when = f"clock {clocks[0]}" if len(clocks) == 1 else f"clocks {clocks[0]} and {clocks[1]}"
        self._is_told = True
        self._tables.clear()
        self.tell(
            f"workers {first} and {second} pushed the same gradient of table '{push.table}' at {when}: did the script "
            "forget paceline.shard(loader)? Workers that train on the same samples learn no more than one of them."
        )


def _digest(gradient: Tensor, fewest: int) -> int:
    """Return a number that is the same for the same gradient; 0 if it has fewer different numbers beside zero."""
    sample = gradient[:: max(1, gradient.numel() // _SAMPLES)].contiguous()
    telling = sample[sample.isfinite() & (sample != 0)]
    if len(telling.double().unique()) < fewest:
        return 0
    return zlib.crc32(sample.view(torch.uint8).numpy().tobytes()) or 1
