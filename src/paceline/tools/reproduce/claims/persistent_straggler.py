"""Claim 3: SSP does not fix a worker that is slow for ever, and handing its work to others does."""

from __future__ import annotations

from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.programs import command_line

_PROGRAM: Final = "benchmarks/reassignment.py"
_POLICIES: Final = ("bsp", "ssp:3", "ssp:10")


def _run(options: ClaimOptions) -> Finding:
    arguments = ("--rounds", "1" if options.is_quick else "3")
    runs = options.programs.numbers(_PROGRAM, arguments, timeout_s=900.0)["runs"]

    def pace(way: str) -> tuple[float, ...]:
        return tuple(float(runs[f"{policy} {way}"]["over_sum_of_speeds"]) for policy in _POLICIES)

    alone, shared = pace("alone"), pace("with slices")
    gain = 1 - min(alone[1:]) / alone[0]
    return Finding(
        (
            Check("gain of SSP over BSP, one worker at half speed", "at most 5 %", f"{gain:.1%}", gain <= 0.05),
            Check(
                "with reassignment: clock beside the sum of speeds",
                "within 10 %",
                f"{max(shared):.2f}",
                max(shared) <= 1.10,
            ),
        ),
        (
            Plot(
                "What a clock takes; 1 is the sum of all speeds, 1.75 the slow worker's pace",
                "",
                "times the ideal",
                (Curve("alone", _POLICIES, alone), Curve("with slices that others take", _POLICIES, shared)),
                "bars",
                y_range=(0, None),
            ),
        ),
        "Four worker processes and a server; computing is a sleep, so that speeds are known on few cores. Under a "
        "bound the fast "
        "workers run ahead and then wait; with slices each takes what it has time for.",
        (command_line(_PROGRAM, arguments),),
    )


CLAIM: Final = Claim(
    "3",
    "SSP alone does not fix a worker that is always slow; reassigning work does",
    "Harlap et al. 2016 (FlexRR)",
    "near-ideal run time with reassignment",
    "real",
    (0.7, 2.0),
    _run,
    ("A4",),
)
