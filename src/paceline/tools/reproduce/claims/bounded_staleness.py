"""Claim 1: bounded staleness hides workers that are slow in turns, and a bound in between is the fastest."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.problems import Perceptron
from paceline.tools.reproduce.virtual import FixedStep, SimulatedRun, learn_along, rate_for, scenario, simulate_run

_BOUNDS: Final = (0, 1, 2, 4, 8, 16)
_TARGET: Final = 0.25


def _run(options: ClaimOptions) -> Finding:
    seeds = range(options.seed, options.seed + (2 if options.is_quick else 5))
    shares: dict[int, list[float]] = {bound: [] for bound in _BOUNDS}
    times: dict[int, list[float]] = {bound: [] for bound in _BOUNDS}
    oldest: dict[int, int] = dict.fromkeys(_BOUNDS, 0)
    for seed in seeds:
        problem, runs = Perceptron.make(seed), {bound: _simulated(bound, seed) for bound in _BOUNDS}
        rate = rate_for(problem, runs[0], _TARGET)
        for bound, run in runs.items():
            shares[bound].append(run.wait_share)
            times[bound].append(learn_along(run, problem, FixedStep(rate)).seconds_to(_TARGET))
            oldest[bound] = max(oldest[bound], -1 - min(run.differentials()))
    return _finding({b: median(v) for b, v in shares.items()}, {b: median(v) for b, v in times.items()}, oldest)


def _simulated(bound: int, seed: int) -> SimulatedRun:
    return simulate_run(scenario(f"ssp:{bound}", seed=seed, clocks=140, stragglers="transient:0.1:4", is_lazy=True))


def _finding(shares: dict[int, float], times: dict[int, float], oldest: dict[int, int]) -> Finding:
    best = min(times, key=lambda bound: times[bound])
    falls = all(shares[after] <= shares[before] for before, after in pairwise(_BOUNDS))
    bounds = tuple(map(float, _BOUNDS))
    told = ", ".join(f"{shares[bound]:.0%}" for bound in _BOUNDS)
    return Finding(
        (
            Check(
                "oldest read beyond the bound",
                "0 reads",
                f"{sum(oldest[b] > b for b in oldest)}",
                all(oldest[b] <= b for b in oldest),
            ),
            Check("share of time waiting, by bound", "falls with the bound", told, falls),
            Check(
                "fastest bound to the target", "inside the sweep", f"s = {best}", best not in (_BOUNDS[0], _BOUNDS[-1])
            ),
            Check(
                "its time beside s = 0", "at most 0.7", f"{times[best] / times[0]:.2f}", times[best] <= 0.7 * times[0]
            ),
        ),
        (
            Plot(
                "Waiting",
                "bound s",
                "share of time",
                (Curve("waiting", bounds, tuple(shares.values())),),
                is_log_x=True,
                y_range=(0, None),
            ),
            Plot(
                f"Time to a loss of {_TARGET}",
                "bound s",
                "virtual seconds",
                (Curve("time", bounds, tuple(times.values())),),
                is_log_x=True,
                y_range=(0, None),
            ),
        ),
        "8 workers; a clock takes 0.9 to 1.1 s, one in ten four times as long. A perceptron on made-up clouds of "
        "points; values "
        "are fetched when the bound demands it. One step size for all bounds, the fastest for s = 0. Medians of the "
        "seeds.",
    )


CLAIM: Final = Claim(
    "1",
    "SSP hides workers that are slow in turns; a bound in between is the fastest",
    "Ho et al. 2013, Cui et al. 2014",
    "waiting falls with s, and the best time is at an s inside",
    "virtual",
    (0.6, 1.5),
    _run,
    ("A4",),
)
