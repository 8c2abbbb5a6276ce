"""The consecutive layers of a model that one worker runs."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from paceline.errors import UsageError
from paceline.model_parallel.losses import Taking

Values: TypeAlias = Tensor | tuple[Tensor, ...]


class PipelineStage(nn.Module):
    """Layers, of which each takes what the one before gives: a tensor, or a tuple of tensors as one argument.

    Args:
        layers: of this worker.
        recompute: keep only the input of each layer, and run it again for backward, with the same random numbers and
            buffers, which it leaves as they are.

    Attributes:
        taking: takes the loss of what the last layer gives, where that is here, in the step under way.
    """

    def __init__(self, layers: Sequence[nn.Module], *, recompute: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.recompute = recompute
        self.taking: Taking | None = None

    def run(self, values: Any) -> Any:  # noqa: ANN401 - whatever the layers take and give
        """Run the layers."""
        for layer in self.layers:
            if self.recompute and torch.is_grad_enabled():
                again = _Again(layer)
                values = checkpoint(layer, values, use_reentrant=False, context_fn=again.contexts)
            else:
                values = layer(values)
        return values

    def forward(self, *values: Tensor) -> Any:  # noqa: ANN401 - a tensor, or several
        """Return what goes to the next stage; of the last one what the backward of a micro-batch begins with, (1,)."""
        found = self.run(joined(values))
        if self.taking is None:
            return joined(tuple(value.contiguous() for value in parts(found, "a stage")))
        return self.taking(found)


class _Again:
    """Runs a layer a second time with the buffers that it had the first time, and leaves those that it has by then.

    BatchNorm would move its statistics twice, and what reads a buffer that it has changed would compute something else.
    """

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self._before: list[tuple[nn.Module, str, Tensor]] = []  # of those that the first run has changed

    def contexts(self) -> tuple[Any, Any]:
        """Return what is entered around the first run, and around the second."""
        return self._first(), self._second()

    @contextmanager
    def _first(self) -> Generator[None]:
        before = [(owner, name, buffer.clone()) for owner, name, buffer in _buffers(self._layer)]
        yield
        self._before = [
            (owner, name, one) for owner, name, one in before if not torch.equal(owner.get_buffer(name), one)
        ]

    @contextmanager
    def _second(self) -> Generator[None]:
        now = [(owner, name, owner.get_buffer(name)) for owner, name, _ in self._before]
        for owner, name, before in self._before:
            setattr(owner, name, before.clone())  # another tensor: what autograd has kept stays as it is
        try:
            yield
        finally:
            for owner, name, buffer in now:
                setattr(owner, name, buffer)


def _buffers(layer: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in layer.modules():
        for name, buffer in module.named_buffers(recurse=False):
            yield module, name, buffer


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
