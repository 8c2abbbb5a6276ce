"""Claim 11: a server counts keys in a CountMin sketch, millions of them a second on each core."""

from __future__ import annotations

import time
from typing import Final

import numpy as np
import torch

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.update.named_rules import Add
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.ops import row_ops
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rows.store import RowStore

_DEPTH: Final = 4
_BATCH: Final = 200_000
_NUM_KEYS: Final = 1_000_000


def _run(options: ClaimOptions) -> Finding:
    num_batches = 10 if options.is_quick else 60
    rates, errors = zip(*(_count(bits, num_batches, options.seed) for bits in (14, 16, 18)), strict=True)
    widths = tuple(float(1 << bits) for bits in (14, 16, 18))
    bound = tuple(np.e / width * num_batches * _BATCH for width in widths)
    slowest = min(rates)
    return Finding(
        (
            Check(
                "million inserts a second of one core",
                "at least 1 (paper: about 1.35)",
                f"{slowest:.1f} to {max(rates):.1f}",
                slowest >= 1,
            ),
            Check(
                "estimates below the true count",
                "none",
                "none" if min(error[0] for error in errors) >= 0 else "some",
                min(error[0] for error in errors) >= 0,
            ),
            Check(
                "95 % of estimates within e N / width",
                "all widths",
                ", ".join(f"{error[1]:,.0f}" for error in errors),
                all(error[1] <= limit for error, limit in zip(errors, bound, strict=True)),
            ),
        ),
        (
            Plot(
                "Inserts",
                "counters in each of 4 rows of the sketch",
                "million a second of one core",
                (Curve("inserts", widths, tuple(rates)),),
                is_log_x=True,
                y_range=(0, None),
            ),
            Plot(
                "Error of the estimates, 95th percentile",
                "counters in each row",
                "count",
                (
                    Curve("measured", widths, tuple(max(error[1], 0.5) for error in errors)),
                    Curve("bound e N / width", widths, bound, is_reference=True),
                ),
                is_log_x=True,
                is_log_y=True,
            ),
        ),
        f"{num_batches * _BATCH / 1e6:g} million entries with a million keys, as often as Zipf's law says, {_DEPTH} "
        "hashes each, into a server's table of "
        "rows with one float32 a counter (the rule that adds), by one thread; the network is left out. A push "
        "repeats no counter: the worker "
        "adds up its own first, which is part of the time. The paper's total, 1.3 billion a second on 960 cores, is "
        "not claimed.",
    )


def _count(width_bits: int, num_batches: int, seed: int) -> tuple[float, tuple[float, float]]:
    """Count keys; return million inserts a second, and the least and the 95th percentile of the errors."""
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, _NUM_KEYS + 1)
    table, edges = _store(), np.cumsum(shares / shares.sum())
    truth = np.zeros(_NUM_KEYS, np.int64)
    odd = random.integers(1 << 62, size=_DEPTH, dtype=np.int64) | 1
    threads, spent_s = torch.get_num_threads(), 0.0
    torch.set_num_threads(1)
    try:
        for _ in range(num_batches):
            keys = np.minimum(np.searchsorted(edges, random.random(_BATCH)), _NUM_KEYS - 1)
            truth += np.bincount(keys, minlength=_NUM_KEYS)
            began_s = time.process_time()
            counts = np.bincount(_counters(keys, odd, width_bits).ravel(), minlength=_DEPTH << width_bits)
            ids = np.flatnonzero(counts)
            added = torch.from_numpy(counts[ids].astype(np.float32))[:, None]
            table.apply([RowContribution(torch.from_numpy(ids), added)], 0)
            spent_s += time.process_time() - began_s
    finally:
        torch.set_num_threads(threads)
    keys = np.flatnonzero(truth)
    read = table.read(torch.from_numpy(_counters(keys, odd, width_bits).ravel()), 0).numpy().reshape(_DEPTH, -1)
    errors = read.min(0) - truth[keys]
    table.close()
    return num_batches * _BATCH / spent_s / 1e6, (float(errors.min()), float(np.quantile(errors, 0.95)))


def _counters(keys: np.ndarray, odd: np.ndarray, width_bits: int) -> np.ndarray:
    """Return the counters of keys, (depth, n): a multiplicative hash for each row of the sketch."""
    with np.errstate(over="ignore"):
        hashed = (keys[None, :] * odd[:, None]).astype(np.uint64) >> np.uint64(64 - width_bits)
    return hashed.astype(np.int64) + (np.arange(_DEPTH, dtype=np.int64)[:, None] << width_bits)


def _store() -> RowStore:
    spec = RowTableSpec("sketch", 1, "float32", Add(), "asynchronous", "sum", "ignore")
    return RowStore(spec, row_rule(spec.rule, allowed=None), row_ops())


CLAIM: Final = Claim(
    "11",
    "Servers count keys in a sketch, millions a second",
    "Li et al. 2014 (OSDI)",
    "1.3 billion inserts/s on 960 cores, 1.35 million a core",
    "real",
    (0.2, 1.0),
    _run,
)
