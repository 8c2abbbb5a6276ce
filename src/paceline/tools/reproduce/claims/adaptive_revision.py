"""Claim 16: adaptive revision makes asynchronous training robust to the choice of the step size."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np
import torch

from paceline.tools.reproduce.claim import Check, Claim, ClaimOptions, Curve, Finding, Plot
from paceline.tools.reproduce.problems import Factorization
from paceline.tools.reproduce.virtual import FixedStep, Floats, PushRule, learn_along, scenario, simulate_run
from paceline.update.rows.rules import AdagradRows, AdaptiveRevisionRows

_RATES: Final = tuple(float(each) for each in np.geomspace(0.05, 4.0, 21))
_RULES: Final = ("fixed step", "Adagrad", "adaptive revision")
_GOOD: Final = 0.5  # of the first loss


@dataclass(slots=True)
class _RowsStep:
    """A rule of the servers' tables of rows, with one number a row."""

    rule: AdaptiveRevisionRows | AdagradRows
    hyper: dict[str, float]
    _state: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    _sums: list[torch.Tensor] = field(default_factory=list[torch.Tensor])

    def step(self, values: Floats, gradient: Floats, seen: int) -> None:
        """Take one step; what the reader saw of the sum of gradients is that of the version that it read."""
        rows, change = torch.from_numpy(values)[:, None], torch.from_numpy(gradient)[:, None]
        if not self._state:
            self._state = {column.name: torch.full_like(rows, column.fill) for column in self.rule.columns}
            self._sums = [torch.zeros_like(rows)]
        self.rule.update(rows, change, self._state, self.hyper, self._sums[min(seen, len(self._sums) - 1)])
        self._sums.append(self._state.get("gradient_sum", rows).clone())


def _rule(name: str, rate: float) -> PushRule:
    if name == "fixed step":
        return FixedStep(rate)
    hyper = {
        "lr": rate,
        "initial_accumulator_value": 1.0,
        "lr_decay": 0.0,
        "weight_decay": 0.0,
        "maximize": 0.0,
        "eps": 1e-10,
    }
    return _RowsStep(AdagradRows(hyper) if name == "Adagrad" else AdaptiveRevisionRows(hyper), hyper)


def _run(options: ClaimOptions) -> Finding:
    seeds = range(options.seed, options.seed + (1 if options.is_quick else 3))
    left: dict[str, list[list[float]]] = {name: [] for name in _RULES}
    for seed in seeds:
        problem = Factorization.make(seed, num_workers=32)
        run = simulate_run(scenario("asynchronous", seed=seed, workers=32, clocks=30, stragglers="transient:0.1:6"))
        for name in _RULES:
            curves = [learn_along(run, problem, _rule(name, rate), looks=2) for rate in _RATES]
            left[name].append([curve.losses[-1] / curve.losses[0] for curve in curves])
    shown = {name: tuple(median(found) for found in zip(*by_seed, strict=True)) for name, by_seed in left.items()}
    widths = {name: _width(losses) for name, losses in shown.items()}
    fixed, plain, revised = (widths[name] for name in _RULES)
    curves = tuple(Curve(name, _RATES, tuple(min(loss, 10.0) for loss in shown[name])) for name in _RULES)
    return Finding(
        (
            Check(
                "range of the steps that work: largest over smallest",
                "adaptive revision's is the widest",
                ", ".join(f"{name} {width:.0f}" for name, width in widths.items()),
                revised > max(plain, fixed),
            ),
            Check(
                "largest step that learns at all over the best one",
                "adaptive revision's is the largest",
                ", ".join(f"{name} {_margin(losses):.1f}" for name, losses in shown.items()),
                _margin(shown["adaptive revision"]) > max(_margin(shown[name]) for name in _RULES[:2]),
            ),
        ),
        (
            Plot(
                "What is left of the loss, by step size",
                "step size (first one, of the adaptive rules)",
                "last loss / first loss",
                curves,
                is_log_x=True,
                is_log_y=True,
            ),
        ),
        "Matrix factorization, 32 asynchronous workers, 30 clocks each, one in ten six times as long; a step size "
        f"works if at most {_GOOD:.0%} of the loss is left, "
        "and the range is the ratio of the largest to the smallest that work. The rules are those of the servers. The "
        "gain is a small factor here, and not orders of magnitude. Losses above 10 are drawn at 10.",
    )


def _margin(losses: tuple[float, ...]) -> float:
    """Return how many times larger than the best step the largest is that ends below the first loss."""
    best = _RATES[losses.index(min(losses))]
    return max((rate for rate, loss in zip(_RATES, losses, strict=True) if loss < 1), default=0.0) / best


def _width(losses: tuple[float, ...]) -> float:
    """Return the ratio of the largest to the smallest step that works, 0 if none does."""
    works = [rate for rate, loss in zip(_RATES, losses, strict=True) if loss <= _GOOD]
    return max(works) / min(works) if works else 0.0


CLAIM: Final = Claim(
    "16",
    "Adaptive revision is robust to the choice of the step size",
    "Wei et al. 2015 (Bösen)",
    "orders of magnitude over a tuned fixed schedule",
    "virtual",
    (0.5, 1.5),
    _run,
)
