"""Claim 14: with backup workers a synchronous update waits for the first N of N + b, and gets there sooner."""

from __future__ import annotations

from statistics import median
from typing import Final

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.problems import Perceptron
from paceline.tools.reproduce.virtual import FixedStep, LearningCurve, SimulatedRun, learn_along, scenario, simulate_run

_WORKERS: Final = 32
_CLOCKS: Final = 40
_BACKUPS: Final = (0, 1, 2, 4, 8, 16)
_RATES: Final = (0.05, 0.1, 0.2)
_TARGET: Final = 0.2
_ASYNCHRONOUS: Final = "asynchronous"


def _policy(backups: int) -> str:
    return f"backup:{backups}" if backups else "bsp"


def _run(options: ClaimOptions) -> Finding:
    seeds = range(options.seed, options.seed + (1 if options.is_quick else 5))
    policies = (*map(_policy, _BACKUPS), _ASYNCHRONOUS)
    clock_s: dict[str, list[float]] = {policy: [] for policy in policies}
    times: dict[str, list[float]] = {policy: [] for policy in policies}
    curves: dict[str, LearningCurve] = {}
    for seed in seeds:
        problem = Perceptron.make(seed)
        runs = {
            policy: simulate_run(
                scenario(policy, seed=seed, workers=_WORKERS, clocks=_CLOCKS, stragglers="transient:0.05:8")
            )
            for policy in policies
        }
        curves = {policy: _fastest(run, problem) for policy, run in runs.items()}
        for policy, run in runs.items():
            clock_s[policy].append(run.seconds / len(run.order))
            times[policy].append(curves[policy].seconds_to(_TARGET))
    per_push = {policy: median(found) for policy, found in clock_s.items()}
    return _finding(per_push, {policy: median(found) for policy, found in times.items()}, curves)


def _fastest(run: SimulatedRun, problem: Perceptron) -> LearningCurve:
    """Return what is learned with the step size that is at the target first."""
    curves = [learn_along(run, problem, FixedStep(rate), looks=40) for rate in _RATES]
    return min(curves, key=lambda curve: (curve.seconds_to(_TARGET), curve.losses[-1]))


def _finding(per_push: dict[str, float], times: dict[str, float], curves: dict[str, LearningCurve]) -> Finding:
    names = [_policy(backups) for backups in _BACKUPS]
    best = min(names, key=lambda name: times[name])
    cheapest = min(names, key=lambda name: per_push[name])
    shown = ("bsp", best, _ASYNCHRONOUS) if best != "bsp" else ("bsp", _ASYNCHRONOUS)
    losses = tuple(Curve(name, curves[name].seconds, curves[name].losses) for name in shown)
    full = times["bsp"]
    return Finding(
        (
            Check(
                "number of backups with the least time to the target",
                "1 or more, inside the sweep",
                best,
                best not in ("bsp", names[-1]),
            ),
            Check(
                "its time beside waiting for all",
                "less than 0.9",
                f"{times[best] / full:.2f}",
                times[best] < 0.9 * full,
            ),
            Check(
                "its time beside asynchronous",
                "less than 1",
                f"{times[best] / times[_ASYNCHRONOUS]:.2f}",
                times[best] < times[_ASYNCHRONOUS],
            ),
            Check("least time for an update that counts", "with 1 or more backups", cheapest, cheapest != "bsp"),
        ),
        (
            Plot(
                f"Time to a loss of {_TARGET}",
                "",
                "virtual seconds",
                (Curve("time", (*names, "async"), tuple(times[name] for name in (*names, _ASYNCHRONOUS))),),
                "bars",
            ),
            Plot("Loss by time", "virtual seconds", "loss", losses, y_range=(0, 2)),
        ),
        f"{_WORKERS} workers; one clock in twenty takes eight times as long. Each policy has its own best step size "
        "of three, and each push "
        "counts in full: a synchronous clock adds up those that came in time. An asynchronous push acts when it "
        "comes, on old values.",
    )


CLAIM: Final = Claim(
    "14",
    "Backup workers beat full synchrony and asynchrony",
    "Chen et al. 2016",
    "96 + 4 workers are best",
    "virtual",
    (0.7, 1.6),
    _run,
)
