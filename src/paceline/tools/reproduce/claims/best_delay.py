"""Claim 8: a bounded delay takes the idle time away, and the delay that is best lies inside the sweep."""

from __future__ import annotations

from statistics import median
from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.problems import Perceptron
from paceline.tools.reproduce.virtual import FixedStep, SimulatedRun, learn_along, rate_for, scenario, simulate_run

_DELAYS: Final = (0, 1, 2, 4, 8, 16, 32)
_TARGET: Final = 0.25
_NO_MORE_IDLE: Final = 16


def _run(options: ClaimOptions) -> Finding:
    seeds = range(options.seed, options.seed + (3 if options.is_quick else 6))
    idle: dict[int, list[float]] = {delay: [] for delay in _DELAYS}
    times: dict[bool, dict[int, list[float]]] = {lazy: {delay: [] for delay in _DELAYS} for lazy in (True, False)}
    for seed in seeds:
        problem = Perceptron.make(seed)
        rate = rate_for(problem, _simulated(0, seed, is_lazy=True), _TARGET)
        for is_lazy, by_delay in times.items():
            for delay in _DELAYS:
                run = _simulated(delay, seed, is_lazy=is_lazy)
                by_delay[delay].append(learn_along(run, problem, FixedStep(rate)).seconds_to(_TARGET))
        for delay in _DELAYS:  # over many clocks, of which the last ones, without bounds, weigh little
            idle[delay].append(_simulated(delay, seed, is_lazy=True, clocks=300).wait_share)
    return _finding(
        {delay: median(found) for delay, found in idle.items()},
        {lazy: {delay: median(found) for delay, found in by.items()} for lazy, by in times.items()},
    )


def _simulated(delay: int, seed: int, *, is_lazy: bool, clocks: int = 100) -> SimulatedRun:
    of = scenario(f"ssp:{delay}", seed=seed, clocks=clocks, stragglers="transient:0.2:6", is_lazy=is_lazy)
    return simulate_run(of)


def _finding(idle: dict[int, float], times: dict[bool, dict[int, float]]) -> Finding:
    lazy = times[True]
    best = min(lazy, key=lambda delay: lazy[delay])
    delays = tuple(map(float, _DELAYS))
    is_inside = best not in (_DELAYS[0], _DELAYS[-1])
    curves = (
        Curve("fetched when the bound demands it", delays, tuple(lazy.values())),
        Curve("fetched in every clock", delays, tuple(times[False].values())),
    )
    return Finding(
        (
            Check("idle share at a delay of 0", "at least 40 % (paper: 50 %)", f"{idle[0]:.0%}", idle[0] >= 0.4),
            Check(
                "idle share at a delay of 16",
                "at most 5 % (paper: 1.7 %)",
                f"{idle[_NO_MORE_IDLE]:.1%}",
                idle[_NO_MORE_IDLE] <= 0.05,
            ),
            Check("delay of the shortest time to the target", "inside the sweep (paper: 8)", f"{best}", is_inside),
        ),
        (
            Plot(
                "Idle",
                "delay",
                "share of the workers' time",
                (Curve("idle", delays, tuple(idle.values())),),
                is_log_x=True,
                y_range=(0, None),
            ),
            Plot(f"Time to a loss of {_TARGET}", "delay", "virtual seconds", curves, is_log_x=True, y_range=(0, None)),
        ),
        "8 workers; a clock takes 0.9 to 1.1 s, one in five six times as long: a coefficient of variation of 1. One "
        "step "
        "size for all delays, the fastest at 0. Where values are fetched in every clock they hardly age, and a long "
        "delay costs nothing.",
    )


CLAIM: Final = Claim(
    "8",
    "A bounded delay removes idle time, and the best delay lies inside",
    "Li et al. 2014 (OSDI)",
    "idle 50 % at delay 0, 1.7 % at 16; 8 is best",
    "virtual",
    (1.2, 3.0),
    _run,
    ("A7",),
)
