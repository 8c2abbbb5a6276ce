"""What a model must be for its gradients and parameters to be combined, sliced or held by servers."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from paceline.errors import UsageError
from paceline.model_parallel.tensor_plan import has_gradient_hooks


def require_apart(named: Mapping[str, Tensor], name: str) -> None:
    """Refuse parameters that share memory, as `b.data = a.data` makes them: each would get values of its own.

    Raises:
        UsageError: two of them do.

    Example:
        >>> import torch
        >>> weight = nn.Parameter(torch.zeros(2, 3))
        >>> require_apart({"first": weight[0], "second": weight[1]}, "model")
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
            raise UsageError(
                f"'{name}': the layer '{path}' makes sparse gradients: build it with sparse=False, or as "
                "paceline.Embedding, whose rows live on the servers."
            )


def require_no_gradient_hooks(model: nn.Module, name: str) -> None:
    """Refuse hooks on gradients of parameters that workers keep in slices: backward does not call them.

    Raises:
        UsageError: a parameter has one.
    """
    for path, parameter in model.named_parameters():
        if has_gradient_hooks(parameter, accumulated=not isinstance(parameter, DTensor)):  # torch calls these on slices
            raise UsageError(
                f"'{name}': parameter '{path}' has a hook on its gradient, which fsdp does not call, as backward "
                "leaves slices: change `.grad` between backward and step, or take another strategy."
            )


def storages_of_buffers(model: nn.Module | None) -> frozenset[int]:
    """Return the addresses of the storages that buffers of a model have."""
    return frozenset(one.untyped_storage().data_ptr() for one in model.buffers()) if model is not None else frozenset()


def require_no_aliases(model: nn.Module, name: str) -> None:
    """Refuse buffers that share memory with a parameter that is sliced: they would not follow it.

    Raises:
        UsageError: a buffer does.
    """
    own = {one.untyped_storage().data_ptr(): path for path, one in model.named_parameters() if one.numel()}
    for path, buffer in model.named_buffers():
        parameter = own.get(buffer.untyped_storage().data_ptr())
        if parameter is not None and buffer.numel():
            raise UsageError(
                f"'{name}': buffer '{path}' has the memory of parameter '{parameter}', and would not follow it under "
                "fsdp, which slices that: read the parameter itself in forward."
            )
