"""What the equivalence suite compares: each strategy against plain torch, along the axes of a training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn

EQUAL = 1e-10  # what rounding may make of other orders of addition, in double precision


class SignOfMean(torch.optim.Optimizer):
    """A class that torch does not have; each element is stepped by itself."""

    def __init__(self, params: Any, lr: float = 0.01, momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                    mean.lerp_(parameter.grad, 1 - group["momentum"])
                    parameter.sub_(mean / (mean.abs() + 0.01), alpha=group["lr"])


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD, Nesterov": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "two groups": lambda model: torch.optim.AdamW(
        [{"params": model[4].parameters(), "lr": 0.03}, {"params": model[1].parameters(), "betas": (0.8, 0.9)}], lr=0.01
    ),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.02),
    "AdamW, AMSGrad": lambda model: torch.optim.AdamW(model.parameters(), lr=0.02, amsgrad=True),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.02, initial_accumulator_value=0.1),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=0.5),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=0.02),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=0.02),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.02),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.02),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.02, momentum=0.5),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.02),
    "Adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.02),
    "Muon": lambda model: torch.optim.Muon(model.parameters(), lr=0.02),
    "own class": lambda model: SignOfMean(model.parameters()),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters()),
}


@dataclass(frozen=True)
class Cell:
    """One training loop; the first value of each axis is that of the plainest loop."""

    optimizer: str = "SGD, Nesterov"
    schedule: str = "none"
    accumulation: str = "none"
    batches: str = "even"
    parameters: str = "all trained"
    memory: str = "contiguous"
    state: str = "kept"

    @property
    def name(self) -> str:
        """What is not as in the plainest loop."""
        return ", ".join(value for axis, value in vars(self).items() if value != getattr(Cell, axis)) or "plainest"


AXES: Mapping[str, tuple[str, ...]] = {
    "optimizer": tuple(OPTIMIZERS),
    "schedule": ("none", "by epoch", "by batch"),
    "accumulation": ("none", "in accumulate()", "without it"),
    "batches": ("even", "one short", "one missing"),
    "parameters": ("all trained", "some frozen", "thawed later", "frozen later", "one unused"),
    "memory": ("contiguous", "transposed", "channels_last"),
    "state": ("kept", "loaded again", "from plain torch", "to plain torch"),
}


def one_by_one() -> Iterator[Cell]:
    """Yield the plainest loop, and those that differ from it along one axis."""
    yield Cell()
    for axis, values in AXES.items():
        for value in values[1:]:
            yield replace(Cell(), **{axis: value})


# Not to fill up a loop with: what many strategies refuse would hide the rest of it.
_ALONE = {"LBFGS", "one unused"}
_REFUSED_TOGETHER = {
    pair for value in ("in accumulate()", "without it") for pair in ((value, "one missing"), ("one missing", value))
}


def in_pairs() -> Iterator[Cell]:
    """Yield loops in which each value of each axis meets each of every other axis.

    An optimizer that every strategy refuses stays out, as plain torch steps it in another way.
    """
    left = {
        frozenset({(axis, value), (other, another)})
        for axis, other in combinations(AXES, 2)
        for value, another in product(AXES[axis][1:], AXES[other][1:])
        if "LBFGS" not in (value, another)
    }
    while left:
        cell = Cell()
        chosen = dict(sorted(min(left, key=sorted)))
        for axis, values in AXES.items():
            if axis not in chosen:
                met = {
                    value: len({frozenset({(axis, value), one}) for one in chosen.items()} & left)
                    for value in values
                    if value not in _ALONE and not {(value, one) for one in chosen.values()} & _REFUSED_TOGETHER
                }
                chosen[axis] = max(met, key=lambda value: met[value])
        cell = replace(cell, **chosen)
        left -= {frozenset(pair) for pair in combinations(chosen.items(), 2)}
        yield cell


@dataclass(frozen=True)
class Strategy:
    """A way to train that is compared with plain torch; `settings` are those of `paceline.distributed`."""

    name: str
    settings: Mapping[str, Any]
    job: Mapping[str, Any] = field(default_factory=dict)
    num_workers: int = 2
    processes: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a loop ended: how far it is from plain torch at most, or why it was refused."""

    off: float = 0.0
    refused: str = ""

    def __str__(self) -> str:
        """Return the entry of the table."""
        if self.refused:
            return "refused"
        return "=" if self.off <= EQUAL else f"{self.off:.0e}".replace("e-0", "e-").replace("e+00", "")


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest difference of any element."""
    pairs = zip(found, expected, strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


assert [one.name for one in fields(Cell)] == list(AXES)
