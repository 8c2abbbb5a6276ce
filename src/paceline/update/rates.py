"""The learning rate of a push that is an update of its own, where the rate given is that of all workers' mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.update.rules import Hyper, RuleSpec

RATE: Final = "lr"  # among the hyperparameters of a group
_FIRST_STEP_ONLY: Final = "torch.optim.Rprop"  # whose steps afterwards go by the signs of gradients


def with_share_of_rate(hyper: Sequence[Hyper], share: float) -> tuple[Hyper, ...]:
    """Return the hyperparameters of groups, with this share of their learning rates; groups without one stay.

    >>> with_share_of_rate(({"lr": 0.5, "momentum": 0.9}, {}), 0.25)
    ({'lr': 0.125, 'momentum': 0.9}, {})
    """
    return tuple({**group, RATE: _number(group[RATE]) * share} if RATE in group else group for group in hyper)


def divided(rule: RuleSpec, num_workers: int) -> RuleSpec:
    """Return a rule whose learning rates are divided by the number of workers.

    >>> divided(RuleSpec("torch.optim.SGD", ({"lr": 0.5},)), 4).groups
    ({'lr': 0.125},)
    """
    return replace(rule, groups=with_share_of_rate(rule.groups, 1.0 / num_workers))


def require_rate(rule: RuleSpec, table: str) -> None:
    """Raise UsageError for a rule whose steps are not in proportion to a learning rate."""
    if rule.name == _FIRST_STEP_ONLY or not all(RATE in group for group in rule.groups):
        raise UsageError(
            f"'{table}': divide_lr=True divides the learning rate among the pushes of a clock, and the steps of "
            f"{rule.name} are not in proportion to one: leave it out, or take another optimizer (SGD, AdamW, ...)."
        )


def _number(rate: object) -> float:
    assert isinstance(rate, int | float), "the rule has been checked"
    return rate
