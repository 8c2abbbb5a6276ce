"""The layers of one worker, run one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError

Loss: TypeAlias = Callable[[Any, Any], Tensor]
Values: TypeAlias = Tensor | tuple[Tensor, ...]


class Stage(nn.Module):
    """Layers, of which each takes what the one before gives: a tensor, or a tuple of tensors as one argument.

    Args:
        layers: of this worker.
        loss: of what the last layer gives, where that is here.
        recompute: keep only the input of each layer, and run it again for backward, with the same random numbers.
    """

    def __init__(self, layers: Sequence[nn.Module], loss: Loss | None, *, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loss = loss
        self.recompute = recompute

    def run(self, values: Any) -> Any:  # noqa: ANN401 - whatever the layers take and give
        """Run the layers."""
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                values = checkpoint(layer, values, use_reentrant=False, preserve_rng_state=True)
            else:
                values = layer(values)
        return values

    def forward(self, *values: Tensor, targets: Any = None) -> Any:  # noqa: ANN401 - a tensor, or several
        """Return what goes to the next stage; of the last one the loss of a micro-batch, (1,)."""
        found = self.run(joined(values))
        if self.loss is None:
            return joined(tuple(value.contiguous() for value in parts(found, "a stage")))
        return self.loss(found, targets).reshape(1)


def joined(values: tuple[Tensor, ...]) -> Values:
    """Return what a layer takes: the tensor, where there is but one."""
    return values[0] if len(values) == 1 else values


def parts(values: object, what: str) -> tuple[Tensor, ...]:
    """Return the tensors that something is made of.

    Raises:
        UsageError: it is neither a tensor nor a tuple of tensors.
    """
    found: tuple[object, ...] = values if isinstance(values, tuple) else (values,)
    tensors = tuple(value for value in found if isinstance(value, Tensor))
    if not found or len(tensors) != len(found):
        kinds = ", ".join(type(value).__name__ for value in found)
        raise UsageError(f"{what} gives {kinds or 'nothing'}, expected a tensor or a tuple of tensors between stages.")
    return tensors
