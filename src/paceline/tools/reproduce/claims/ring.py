"""Claim 20: a ring all-reduce sends 2 (n - 1) / n of the parameters on each worker, however many there are."""

from __future__ import annotations

from typing import Any, Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.programs import command_line

PROGRAM: Final = "benchmarks/split_bytes.py"
OVER_TCP: Final = {"PACELINE_COLLECTIVES": "gloo"}  # whose bytes the kernel counts; shared memory has none
TIMEOUT_S: Final = 900.0


def rows_of(found: dict[str, Any], strategy: str) -> dict[int, tuple[float, float]]:
    """Return the megabytes that a worker sent, and those of the formula, by the number of workers."""
    rows = [row for row in found["rows"] if row["strategy"].partition(":")[0] == strategy]
    return {row["num_workers"]: (row["sent_bytes"] / 1e6, row["expected_bytes"] / 1e6) for row in rows}


def worst_error(rows: dict[int, tuple[float, float]]) -> float:
    """Return the largest relative difference of measured and computed bytes."""
    return max(abs(sent / expected - 1) for sent, expected in rows.values())


def bytes_plot(title: str, rows: dict[int, tuple[float, float]]) -> Plot:
    """Return bars of measured and computed megabytes by the number of workers."""
    names = tuple(f"{num} workers" for num in rows)
    sent, expected = zip(*rows.values(), strict=True)
    curves = (Curve("sent, as the kernel counts", names, sent), Curve("formula", names, expected, is_reference=True))
    return Plot(title, "", "MB a worker and step", curves, "bars", y_range=(0, None))


def _run(options: ClaimOptions) -> Finding:
    found = options.programs.numbers(PROGRAM, (), timeout_s=TIMEOUT_S, environment=OVER_TCP)
    rows = rows_of(found, "all-reduce")
    growth = rows[4][0] / rows[2][0]
    return Finding(
        (
            Check(
                "bytes of a worker, 2 and 4 workers",
                "2 (n - 1) / n of the gradients, within 2 %",
                f"{worst_error(rows):.2%} off",
                worst_error(rows) <= 0.02,
            ),
            Check(
                "4 workers beside 2",
                "1.5 times, and never more than 2",
                f"{growth:.3f} times",
                abs(growth - 1.5) < 0.03,
            ),
        ),
        (bytes_plot("All-reduce of a model of 12.6 MB", rows),),
        "Four transformer blocks of width 256, bytes of the TCP connections between the worker processes. The time "
        "of a ring over shaped lines is measured by "
        "claim 21's program; its scaling over many machines cannot be shown on one.",
        (command_line(PROGRAM, (), OVER_TCP),),
    )


CLAIM: Final = Claim(
    "20",
    "A ring sends 2(n-1)/n of the gradients on each worker, however many",
    "Sergeev & Del Balso 2018 (Horovod)",
    "90 % scaling at 512 GPUs, 68 % for VGG-16",
    "real",
    (0.7, 0.7),
    _run,
    ("A5",),
)
