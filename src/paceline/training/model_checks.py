"""What a model must be for its gradients and parameters to be combined, sliced or held by servers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import UsageError
from paceline.model_parallel.tensor_plan import has_gradient_hooks
from paceline.training.flat import DENSE


def require_own_memory(named: Mapping[str, Tensor], name: str) -> None:
    """Refuse parameters that share memory, as `b.data = a.data` makes them: each would get values of its own.

    Raises:
        UsageError: two of them do.

    Example:
        >>> weight = nn.Parameter(torch.zeros(2, 3))
        >>> require_own_memory({"first": weight[0], "second": weight[1]}, "model")
    """
    whole = [(own, one) for own, one in named.items() if one.is_contiguous() and one.numel()]
    placed = sorted((str(one.device), one.data_ptr(), one.nbytes, own) for own, one in whole)
    for (device, start, size, first), (other, begins, _, second) in pairwise(placed):
        if start and device == other and begins < start + size:  # 0: without memory
            raise UsageError(
                f"'{name}': the parameters '{first}' and '{second}' have memory in common, and each would get values "
                "of its own: make them one torch.nn.Parameter, as torch does for tied weights."
            )


def require_dense_gradients(model: nn.Module, name: str) -> None:
    """Refuse layers whose gradients are sparse, of which workers cannot add up slices or sums.

    Raises:
        UsageError: a layer has `sparse=True`.
    """
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise UsageError(f"'{name}': the layer '{path}' makes sparse gradients: build it with {DENSE}")


def require_no_gradient_hooks(named: Iterable[tuple[str, Tensor]], name: str) -> None:
    """Refuse hooks on gradients of parameters that workers keep in slices: backward does not call them.

    Raises:
        UsageError: a parameter has one.
    """
    for path, parameter in named:
        if has_gradient_hooks(parameter, accumulated=not isinstance(parameter, DTensor)):  # torch calls these on slices
            raise UsageError(
                f"'{name}': parameter '{path}' has a hook on its gradient, which fsdp does not call, as backward "
                "leaves slices: change `.grad` between backward and step, or take another strategy."
            )


def storages_of(buffers: Iterable[tuple[str, Tensor]]) -> dict[int, str]:
    """Return the addresses of the storages of buffers, each with a name; sparse ones have none."""
    dense = ((path, one) for path, one in buffers if one.layout == torch.strided and one.numel())
    return {one.untyped_storage().data_ptr(): path for path, one in dense}


def require_no_aliases(model: nn.Module, name: str) -> None:
    """Refuse buffers that share memory with a parameter that is sliced: they would not follow it.

    Raises:
        UsageError: a buffer does.
    """
    buffers = storages_of(model.named_buffers())
    for path, parameter in model.named_parameters():
        buffer = buffers.get(parameter.untyped_storage().data_ptr()) if parameter.numel() else None
        if buffer is not None:
            raise UsageError(
                f"'{name}': buffer '{buffer}' has the memory of parameter '{path}', and would not follow it under "
                "fsdp, which slices that: read the parameter itself in forward."
            )
