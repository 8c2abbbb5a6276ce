"""An update rule of one's own: each value takes a step of fixed size against the sign of its gradient.

The servers import it by its path, `sign_rule:SignDescent`; `custom_rule.py` beside it uses it.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor


class SignDescent:
    """`value -= lr * sign(momentum)`, with momentum the decayed sum of the gradients (signSGD with momentum)."""

    granularity: Literal["element"] = "element"  # works on any piece of a tensor, so servers may cut tensors anywhere

    def __init__(self) -> None:
        self.momentum: dict[int, Tensor] = {}  # by piece, as the values are given to `update`

    def update(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        hyper: Sequence[Mapping[str, float]],
        groups: Sequence[int],
    ) -> None:
        """Update the values in place; a piece without gradient is left alone."""
        for piece, (value, gradient, group) in enumerate(zip(values, gradients, groups, strict=True)):
            if gradient is None:
                continue
            momentum = self.momentum.setdefault(piece, torch.zeros_like(value))
            momentum.mul_(hyper[group]["decay"]).add_(gradient)
            value.sub_(momentum.sign(), alpha=hyper[group]["lr"])

    def state(self) -> dict[str, Tensor]:
        """Return what has to be saved to continue."""
        return {f"{piece}.momentum": momentum for piece, momentum in self.momentum.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from what `state` returned."""
        self.momentum = {int(name.partition(".")[0]): momentum.clone() for name, momentum in state.items()}
