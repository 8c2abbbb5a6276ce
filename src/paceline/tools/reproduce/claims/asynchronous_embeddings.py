"""Claim 29: embeddings may be updated asynchronously if the dense part stays synchronous."""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.clicks import (
    Clicks,
    FactorGradient,
    FactorModel,
    apply_dense,
    apply_rows,
    area_under_curve,
    gradient,
    score,
)

_DELAYS: Final = (0, 2, 4, 8, 16)
_WORKERS: Final = 8
_BATCH: Final = 250
_EPOCHS: Final = 12
_RATE: Final = 20.0
_GAP: Final = 0.005


def _run(options: ClaimOptions) -> Finding:
    seeds = range(options.seed, options.seed + (1 if options.is_quick else 4))
    clicks = [Clicks.make(seed) for seed in seeds]
    rows = {delay: float(np.mean([_area(each, delay, 0) for each in clicks])) for delay in _DELAYS}
    both = {delay: float(np.mean([_area(each, delay, delay) for each in clicks])) for delay in _DELAYS}
    exact, bounded = rows[0], rows[4]
    delays = tuple(map(float, _DELAYS))
    return Finding(
        (
            Check(
                "AUC: embeddings up to 4 clocks late beside all in step",
                f"gap at most {_GAP}",
                f"{bounded:.4f}, {exact:.4f}",
                exact - bounded <= _GAP,
            ),
        ),
        (
            Plot(
                "Held-out AUC by how late updates are",
                "clocks that an update is late, at most",
                "AUC",
                (
                    Curve("embeddings late, dense part in step", delays, tuple(rows.values())),
                    Curve("everything late", delays, tuple(both.values())),
                ),
                is_log_x=True,
            ),
        ),
        f"Made-up clicks of 2000 users on 500 items; {_WORKERS} workers, a clock is one batch of {_BATCH} on each. "
        "Late updates are applied after a number of clocks drawn evenly up "
        "to the bound. The dense part is synchronous in one curve and as late as the embeddings in the other.",
    )


def _area(clicks: Clicks, rows_delay: int, dense_delay: int) -> float:
    """Train with late updates and return the AUC on held-out clicks."""
    random = np.random.default_rng(0)
    model = FactorModel.make(clicks.num_users, clicks.num_items)
    late_rows: deque[tuple[int, FactorGradient]] = deque()
    late_dense: deque[tuple[int, FactorGradient]] = deque()
    starts = [start for _ in range(_EPOCHS) for start in range(0, clicks.trained.stop, _BATCH)]
    for number, start in enumerate(starts):
        clock = number // _WORKERS
        chosen = slice(start, start + _BATCH)
        change = gradient(model, clicks.users[chosen], clicks.items[chosen], clicks.clicked[chosen])
        late_rows.append((clock + int(random.integers(rows_delay + 1)), change))
        late_dense.append((clock + int(random.integers(dense_delay + 1)), change))
        if (number + 1) % _WORKERS == 0:
            late_rows = _apply_due(model, late_rows, clock, is_dense=False)
            late_dense = _apply_due(model, late_dense, clock, is_dense=True)
    held = clicks.held_out
    return area_under_curve(score(model, clicks.users[held], clicks.items[held]), clicks.clicked[held])


def _apply_due(
    model: FactorModel, late: deque[tuple[int, FactorGradient]], clock: int, *, is_dense: bool
) -> deque[tuple[int, FactorGradient]]:
    """Apply the updates that are due, and return the others."""
    for due, change in late:
        if due <= clock:
            (apply_dense if is_dense else apply_rows)(model, change, _RATE)
    return deque(each for each in late if each[0] > clock)


CLAIM: Final = Claim(
    "29",
    "Asynchronous embeddings beside a synchronous dense part keep the AUC",
    "Lian et al. 2022 (Persia)",
    "the AUC gap is small",
    "virtual",
    (0.4, 1.2),
    _run,
)
