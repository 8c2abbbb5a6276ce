"""An update rule of a user, which keeps a state of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class Decaying:
    """Takes steps along a mean of gradients that fades, and less far from step to step."""

    granularity = "element"

    def __init__(self) -> None:
        self.means: dict[str, Tensor] = {}

    def update(
        self,
        values: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        hyper: Sequence[Mapping[str, float]],
        groups: Sequence[int],
    ) -> None:
        for index, (value, gradient, group) in enumerate(zip(values, gradients, groups, strict=True)):
            if gradient is not None:
                mean = self.means.setdefault(f"{index}.mean", torch.zeros_like(value))
                count = self.means.setdefault(f"{index}.count", torch.tensor(0, dtype=torch.int64))
                mean.mul_(0.5).add_(gradient)
                count += 1
                value.sub_(mean * (hyper[group]["lr"] / int(count)))

    def state(self) -> Mapping[str, Tensor]:
        return self.means

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.means = {name: tensor.clone() for name, tensor in state.items()}
