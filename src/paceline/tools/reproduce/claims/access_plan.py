"""Claim 17: rows whose ids are those of the step before are found without searching, which makes a step shorter."""

from __future__ import annotations

import time
from statistics import median
from typing import Final

import torch

from paceline.api.connect import connect
from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.update.named_rules import SGD

_ROWS: Final = 20_000
_WIDTH: Final = 4
_LEAST: Final = 0.33


def _run(options: ClaimOptions) -> Finding:
    steps = 25 if options.is_quick else 150
    times = _times(steps, options.seed)
    known, new, looked_up = (median(times[name]) for name in ("known", "new", "dict"))
    names = ("a dict entry a row", "other ids in each step", "the ids of the step before")
    saved = 1 - known / looked_up
    return Finding(
        (
            Check("time of a step saved beside a dict entry a row", "33 % to 98 %", f"{saved:.0%}", saved >= _LEAST),
            Check(
                "the same ids beside other ids in each step", "shorter", f"{known:.1f} and {new:.1f} ms", known < new
            ),
        ),
        (
            Plot(
                f"Pull and push of {_ROWS:,} rows of {_WIDTH}",
                "",
                "ms, median",
                (Curve("ms", names, (looked_up, new, known)),),
                "bars",
                y_range=(0, None),
            ),
        ),
        "One worker and its server in one process. There is no recording of a plan ahead: ids are compared with "
        "those of the last step, and where they are the "
        "same what was found then is used again (decision 68). The dict is a store in Python of one tensor a row, "
        "as a plain server has.",
    )


def _times(steps: int, seed: int) -> dict[str, list[float]]:
    """Return the milliseconds of each step: known ids, new ones, and a dict, in turns."""
    generator = torch.Generator().manual_seed(seed)
    same = torch.randperm(_ROWS * 4, generator=generator)[:_ROWS]
    gradient = torch.ones(_ROWS, _WIDTH)
    kept = {int(each): torch.zeros(_WIDTH) for each in same}
    found: dict[str, list[float]] = {"known": [], "new": [], "dict": []}
    with connect() as session:
        tables = {
            name: session.table(name, rows=_WIDTH, update=SGD(lr=0.1), consistency="bsp") for name in ("known", "new")
        }
        for _ in range(steps):
            other = torch.randperm(_ROWS * 4, generator=generator)[:_ROWS]
            for name, ids in (("known", same), ("new", other)):
                began_s = time.perf_counter()
                tables[name].pull(ids)
                tables[name].push(ids, gradient)
                session.clock()
                found[name].append((time.perf_counter() - began_s) * 1000)
            began_s = time.perf_counter()
            keys = same.tolist()
            torch.stack([kept[key] for key in keys])
            for key, row in zip(keys, gradient, strict=True):
                kept[key].sub_(row, alpha=0.1)
            found["dict"].append((time.perf_counter() - began_s) * 1000)
    return found


CLAIM: Final = Claim(
    "17",
    "Access that repeats is planned once: less time in every iteration",
    "Cui et al. 2014 (IterStore)",
    "33 to 98 % less time per iteration",
    "real",
    (0.3, 0.6),
    _run,
)
