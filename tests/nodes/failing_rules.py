"""Update rules that raise in the middle of an update: the second, or one that is not positive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor


class Dense:
    """Adds what is pushed, and gives up in its second update, after it has changed the values."""

    granularity = "element"

    def __init__(self) -> None:
        self.num_updates = 0

    def update(self, values: Sequence[Tensor], gradients: Sequence[Tensor | None], *_: object) -> None:
        for value, gradient in zip(values, gradients, strict=True):
            if gradient is not None:
                value.add_(gradient)
        self.num_updates += 1
        if self.num_updates == 2:
            raise ValueError("the rule gives up")

    def state(self) -> Mapping[str, Tensor]:
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        pass


class Rows:
    """The same for rows."""

    columns = ()
    echo = ""

    def __init__(self) -> None:
        self.num_updates = 0

    def update(self, values: Tensor, gradient: Tensor, *_: object) -> None:
        values.add_(gradient)
        self.num_updates += 1
        if self.num_updates == 2:
            raise ValueError("the rule gives up")


class PositiveRows:
    """Adds to rows what is pushed, and gives up where some of it is not positive, after it has changed the values."""

    columns = ()
    echo = ""

    def update(self, values: Tensor, gradient: Tensor, *_: object) -> None:
        values.add_(gradient)
        if not (gradient > 0).all():
            raise ValueError("the rule gives up")
