"""Sharded tensors gathered into ordinary ones."""

from __future__ import annotations

from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor as an ordinary one; all workers must call it, and block until all have.

    Example:
        >>> import torch
        >>> whole(torch.ones(2))  # not sharded
        tensor([1., 1.])
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    from torch.distributed.tensor import DTensor  # takes half a second

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
