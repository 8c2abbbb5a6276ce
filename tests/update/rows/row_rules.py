"""Rules for rows, and small means to run them on a table held in plain tensors, which the tests of rules share."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.update.named_rules import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    AdaptiveRevision,
    Add,
    Proximal,
    RowwiseAdagrad,
    rule,
    torch_optim,
)
from paceline.update.rows.rules import RowRule, StateColumn, row_rule
from paceline.update.rules import Hyper, RuleSpec


class Lion:
    """A rule of one's own, with one column."""

    columns = (StateColumn("average"),)
    echo = ""

    def update(self, values: Tensor, gradient: Tensor, state: dict, hyper: Hyper, echo: Tensor | None) -> None:
        average = state["average"]
        values.sub_((average * 0.9).add_(gradient, alpha=0.1).sign_(), alpha=hyper["lr"])
        average.mul_(0.99).add_(gradient, alpha=0.01)


RULES = {
    "add": Add(),
    "sgd": SGD(0.1, weight_decay=0.01),
    "momentum": SGD(0.1, 0.9, 0.1, weight_decay=0.01),
    "nesterov": SGD(0.1, 0.9, nesterov=True),
    "up": torch_optim("SGD", lr=0.1, maximize=True),
    "adagrad": Adagrad(0.1, weight_decay=0.01, initial_accumulator_value=0.5),
    "adagrad-decay": Adagrad(0.1, 0.05),
    "rowwise": RowwiseAdagrad(0.1),
    "adam": Adam(0.01, weight_decay=0.01),
    "amsgrad": Adam(0.01, amsgrad=True),
    "adamw": AdamW(0.01),
    "ftrl": FTRL(0.1, l1=0.3, l2=0.1),
    "revision": AdaptiveRevision(0.1),
    "proximal": Proximal(0.1, l1=0.1),
    "own": rule("tests.update.rows.row_rules:Lion", lr=0.1),
}


@dataclass
class Rows:
    """Some rows with their state; an update gathers, changes copies and scatters them, as a store does."""

    rule: RowRule
    values: Tensor
    state: dict[str, Tensor]
    hyper: Hyper

    def update(self, positions: Tensor, gradient: Tensor, echo: Tensor | None = None) -> None:
        values = self.values[positions]
        state = {name: column[positions] for name, column in self.state.items()}
        self.rule.update(values, gradient, state, self.hyper, echo)
        self.values[positions] = values
        for name, column in state.items():
            self.state[name][positions] = column

    def all(self) -> dict[str, Tensor]:
        """Values and state, to be compared."""
        return {"values": self.values, **self.state}


def rows_of(spec: RuleSpec, values: Tensor) -> Rows:
    """Rows that start with these values, and with the state that rows of the rule start with."""
    made = row_rule(spec, allowed=None)
    num_rows, width = values.shape
    state = {
        column.name: torch.full((num_rows, column.elements(width)), column.fill, dtype=values.dtype)
        for column in made.columns
    }
    return Rows(made, values.clone(), state, spec.groups[0])


def random_rows(seed: int, num_rows: int, width: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, width, generator=generator, dtype=torch.float64).to(dtype)
