"""Claim 30: ids that share a row cost accuracy, and a filter of rare ids bounds the memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import torch

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.clicks import Clicks, area_under_curve, score, train
from paceline.update.named_rules import Add
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.ops import row_ops
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import Lifecycle, RowTableSpec
from paceline.update.rows.store import RowStore

_SHARES: Final = (1.0, 0.5, 0.25, 0.125, 0.0625)  # rows of the hashed table, beside the ids that there are
_ADMIT_AFTER: Final = 3


def _run(options: ClaimOptions) -> Finding:
    exact, hashed, collided = _measure(options)
    best, by_share = float(np.mean(exact)), {share: float(np.mean(found)) for share, found in hashed.items()}
    small, kept = by_share[_SHARES[-1]], _rows_kept(options.seed)
    places = tuple(100 * share for share in _SHARES)
    return Finding(
        (
            Check(
                "AUC, a row for each id, beside a table of 1/16 of the rows",
                "higher by 0.01 or more",
                f"{best:.4f}, {small:.4f}",
                best - small >= 0.01,
            ),
            Check(
                "AUC by the size of the hashed table",
                "falls with the size, within 0.002",
                ", ".join(f"{by_share[share]:.3f}" for share in _SHARES),
                all(by_share[b] <= by_share[a] + 0.002 for a, b in pairwise(_SHARES)),
            ),
            Check(
                f"rows kept when an id is admitted at its push number {_ADMIT_AFTER}",
                "less than half of the ids",
                f"{kept:.0%}",
                kept < 0.5,
            ),
        ),
        (
            Plot(
                "What collisions cost",
                "rows of the table, % of the ids",
                "AUC, held-out clicks",
                (
                    Curve("ids modulo the rows", places, tuple(by_share.values())),
                    Curve("a row for each id", places, (best,) * len(places), is_reference=True),
                ),
                is_log_x=True,
            ),
            Plot(
                "Ids that share a row",
                "rows of the table, % of the ids",
                "share of the ids",
                (Curve("shared", places, tuple(float(np.mean(collided[share])) for share in _SHARES)),),
                is_log_x=True,
                y_range=(0, 1),
            ),
        ),
        "Made-up clicks of 2000 users on 500 items whose tastes have 4 factors, popular ones more often (Zipf); "
        "embeddings by plain descent on one worker. Paceline's tables have "
        "a row for each 64-bit id. The filter is that of a server's table (Lifecycle admit_after), fed with ids as "
        "often as Zipf's law says.",
    )


def _measure(options: ClaimOptions) -> tuple[list[float], dict[float, list[float]], dict[float, list[float]]]:
    """Return the areas with a row for each id, those of hashed tables, and the parts of ids that share a row."""
    seeds = range(options.seed, options.seed + (2 if options.is_quick else 6))
    exact, hashed = list[float](), {share: list[float]() for share in _SHARES}
    collided = {share: list[float]() for share in _SHARES}
    for seed in seeds:
        clicks = Clicks.make(seed)
        exact.append(_area(clicks, clicks.users, clicks.items, clicks.num_users, clicks.num_items))
        for share in _SHARES:
            users, user_part = _hash(clicks.users, clicks.num_users, share, seed)
            items, item_part = _hash(clicks.items, clicks.num_items, share, seed + 1)
            rows = (int(clicks.num_users * share), int(clicks.num_items * share))
            hashed[share].append(_area(clicks, users, items, *rows))
            collided[share].append((user_part + item_part) / 2)
    return exact, hashed, collided


def _area(clicks: Clicks, users: np.ndarray, items: np.ndarray, num_users: int, num_items: int) -> float:
    model = train(clicks, users, items, num_users, num_items)
    held = clicks.held_out
    return area_under_curve(score(model, users[held], items[held]), clicks.clicked[held])


def _hash(ids: np.ndarray, num_ids: int, share: float, seed: int) -> tuple[np.ndarray, float]:
    """Return the rows of ids in a smaller table, and which part of all ids shares its row with another."""
    num_rows = int(num_ids * share)
    rows = np.random.default_rng(seed).integers(1 << 30, size=num_ids) % num_rows
    alone = np.bincount(rows, minlength=num_rows) == 1
    return rows[ids], 1 - float(alone[rows].mean())


def _rows_kept(seed: int) -> float:
    """Return which part of the distinct ids a table keeps that admits an id at its third push."""
    life = Lifecycle(admit_after=_ADMIT_AFTER)
    spec = RowTableSpec("ids", 1, "float32", Add(), "asynchronous", "sum", "ignore", life=life)
    table = RowStore(spec, row_rule(spec.rule, allowed=None), row_ops())
    ids = np.random.default_rng(seed).zipf(1.2, size=40_000)
    ids = ids[ids < 1 << 40]
    for batch in np.array_split(ids, 400):
        distinct = torch.from_numpy(np.unique(batch))
        table.apply([RowContribution(distinct, torch.ones(len(distinct), 1))], 0)
    kept = len(table) / len(np.unique(ids))
    table.close()
    return kept


CLAIM: Final = Claim(
    "30",
    "Hash collisions cost accuracy; a filter of rare ids bounds memory",
    "Liu et al. 2022 (Monolith)",
    "7.7 % of users, 2.9 % of items collide",
    "real",
    (0.4, 1.2),
    _run,
)
