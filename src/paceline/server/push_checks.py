"""Checks of a push: sample counts and hyperparameters, and whether workers push the same gradients.

They do when each trains on all samples instead of a shard. Only the first clocks of a table are checked for that, and
only a sample of each gradient, so it costs nothing later.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Final

import torch
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.core.messages import Push
from paceline.notices import SHARD_ADVICE, tell
from paceline.update.clipping import without_clip
from paceline.update.hyper_checks import pushed_problem
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import TableSpec
from paceline.wire.messages import PushFrame, RowPushFrame


def push_problem(spec: TableSpec | RowTableSpec, frame: PushFrame | RowPushFrame) -> str:
    """Return why the sample counts or the hyperparameters of a push are invalid, "" if they are valid."""
    for count in (frame.count, frame.expected):
        if not (isfinite(count) and count >= 0):
            return f"it stands for {count} samples, expected a number >= 0"
    hyper = frame.hyper
    if isinstance(spec, TableSpec):
        hyper, max_norm = without_clip(hyper)
        if max_norm is not None and (problem := _clip_problem(spec, max_norm)):
            return problem
    return pushed_problem(spec, hyper)


def _clip_problem(spec: TableSpec, max_norm: float) -> str:
    """Return why an update cannot be clipped to this norm, "" if it can."""
    if not 0 < max_norm < inf:
        return f"its update is to be clipped to a norm of {max_norm}, expected a number > 0"
    if spec.scale != "samples" or not Consistency.parse(spec.consistency).lockstep:
        return f"its update is to be clipped, but '{spec.name}' has {spec.consistency} and scale {spec.scale!r}"
    if spec.rule.quorum is not None:
        return f"its update is to be clipped, but '{spec.name}' keeps pushes until a quorum of them has come"
    return ""


CLOCKS: Final = 4  # of a table that are checked: those with the first pushes, which may lie far apart
_SAMPLES: Final = 4096  # numbers of a gradient that are checked
_MAX_WORKERS: Final = 64
# Gradients with fewer different numbers may be alike by chance, or on purpose: counts, ones, a single weight.
_FEWEST: Final = 8
# Where updates are visible on arrival, workers read the same values in their first clock only, so one match has to be
# enough.
_FEWEST_AT_ONCE: Final = 16


@dataclass(slots=True)
class _Watched:
    """The digests of one table."""

    held: bool  # updates show clock by clock: all workers read the same values in a clock
    # By clock and worker. Invariant: 0 for a gradient that proves nothing.
    digests: dict[int, dict[int, int]] = field(default_factory=dict[int, dict[int, int]])

    def compare(self, worker: int, clock: int, gradient: Tensor) -> tuple[int, list[int]] | None:
        """Add a push; return another worker with the same gradients, and the clocks that show it, once certain."""
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
        """Return a clock in which both pushed another gradient alike: one that never changes may be intended."""
        clocks = (
            clock
            for clock, found in self.digests.items()
            if found.get(worker, 0) not in (0, now) and found.get(worker) == found.get(other)
        )
        return list(clocks)[:1]


@dataclass(slots=True)
class SameGradients:
    """Warns once, through `tell`, when workers push the same gradients."""

    tell: Callable[[str], None] = tell
    _tables: dict[str, _Watched] = field(default_factory=dict[str, _Watched])
    _is_told: bool = False

    def watch(self, table: str, consistency: Consistency) -> None:
        """Start to check the first pushes of a table."""
        if not self._is_told:
            self._tables[table] = _Watched(consistency.visible == "on_clock")

    def note(self, push: Push, gradient: Tensor) -> float:
        """Add a push of (elements here,), and warn if it equals that of another worker.

        Return the last clock of which pushes of this table are to be noted.
        """
        watched = self._tables.get(push.table)
        if watched is None:
            return -inf
        if push.clock in watched.digests or len(watched.digests) < CLOCKS:
            seen = watched.compare(push.id.worker, push.clock, gradient)
            if seen is not None:
                self._warn(push, *seen)
        return max(watched.digests) if len(watched.digests) == CLOCKS else inf

    def _warn(self, push: Push, other: int, clocks: list[int]) -> None:
        first, second = sorted((other, push.id.worker))
        when = f"clock {clocks[0]}" if len(clocks) == 1 else f"clocks {clocks[0]} and {clocks[1]}"
        self._is_told = True
        self._tables.clear()
        self.tell(
            f"workers {first} and {second} pushed the same gradient of table '{push.table}' at {when}: {SHARD_ADVICE}"
        )


def _digest(gradient: Tensor, fewest: int) -> int:
    """Return a digest of a gradient; 0 if it has fewer than `fewest` distinct nonzero numbers."""
    sample = gradient[:: max(1, gradient.numel() // _SAMPLES)].contiguous()
    telling = sample[sample.isfinite() & (sample != 0)]
    if len(telling.double().unique()) < fewest:
        return 0
    return zlib.crc32(sample.view(torch.uint8).numpy().tobytes()) or 1
