"""Cross entropy of scores of a split vocabulary: three numbers a token are reduced, and no scores are gathered.

Torch's `loss_parallel` does it too, but inside of it every other use of `log_softmax` has wrong gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

_SIGNATURE: Final = inspect.signature(functional.cross_entropy)
_REDUCTIONS: Final = ("none", "mean", "sum")
# Functions that only change the shape of a tensor, or return it.
_SHAPES: Final = frozenset(
    (
        *("flatten", "unflatten", "reshape", "view", "view_as", "transpose", "permute", "movedim", "swapaxes", "mT"),
        *("squeeze", "unsqueeze", "contiguous", "__getitem__", "__get__", "size", "dim", "numel", "__len__", "stride"),
    )
)


class SplitCrossEntropy(TorchFunctionMode):
    """A context in which `cross_entropy` accepts scores that are split over the ranks of a mesh by words.

    It returns an ordinary tensor, the same on all ranks. Label smoothing, probabilities as targets, and all other
    functions of the scores are left to torch.
    """

    def leave(self, scores: Tensor) -> None:
        """Handle scores for a kind of cross entropy that is left to torch."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - whatever the function gives
        """Call a function, or compute the loss in its place."""
        del types
        if func is functional.cross_entropy:
            given = _SIGNATURE.bind(*args, **(kwargs or {}))
            given.apply_defaults()
            if _is_known(**given.arguments):
                return _cross_entropy(**given.arguments)
            self.leave(given.arguments["input"])
        return func(*args, **(kwargs or {}))


class _NeedsWhole(Exception):
    """A loss does something else with split scores than their cross entropy."""


class _OnlyCrossEntropy(SplitCrossEntropy):
    """The same; before the loss, scores may only change their shape: torch would mix parts and wholes in backward."""

    def leave(self, scores: Tensor) -> None:
        """Refuse scores that are split."""
        if isinstance(scores, DTensor):
            raise _NeedsWhole

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - whatever the function gives
        """Call a function of split scores, unless it needs them whole."""
        is_fine = func is functional.cross_entropy or getattr(func, "__name__", "") in _SHAPES
        if not is_fine and any(isinstance(one, DTensor) for one in tree_leaves((args, kwargs))):
            raise _NeedsWhole
        return super().__torch_function__(func, types, args, kwargs)


def loss_of_split(loss: Callable[[Any, Any], Tensor], outputs: Any, targets: Any) -> Tensor:  # noqa: ANN401
    """Return a loss of outputs that may be scores of a split vocabulary, the same on all ranks.

    A loss that is more than a cross entropy of the scores is computed on gathered scores.
    """
    if not any(isinstance(one, DTensor) for one in tree_leaves(outputs)):
        return loss(outputs, targets)
    try:
        with _OnlyCrossEntropy():
            return loss(outputs, targets)
    except _NeedsWhole:
        pass
    except (
        RuntimeError,
        NotImplementedError,
    ) as error:  # torch cannot change this shape of split ones
        if "DTensor" not in str(error):
            raise
    return loss(tree_map_only(DTensor, DTensor.full_tensor, outputs), targets)


def plain(loss: Tensor) -> Tensor:
    """Return a loss of split scores as an ordinary tensor, the same on all ranks."""
    return loss.full_tensor() if isinstance(loss, DTensor) else loss


def _is_known(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    size_average: object,
    ignore_index: int,
    reduce: object,
    reduction: str,
    label_smoothing: float,
) -> bool:
    del weight, ignore_index
    plainly = size_average is None and reduce is None and reduction in _REDUCTIONS and label_smoothing == 0
    by_words = isinstance(input, DTensor) and input.placements == (Shard(_class_dim(input)),)
    return plainly and by_words and not isinstance(target, DTensor) and not target.is_floating_point()


def _cross_entropy(
    input: DTensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    **_: object,
) -> Tensor:
    counts = target != ignore_index
    wanted = target.masked_fill(~counts, 0)
    dim, num_words = _class_dim(input), input.shape[_class_dim(input)]
    if bool(((wanted < 0) | (wanted >= num_words)).any()):
        raise IndexError(f"a target is out of bounds: there are {num_words} words, and {ignore_index} is left out")
    local = input.to_local().movedim(dim, -1)
    mesh = input.device_mesh
    found = _OfTargets.apply(local, wanted, local.shape[-1] * mesh.get_local_rank(), mesh.get_group())
    weights = counts.to(found.dtype) if weight is None else weight[wanted] * counts
    found = torch.where(counts, found, 0) * weights
    if reduction == "none":
        return found
    return found.sum() / weights.sum() if reduction == "mean" else found.sum()


def _class_dim(scores: Tensor) -> int:
    return 1 if scores.ndim > 1 else 0


class _OfTargets(torch.autograd.Function):
    """Cross entropy of each target, (...), given the scores of this rank's words, (..., words)."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor, first: int, group: ProcessGroup) -> Tensor:  # noqa: ANN401 - torch's own
        exact = scores if scores.dtype == torch.float64 else scores.float()
        top = exact.amax(-1)
        dist.all_reduce(top, ReduceOp.MAX, group=group)
        shifted = exact - top.unsqueeze(-1)
        own = targets - first
        elsewhere = (own < 0) | (own >= scores.shape[-1])
        own = own.masked_fill(elsewhere, 0).unsqueeze(-1)
        raised = shifted.exp()
        sums = torch.stack((raised.sum(-1), shifted.gather(-1, own).squeeze(-1).masked_fill(elsewhere, 0.0)))
        dist.all_reduce(sums, group=group)
        total, at_target = sums
        ctx.save_for_backward(raised.div_(total.unsqueeze(-1)), own, elsewhere)
        ctx.dtype = scores.dtype
        return (total.log() - at_target).to(scores.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:  # noqa: ANN401
        shares, own, elsewhere = ctx.saved_tensors
        hit = (~elsewhere).to(shares.dtype).unsqueeze(-1)
        found = shares.scatter_add(-1, own, -hit) * gradients[0].to(shares.dtype).unsqueeze(-1)
        return found.to(ctx.dtype), None, None, None
