"""Claim 6: a list of keys that both ends remember need not be sent again, which saves half of the bytes."""

from __future__ import annotations

from typing import Final

import torch

from paceline.api.connect import connect
from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.update.dtypes import torch_dtype
from paceline.update.filters import KeyCache
from paceline.update.named_rules import Add

_KEYS: Final = 20_000
_PUSHES: Final = 50
_KINDS: Final = {"float64": 0.5, "float32": 2 / 3}


def _run(options: ClaimOptions) -> Finding:
    saved = {dtype: _saved(dtype, options.seed) for dtype in _KINDS}
    plain = {dtype: _saved(dtype, options.seed, is_caching=False) for dtype in _KINDS}
    names = tuple(_KINDS)
    checks = [
        Check(
            f"bytes of pushes saved, 8-byte keys and {dtype} values",
            f"{expected:.1%}, within 2 %",
            f"{saved[dtype]:.1%}",
            abs(saved[dtype] / expected - 1) <= 0.02,
        )
        for dtype, expected in _KINDS.items()
    ]
    return Finding(
        (*checks, Check("saved without the filter", "nothing", f"{max(plain.values()):.0%}", not any(plain.values()))),
        (
            Plot(
                "Bytes that key caching saves",
                "",
                "share",
                (
                    Curve("counted", names, tuple(saved.values())),
                    Curve("8 / (8 + size of a value)", names, tuple(_KINDS.values()), is_reference=True),
                ),
                "bars",
                y_range=(0, 1),
            ),
        ),
        f"A worker pushes the same {_KEYS:,} keys {_PUSHES} times to a table with one number a row; bodies of "
        "frames, exactly counted. The first time the keys "
        "travel, and after that 16 bytes stand for them.",
    )


def _saved(dtype: str, seed: int, *, is_caching: bool = True) -> float:
    """Return the share of bytes of pushes that was not sent, once the first list is known."""
    keys = torch.randperm(1 << 20, generator=torch.Generator().manual_seed(seed))[:_KEYS]
    values = torch.ones(_KEYS, 1, dtype=torch_dtype(dtype))
    filters = (KeyCache(),) if is_caching else ()
    with connect() as session:
        table = session.table(
            "keys",
            rows=1,
            dtype="float64" if dtype == "float64" else "float32",
            update=Add(),
            consistency="bsp",
            filters=filters,
        )
        for _ in range(_PUSHES + 1):
            table.push(keys, values)
            session.clock()
        session.barrier()
        pushed = table.traffic.pushed
    first = _KEYS * (8 + values.element_size())
    if not is_caching:
        return pushed.saved
    return 1 - (pushed.total_bytes - first) / (pushed.plain_total_bytes - first)


CLAIM: Final = Claim(
    "6",
    "Key caching saves half of the bytes",
    "Li et al. 2014 (OSDI)",
    "about 50 %",
    "counted",
    (0.1, 0.1),
    _run,
    ("A5",),
)
