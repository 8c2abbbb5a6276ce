"""Claim 12: Adagrad on the servers bears many more asynchronous replicas than a fixed rate."""

from __future__ import annotations

from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.programs import command_line

_PROGRAM: Final = "benchmarks/downpour.py"


def _run(options: ClaimOptions) -> Finding:
    arguments = ("--seeds", "1" if options.is_quick else "3")
    found = options.programs.numbers(_PROGRAM, arguments, timeout_s=1500.0)
    names = ("rate of one worker", "rate for each number")
    fixed = (float(found["fixed_workers"]), float(found["fixed_workers_any_rate"]))
    adaptive = (float(found["adagrad_workers"]), float(found["adagrad_workers_any_rate"]))
    return Finding(
        (
            Check(
                "replicas that Adagrad bears, beside a fixed rate",
                "at least 4 times",
                f"{adaptive[0]:.0f} to {fixed[0]:.0f}: {found['ratio']:.1f} times",
                found["ratio"] >= 4,
            ),
            Check(
                "the same with a new rate for each number",
                "Adagrad at least as many",
                f"{adaptive[1]:.0f} to {fixed[1]:.0f}",
                adaptive[1] >= fixed[1],
            ),
        ),
        (
            Plot(
                "Replicas with which all seeds reach the target",
                "",
                "workers",
                (Curve("fixed rate", names, fixed), Curve("Adagrad", names, adaptive)),
                "bars",
                y_range=(0, None),
            ),
        ),
        "Handwritten digits, a perceptron, the servers' own update rules; workers and time are simulated. One "
        "worker warms up for two epochs. A rule bears a number "
        "of workers if every seed comes to a training loss of 0.1 within 20 epochs; its rate is the best one for a "
        "single worker.",
        (command_line(_PROGRAM, arguments),),
    )


CLAIM: Final = Claim(
    "12",
    "Adagrad makes many asynchronous replicas usable",
    "Dean et al. 2012 (DistBelief)",
    "a fixed rate often never reached the target",
    "virtual",
    (0.8, 2.2),
    _run,
    ("A10",),
)
