"""Sharded tensors gathered into ordinary ones."""

from __future__ import annotations

from torch import Tensor, nn


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of which workers have slices as an ordinary one; they all must call it, and block until then.

    Example:
        >>> import torch
        >>> whole(torch.ones(2))  # nobody else has any of it
        tensor([1., 1.])
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    from torch.distributed.tensor import DTensor  # takes half a second

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
