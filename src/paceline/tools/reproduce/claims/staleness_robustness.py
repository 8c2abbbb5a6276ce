"""Claim 5: at one step size SSP learns worse as the bound grows, and ESSP does not mind it."""

from __future__ import annotations

from math import sqrt
from statistics import median
from typing import Final

import numpy as np

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.problems import Factorization
from paceline.tools.reproduce.virtual import FixedStep, LearningCurve, SimulatedRun, learn_along, scenario, simulate_run

_POLICIES: Final = ("bsp", "ssp:2", "ssp:5", "ssp:10", "essp:10")
_CLOCKS: Final = 240
_READS_A_CLOCK: Final = 8
_SHARE: Final = 0.75  # of the largest step at which bsp is stable


def _run(options: ClaimOptions) -> Finding:
    seeds = range(options.seed, options.seed + (3 if options.is_quick else 7))
    ratios: dict[str, list[float]] = {policy: [] for policy in _POLICIES}
    curves: dict[str, LearningCurve] = {}
    steps: list[float] = []
    for seed in seeds:
        problem, runs = Factorization.make(seed, parts=50), {policy: _simulated(policy, seed) for policy in _POLICIES}
        steps.append(_SHARE * _largest_step(problem, runs["bsp"]))
        curves = {policy: _learn(run, problem, steps[-1]) for policy, run in runs.items()}
        for policy, curve in curves.items():
            ratios[policy].append(curve.losses[-1] / curves["bsp"].losses[-1])
    return _finding({policy: median(found) for policy, found in ratios.items()}, curves, median(steps))


def _simulated(policy: str, seed: int) -> SimulatedRun:
    is_lazy = policy.startswith("ssp")
    return simulate_run(scenario(policy, seed=seed, clocks=_CLOCKS, spread=0.02, latency_s=0.005, is_lazy=is_lazy))


def _learn(run: SimulatedRun, problem: Factorization, step: float) -> LearningCurve:
    return learn_along(run, problem, FixedStep(step), parts=_READS_A_CLOCK)


def _largest_step(problem: Factorization, run: SimulatedRun) -> float:
    """Return the largest step, to a twentieth, at which bsp never ends above where it began."""

    def is_stable(step: float) -> bool:
        losses = learn_along(run, problem, FixedStep(step), looks=30).losses
        return max(losses) <= losses[0]

    low, high = 0.02, 1.0
    while high / low > 1.05:
        middle = sqrt(low * high)
        low, high = (middle, high) if is_stable(middle) else (low, middle)
    return low


def _finding(ratios: dict[str, float], curves: dict[str, LearningCurve], step: float) -> Finding:
    stale, eager = ratios["ssp:10"], ratios["essp:10"]
    top = curves["bsp"].losses[0] * 2

    def drawn(policy: str, *, by_clock: bool) -> Curve:
        curve = curves[policy]
        places = tuple(count / 8 for count in curve.pushes) if by_clock else curve.seconds
        return Curve(policy, places, tuple(min(loss, top) for loss in curve.losses))

    return Finding(
        (
            Check("SSP, s = 10: last loss beside BSP's", "at least 1.5, or diverges", _ratio(stale), stale >= 1.5),
            Check("ESSP, s = 10: last loss beside BSP's", "within 5 %", _ratio(eager), abs(eager - 1) <= 0.05),
            Check(
                "SSP by bound 2, 5, 10",
                "gets worse",
                ", ".join(_ratio(ratios[f"ssp:{s}"]) for s in (2, 5, 10)),
                ratios["ssp:2"] <= ratios["ssp:5"] <= stale,
            ),
        ),
        (
            Plot(
                "Square loss by clock",
                "clock",
                "loss",
                tuple(drawn(p, by_clock=True) for p in _POLICIES),
                is_log_y=True,
            ),
            Plot(
                "Square loss by time",
                "virtual seconds",
                "loss",
                tuple(drawn(p, by_clock=False) for p in _POLICIES),
                is_log_y=True,
            ),
        ),
        "Matrix factorization of 7200 made-up ratings, rank 8, popular items as Zipf's law says; 8 workers of "
        "equal speed, each "
        f"reads {_READS_A_CLOCK} times a clock, and goes through 2 % of its share in it. All policies take "
        f"{step:.3f}, {_SHARE} of the largest step at which bsp is stable. A curve that "
        "leaves at the top has diverged. With real processes: python examples/matrix_factorization_figure.py.",
    )


def _ratio(ratio: float) -> str:
    return f"{ratio:.3f}" if np.isfinite(ratio) else "diverges"


CLAIM: Final = Claim(
    "5",
    "ESSP does not mind the bound, SSP degrades and diverges as it grows",
    "Dai et al. 2015",
    "a figure: s = 10 is unstable under SSP and not under ESSP",
    "virtual",
    (0.6, 2.0),
    _run,
    ("A3",),
)
