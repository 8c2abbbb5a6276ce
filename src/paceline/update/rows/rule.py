"""The interface of row rules: they update the rows of a push, with their state in columns beside the values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from torch.nn.functional import softshrink

from paceline.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

Numbers: TypeAlias = Mapping[str, Any]  # the hyperparameters, as of this update


@dataclass(frozen=True, slots=True)
class StateColumn:
    """A state that every row has, in the dtype of its table.

    Args:
        name: unique in its rule.
        width: numbers a row; 0 is as many as the row has.
        fill: what they are before the first update of a row. NaN is a good mark for "never written".
    """

    name: str
    width: int = 0
    fill: float = 0.0

    def elements(self, row_width: int) -> int:
        """Return how many numbers a row of `row_width` numbers has in this column."""
        return self.width or row_width


@runtime_checkable
class RowRule(Protocol):
    """Turns the gradients of some rows into new values; without memory of its own, the state is handed to it.

    Every row rule is lazy: rows that are not in an update do not change, whatever a dense rule of its name would do.
    A class given as "package.module:Rule" is built without arguments and must have these three members.
    """

    @property
    def columns(self) -> tuple[StateColumn, ...]:
        """Return the state that is kept for a row; always the same."""
        ...

    @property
    def echo(self) -> str:
        """Return the column that is sent with values and comes back with the gradients computed from them, or ""."""
        ...

    def update(
        self, values: Tensor, gradient: Tensor, state: Mapping[str, Tensor], hyper: Numbers, echo: Tensor | None
    ) -> None:
        """Change `values` and `state` in place; called without autograd, with copies that lie nowhere else.

        Args:
            values: [n, width], float32 or float64 whatever the table has; n distinct rows, possibly none.
            gradient: of the same shape and dtype; never write to it.
            state: [n, width of the column] each, by name.
            hyper: the hyperparameters, as of this update.
            echo: the echo column as the reader got it, NaN where it never read the row; None without readers.
        """
        ...


def declared(state: Mapping[str, Tensor], column: str, number: str) -> Tensor:
    """Return a column that `number` calls for; raise UsageError where rows were made without it."""
    if column not in state:
        raise UsageError(
            f"{number} is in use now, but it was not when the table was declared, so its rows have no {column}. "
            f"Declare the table with the {number} it will need."
        )
    return state[column]


def fresh_rows(column: Tensor) -> Tensor:
    """Return which rows of a column that begins as NaN have never been written, as positions."""
    return column[:, 0].isnan().nonzero()[:, 0]


def ascent(values: Tensor, gradient: Tensor, hyper: Numbers, decay: float) -> Tensor:
    """Return the gradient in the direction away from the goal, with weight decay; as torch.optim adds them up."""
    if hyper["maximize"]:
        gradient = gradient.neg()
    return gradient.add(values, alpha=decay) if decay else gradient


def soft_threshold(numbers: Tensor, threshold: float) -> Tensor:
    """Return sign(x) max(|x| - threshold, 0) of each number, never -0."""
    return softshrink(numbers, threshold).add_(0.0)
