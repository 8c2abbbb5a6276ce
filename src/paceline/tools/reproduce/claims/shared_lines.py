"""Claim 21: servers on k more machines shorten a step as a formula says, for any k."""

from __future__ import annotations

from typing import Final

from paceline.tools.plan.estimate import alone_bytes
from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.programs import command_line

_PROGRAM: Final = "benchmarks/hosts.py"
_WORKERS: Final = 4
_MEGABYTES: Final = "25"  # lines are busy for 2 to 3 s: the end of a clock takes some 0.1 s beside that


def _run(options: ClaimOptions) -> Finding:
    dedicated = ("0", "4") if options.is_quick else ("0", "1", "2", "3", "4")
    arguments = ("--steps-alone", "--megabytes", _MEGABYTES, "--steps", "3", "--dedicated", *dedicated)
    found = options.programs.numbers(_PROGRAM, arguments, timeout_s=1500.0)
    places = tuple(float(each) for each in found["dedicated"])
    measured, predicted = tuple(map(float, found["seconds"])), tuple(map(float, found["predicted_s"]))
    computing = tuple(map(float, found["computing_s"]))
    bytes_per_s = 100e6 / 8
    apart = tuple(place for place in (1.0, 2.0, 3.0, 4.0))
    plain = tuple(alone_bytes(_WORKERS, int(place), float(_MEGABYTES) * 1e6) / bytes_per_s for place in apart)
    worst = float(found["worst_error"])
    return Finding(
        (
            Check(
                "seconds of a step with " + ", ".join(dedicated) + " more machines",
                ", ".join(f"{lines:.2f} + {own:.2f}" for lines, own in zip(predicted, computing, strict=True))
                + ", lines and computing, within 10 %",
                ", ".join(f"{each:.2f}" for each in measured),
                worst <= 0.1,
            ),
            Check(
                "fastest",
                "a server for each worker",
                f"{places[measured.index(min(measured))]:.0f}",
                measured.index(min(measured)) == len(measured) - 1,
            ),
        ),
        (
            Plot(
                f"A step of {_MEGABYTES} MB over lines of 100 Mbit/s, 4 workers",
                "machines with a server alone",
                "seconds",
                (
                    Curve("measured", places, measured),
                    Curve("the formula, shares of BytePS", places, predicted, is_reference=True),
                    Curve("the formula, servers alone", apart, plain),
                ),
                y_range=(0, None),
            ),
        ),
        "Each machine is a network namespace behind a line that the kernel limits both ways; needs root, ip and tc. "
        "Two cores carry all of them: a machine that is busy otherwise is late for reasons that are not the lines. The "
        "formula knows lines alone: what workers took to compute before they pushed is measured in the same steps and "
        "added to it.",
        (command_line(_PROGRAM, arguments),),
    )


CLAIM: Final = Claim(
    "21",
    "Servers on k more machines: a step takes 2n(n-1)/(n²+kn-2k) of M/B",
    "Jiang et al. 2020 (BytePS)",
    "+84 % over all-reduce, +245 % over servers",
    "real",
    (1.0, 4.0),
    _run,
    ("A5", "A6"),
)
