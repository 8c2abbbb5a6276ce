"""Claim 18: uniform workers gain nothing from staleness, and a table larger than its memory is read ahead in order."""

from __future__ import annotations

from statistics import median
from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.problems import Perceptron
from paceline.tools.reproduce.swapping import SwapFinding, swap
from paceline.tools.reproduce.virtual import FixedStep, learn_along, rate_for, scenario, simulate_run

_POLICIES: Final = ("bsp", "ssp:4", "asynchronous")
_TARGET: Final = 0.2


def _run(options: ClaimOptions) -> Finding:
    found = _seconds_to_target(options)
    swapped = swap(options)
    order = found["bsp"] <= found["ssp:4"] and found["bsp"] <= found["asynchronous"]
    return Finding(
        (
            Check(
                f"virtual seconds to a loss of {_TARGET}: " + ", ".join(_POLICIES),
                "BSP is first",
                ", ".join(f"{t:.0f}" for t in found.values()),
                order,
            ),
            Check(
                "a table 4 times its memory: values beside one that fits",
                "the same bits",
                "the same" if swapped.is_equal else "different",
                swapped.is_equal,
            ),
            Check(
                "of what later steps map, read ahead in the recorded order",
                "at least 95 %",
                f"{swapped.ahead:.0%}",
                swapped.ahead >= 0.95,
            ),
            Check(
                "time of a step beside one that fits", "less than 2", f"{swapped.slowdown:.2f}", swapped.slowdown < 2
            ),
        ),
        _plots(found, swapped),
        f"Left: 8 workers that take 0.98 to 1.02 s for a clock, on virtual time. Right, for real: {swapped.facts} "
        "No accelerator is "
        "involved: a table's budget stands for the device's memory, and a file for pinned memory. The first step "
        "records the order of pieces; in later ones a thread reads the next pieces while one is in use, "
        f"{swapped.in_time:.0%} of it in time. What was used is released, and the system writes it to the file.",
    )


def _seconds_to_target(options: ClaimOptions) -> dict[str, float]:
    """Return the virtual seconds of each policy, in the median of the seeds."""
    times: dict[str, list[float]] = {policy: [] for policy in _POLICIES}
    for seed in range(options.seed, options.seed + (3 if options.is_quick else 7)):
        problem = Perceptron.make(seed)
        runs = {
            policy: simulate_run(scenario(policy, seed=seed, clocks=110, spread=0.02, is_lazy=policy.startswith("ssp")))
            for policy in _POLICIES
        }
        for policy, run in runs.items():  # each with its own best step: none is held back by another's
            curve = learn_along(run, problem, FixedStep(rate_for(problem, run, _TARGET)))
            times[policy].append(curve.seconds_to(_TARGET))
    return {policy: median(each) for policy, each in times.items()}


def _plots(found: dict[str, float], swapped: SwapFinding) -> tuple[Plot, ...]:
    return (
        Plot(
            f"Time to a loss of {_TARGET}, equal workers",
            "",
            "virtual seconds",
            (Curve("time", _POLICIES, tuple(found.values())),),
            "bars",
        ),
        Plot(
            "Steps of a table in memory, and of one beyond it",
            "step",
            "ms",
            (
                Curve("fits", tuple(range(len(swapped.resident_ms))), swapped.resident_ms),
                Curve("4 times its memory", tuple(range(len(swapped.swapped_ms))), swapped.swapped_ms),
            ),
            y_range=(0, None),
        ),
    )


CLAIM: Final = Claim(
    "18",
    "Uniform workers: BSP is fastest. Models beyond the device's memory",
    "Cui et al. 2016 (GeePS)",
    "BSP first on GPUs; 20 GB models on 5 GB devices",
    "virtual",
    (0.8, 2.0),
    _run,
)
