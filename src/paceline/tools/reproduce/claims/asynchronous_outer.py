"""Claim 27: momentum spoils outer steps that come one by one; a lower rate, none, or a delayed one repairs it."""

from __future__ import annotations

from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.claims.diloco import PROGRAM, arguments_of, numbers_of
from paceline.tools.reproduce.programs import command_line

_LOCKSTEP: Final = "in step, lr 0.7, momentum 0.9"
_NAIVE: Final = "out of step, lr 0.7, momentum 0.9"
_REPAIRS: Final = {
    "lr 0.07": "out of step, lr 0.07, momentum 0.9",
    "no momentum": "out of step, lr 0.7, no momentum",
    "delayed": "out of step, lr 0.7, momentum 0.9 delayed",
}
_MARGIN: Final = 1.1


def _run(options: ClaimOptions) -> Finding:
    found = numbers_of(options)["virtual"]
    loss = {name: float(each["loss"]) for name, each in found.items()}
    seconds = {name: float(each["virtual_s"]) for name, each in found.items()}
    repaired = {short: loss[name] for short, name in _REPAIRS.items()}
    worst = max(repaired.values())
    names = ("in step", "naive", *_REPAIRS)
    wanted = (_LOCKSTEP, _NAIVE, *_REPAIRS.values())
    return Finding(
        (
            Check(
                "momentum 0.9 at rate 0.7, out of step",
                "worse than each repair",
                f"{loss[_NAIVE]:.2f} and at most {worst:.2f}",
                loss[_NAIVE] > worst,
            ),
            Check(
                "the repairs beside lockstep",
                f"at most {_MARGIN} times its loss",
                ", ".join(f"{each:.2f}" for each in repaired.values()) + f"; {loss[_LOCKSTEP]:.2f}",
                worst <= _MARGIN * loss[_LOCKSTEP],
            ),
            Check(
                "virtual seconds beside lockstep",
                "less than half",
                f"{seconds[_NAIVE] / seconds[_LOCKSTEP]:.2f}",
                seconds[_NAIVE] < 0.5 * seconds[_LOCKSTEP],
            ),
        ),
        (
            Plot(
                "Loss after equally many samples",
                "",
                "held-out loss",
                (Curve("loss", names, tuple(loss[name] for name in wanted)),),
                "bars",
                y_range=(0, None),
            ),
            Plot(
                "Time for them",
                "",
                "virtual seconds",
                (Curve("seconds", names, tuple(seconds[name] for name in wanted)),),
                "bars",
                y_range=(0, None),
            ),
        ),
        "Four workers of 0.58, 0.75, 1.51 and 3.33 s a step, 20 AdamW steps a round, on 32 clouds of points in four "
        "classes; a perceptron of 512 hidden units in place of 65,000. "
        "Time is simulated, the servers' update rules are real.",
        (command_line(PROGRAM, arguments_of(options)),),
    )


CLAIM: Final = Claim(
    "27",
    "Asynchronous outer steps need a low rate, no momentum, or a delayed one",
    "Liu et al. 2024 (asynchronous local SGD)",
    "outer rate 0.07 in place of 0.7",
    "virtual",
    (1.5, 3.0),
    _run,
    ("A12",),
)
