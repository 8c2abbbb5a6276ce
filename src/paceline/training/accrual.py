"""Gradients that a worker adds up between two pushes, and steps by itself meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.node.outgoing import NONFINITE_ADVICE, some_parameters
from paceline.tensors.summing import num_nonfinite
from paceline.tensors.table import NonFinite
from paceline.training.flat import Flat


@dataclass(slots=True)
class Accrual:
    """The sum of a worker's gradients since its last push.

    Attributes:
        total: (elements of all,), on the CPU.
        num_steps: that it is the sum of.
        num_samples: that these stand for.
    """

    flat: Flat
    total: Tensor = field(init=False)
    num_steps: int = 0
    num_samples: float = 0.0
    _parts: list[Tensor] = field(init=False)  # of `total`, one a tensor
    _present: set[int] = field(default_factory=set[int])  # tensors that had a gradient in any of the steps

    def __post_init__(self) -> None:
        """Start with nothing."""
        self.total = self.flat.empty().zero_()
        self._parts = self.flat.parts(self.total)

    def add(self, gradients: Mapping[int, Tensor], samples: float) -> None:
        """Add the gradients of a step, by the indices of their tensors."""
        for index, gradient in gradients.items():
            self._parts[index].add_(gradient.to(self._parts[index].device))
        self._present.update(gradients)
        self.num_steps += 1
        self.num_samples += samples

    def absent(self) -> tuple[int, ...]:
        """Return the indices of the tensors that had no gradient in any of the steps."""
        return tuple(index for index in range(len(self._parts)) if index not in self._present)

    def descend(self, rates: Sequence[float]) -> None:
        """Take the steps of all that is in here on the tensors, at a rate for each."""
        descend(self.flat, {index: self._parts[index] for index in self._present}, rates)

    def clear(self) -> None:
        """Start again."""
        self.total.zero_()
        self._present.clear()
        self.num_steps, self.num_samples = 0, 0.0


def descend(flat: Flat, gradients: Mapping[int, Tensor], rates: Sequence[float]) -> None:
    """Step each tensor against its gradient, both by the index of the tensor."""
    with torch.no_grad():
        for index, gradient in gradients.items():
            tensor = flat.tensors[index]
            tensor.add_(gradient.to(tensor.device), alpha=-rates[index])


def gradients_of(flat: Flat, nonfinite: NonFinite, where: str) -> dict[int, Tensor] | None:
    """Return the gradients that tensors have, by index; None if they may not be used.

    Under "zero" what is not finite counts as 0, under "ignore" as it is.

    Raises:
        UsageError: one is sparse, or under "halt" not finite.
    """
    found: dict[int, Tensor] = {}
    for index, (name, tensor) in enumerate(flat.named.items()):
        gradient = tensor.grad
        if gradient is None:
            continue
        if gradient.layout != torch.strided:
            raise UsageError(f"parameter '{name}' has a sparse gradient: build its layer with sparse=False.")
        found[index] = gradient.detach()
    if nonfinite == "ignore" or not any(map(num_nonfinite, found.values())):
        return found
    if nonfinite == "zero":
        return {index: gradient.nan_to_num(0.0, 0.0, 0.0) for index, gradient in found.items()}
    if nonfinite == "halt":
        raise UsageError(f"{where}: a gradient has NaN or infinity: the loss was not finite, or the rate is too high.")
    return None


def refusal_of(named: Mapping[str, Tensor]) -> str:
    """Say why a step is left out: which of these parameters have gradients that are not finite."""
    dense = {name: tensor.grad for name, tensor in named.items() if tensor.grad is not None}
    bad = [name for name, gradient in dense.items() if gradient.layout == torch.strided and num_nonfinite(gradient)]
    return f"the gradient of {some_parameters(bad, len(dense))} has NaN or infinity. {NONFINITE_ADVICE}"
