"""Runs of layers beside training that leave no trace in them, and inputs that layers may change in place."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_private import buffers_of


@contextmanager
def unchanged_buffers(module: nn.Module) -> Generator[None]:
    """Give a module back the buffers that it had, with their values, at the end of the block.

    Layers change buffers in place, or put other tensors in their place.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> with unchanged_buffers(norm):
        ...     _ = norm(torch.ones(3, 2))
        ...     norm.running_mean = None
        >>> norm.running_mean
        tensor([0., 0.])
    """
    before = [
        (owner, name, buffer, None if buffer is None else buffer.clone())
        for owner in module.modules()
        for name, buffer in buffers_of(owner).items()
    ]
    try:
        yield
    finally:
        for owner, name, buffer, values in before:
            if buffer is not None and values is not None:
                buffer.data.copy_(values)
            setattr(owner, name, buffer)


def changeable(tensor: Tensor) -> Tensor:
    """Return the same tensor as a layer gives it: the next one may change it in place.

    Torch refuses that for leaves, as what comes from another worker is, and micro-batches are views of one batch, of
    which a change in one would be taken for a change in all. Memory is shared with the tensor.

    Example:
        >>> leaf = torch.ones(2, requires_grad=True)
        >>> changeable(leaf).mul_(3).sum().backward()
        >>> leaf.grad
        tensor([3., 3.])
    """
    found: Tensor = _Changeable.apply(tensor)
    return found


class _Changeable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        del ctx
        return tensor.data  # not a view, and with a count of changes of its own

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ANN401
        del ctx
        return gradients[0]
