"""Claim 25: a fully sharded model sends one and a half times what all-reduce does, and holds one n-th of the state."""

from __future__ import annotations

from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.claims.ring import OVER_TCP, PROGRAM, TIMEOUT_S, bytes_plot, rows_of, worst_error
from paceline.tools.reproduce.programs import command_line

_STATE_BYTES: Final = 16  # a parameter, in mixed precision under Adam


def _run(options: ClaimOptions) -> Finding:
    found = options.programs.numbers(PROGRAM, (), timeout_s=TIMEOUT_S, environment=OVER_TCP)
    rows, reduced = rows_of(found, "fsdp"), rows_of(found, "all-reduce")
    ratios = [rows[num][0] / reduced[num][0] for num in rows]
    places = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    curves = (
        Curve("stage 1: optimizer", places, tuple(7.5 * (4 + 12 / n) for n in places)),
        Curve("stage 2: and gradients", places, tuple(7.5 * (2 + 14 / n) for n in places)),
        Curve("stage 3: and parameters", places, tuple(7.5 * _STATE_BYTES / n for n in places)),
    )
    return Finding(
        (
            Check(
                "bytes of a worker, 2 and 4 workers",
                "3 (n - 1) / n of the parameters, within 2 %",
                f"{worst_error(rows):.2%} off",
                worst_error(rows) <= 0.02,
            ),
            Check(
                "beside all-reduce",
                "3 to 2",
                ", ".join(f"{each:.3f}" for each in ratios),
                all(abs(each - 1.5) <= 0.03 for each in ratios),
            ),
        ),
        (
            bytes_plot("Fully sharded, a model of 12.6 MB", rows),
            Plot(
                "Memory of 7.5 billion parameters, by the formula",
                "workers",
                "GB a worker",
                curves,
                is_log_x=True,
                is_log_y=True,
            ),
        ),
        "Bytes of the TCP connections of real jobs under fsdp and all-reduce. The memory is computed and not "
        "measured: torch's fully_shard keeps the shards.",
        (command_line(PROGRAM, (), OVER_TCP),),
    )


CLAIM: Final = Claim(
    "25",
    "Sharded state: a fraction of the memory for half again the traffic",
    "Rajbhandari et al. 2020 (ZeRO)",
    "16 to 16/N bytes a parameter; traffic 2, 2, 3 times the parameters",
    "real",
    (0.7, 0.7),
    _run,
    ("A5",),
)
