"""Claim 22: a pipeline of K stages that fills and drains idles (K - 1) / (M + K - 1) of the time."""

from __future__ import annotations

from typing import Final

from paceline.tools.plan.estimate import bubble_share
from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.programs import command_line

_PROGRAM: Final = "benchmarks/pipeline.py"
_MICRO_BATCHES: Final = (1, 2, 4, 8)


def _run(options: ClaimOptions) -> Finding:
    arguments = ("--steps", "1" if options.is_quick else "3", "--sample-ms", "8")
    runs = options.programs.numbers(_PROGRAM, arguments, timeout_s=600.0)["runs"]
    measured = tuple(float(runs[f"gpipe, {num} micro-batches"]["bubble_percent"]) for num in _MICRO_BATCHES)
    expected = tuple(100 * bubble_share(2, num) for num in _MICRO_BATCHES)
    worst = max(abs(ours - theirs) for ours, theirs in zip(measured, expected, strict=True))
    kept = [float(runs[f"{schedule}, 8 micro-batches"]["kept_kib_first_stage"]) for schedule in ("gpipe", "1f1b")]
    names, more = tuple(str(num) for num in _MICRO_BATCHES), (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    return Finding(
        (
            Check(
                "idle share, 2 stages, 1, 2, 4, 8 micro-batches",
                "50, 33, 20, 11 %, within 5 points",
                ", ".join(f"{each:.0f} %" for each in measured),
                worst <= 5,
            ),
            Check(
                "kept for backward, 1F1B beside GPipe, first stage",
                "less",
                f"{kept[1]:.0f} and {kept[0]:.0f} KiB",
                kept[1] < kept[0],
            ),
        ),
        (
            Plot(
                "Two stages, each a process",
                "micro-batches",
                "idle, %",
                (
                    Curve("measured", names, measured),
                    Curve("(K - 1) / (M + K - 1)", names, expected, is_reference=True),
                ),
                "bars",
                y_range=(0, None),
            ),
            Plot(
                "More stages, by the formula",
                "micro-batches",
                "speed-up",
                tuple(
                    Curve(
                        f"{stages} stages", more, tuple(stages * (1 - bubble_share(stages, int(num))) for num in more)
                    )
                    for stages in (2, 4, 8)
                ),
                is_log_x=True,
                y_range=(0, None),
            ),
        ),
        "Layers sleep for each sample, so that two stages fit on few cores: what is measured is the schedule of "
        "real processes and what they tell each other. The paper's 3.48 times "
        "for 8 stages and 32 micro-batches includes layers that do not divide evenly, and recomputing.",
        (command_line(_PROGRAM, arguments),),
    )


CLAIM: Final = Claim(
    "22",
    "The bubble of a pipeline is (K-1)/(M+K-1)",
    "Huang et al. 2019 (GPipe)",
    "3.48 times with 8 stages and 32 micro-batches",
    "real",
    (0.4, 0.6),
    _run,
    ("A11",),
)
