"""Loss of a batch from the losses of its micro-batches: a mean, a sum, a weighted mean, or none of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from paceline.errors import UsageError
from paceline.model_parallel.part import whole
from paceline.model_parallel.tensor_plan import has_hooks

Loss: TypeAlias = Callable[[Any, Any], Tensor]
Reduction: TypeAlias = Literal["mean", "sum"] | Callable[[Any], Any]  # the last says what targets weigh in the mean

_BY_CLASS: Final[tuple[Callable[..., Tensor], ...]] = (functional.cross_entropy, functional.nll_loss)
_BY_ELEMENT: Final[tuple[Callable[..., Tensor], ...]] = (
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits),
)
_MODULES: Final[Mapping[type[nn.Module], Callable[..., Tensor]]] = {
    nn.CrossEntropyLoss: functional.cross_entropy,
    nn.NLLLoss: functional.nll_loss,
    nn.MSELoss: functional.mse_loss,
    nn.L1Loss: functional.l1_loss,
    nn.SmoothL1Loss: functional.smooth_l1_loss,
    nn.HuberLoss: functional.huber_loss,
    nn.BCELoss: functional.binary_cross_entropy,
    nn.BCEWithLogitsLoss: functional.binary_cross_entropy_with_logits,
}
_OPTIONS: Final = ("reduction", "ignore_index", "weight", "pos_weight", "label_smoothing", "beta", "delta")
_REDUCTIONS: Final = ("mean", "sum")


@dataclass(frozen=True, slots=True)
class Joining:
    """How a loss of a batch follows from those of its micro-batches.

    Args:
        is_sum: it is their sum; else their mean.
        weigh: what a micro-batch weighs in the mean, by its targets; None where all weigh the same.
        is_known: the loss is torch's own, so that this is certain.
        is_aligned: outputs and targets are taken element by element, so the first dimension of both is the batch.
    """

    is_sum: bool = False
    weigh: Callable[[Any], Any] | None = None
    is_known: bool = False
    is_aligned: bool = False

    def shares(self, targets: Sequence[object]) -> list[float]:
        """Return what the loss of each micro-batch is multiplied by.

        >>> Joining(weigh=len).shares([[1], [2, 3, 4]])
        [0.25, 0.75]
        """
        if self.is_sum:
            return [1.0] * len(targets)
        weights = [1.0 if self.weigh is None else float(self.weigh(piece)) for piece in targets]
        total = sum(weights)
        return [weight / total if total else 1 / len(targets) for weight in weights]


def joining_of(loss: Loss, said: Reduction | None) -> Joining | None:
    """Return how a loss of a batch follows from those of its micro-batches: as the script says, or as torch's own does.

    Returns:
        None for a loss of which nothing is known: it has to be taken of the whole batch.

    Raises:
        UsageError: the script says something else than the loss does, or one that gives a number for each sample.

    Example:
        >>> joining_of(functional.mse_loss, None).is_sum, joining_of(lambda outputs, targets: outputs.sum(), None)
        (False, None)
    """
    if isinstance(said, str) and said not in _REDUCTIONS:
        raise UsageError(f"parallelize: reduction is {said!r}, expected 'mean', 'sum', or what targets weigh.")
    function, options = _opened(loss)
    known = _known(function, options) if function is not None else None
    if known is not None and isinstance(said, str) and known.is_sum != (said == "sum"):
        raise UsageError(
            f"parallelize: reduction is {said!r}, but the loss has reduction={options.get('reduction', 'mean')!r}: "
            "leave it out."
        )
    if known is not None and not callable(said):
        return known
    return Joining(said == "sum", said if callable(said) else None) if said is not None else None


def _opened(loss: Loss) -> tuple[Callable[..., Tensor] | None, Mapping[str, Any]]:
    """Return the function of torch that a loss is, with its options; None for another."""
    if isinstance(loss, nn.Module):
        plain = type(loss) in _MODULES and "forward" not in vars(loss) and not has_hooks(loss)
        options = {name: getattr(loss, name) for name in _OPTIONS if hasattr(loss, name)}
        return (_MODULES[type(loss)], options) if plain else (None, {})
    options: Mapping[str, Any] = {}
    function: Any = loss
    if isinstance(function, partial) and not function.args:
        function, options = function.func, function.keywords
    return (function if function in (*_BY_CLASS, *_BY_ELEMENT) else None), options


def _known(function: Callable[..., Tensor], options: Mapping[str, Any]) -> Joining | None:
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        raise UsageError(
            "parallelize: the loss has reduction='none', expected one number for the batch: 'mean', 'sum'."
        )
    if reduction not in _REDUCTIONS or set(options) - set(_OPTIONS):
        return None
    if function in _BY_ELEMENT:
        weights = [options.get("weight"), options.get("pos_weight")]
        if any(weight is not None for weight in weights):  # may have a weight for each sample of the batch
            return None
        return Joining(reduction == "sum", is_known=True, is_aligned=True)
    if reduction == "sum":
        return Joining(is_sum=True, is_known=True)
    weigh = partial(_counted, weight=options.get("weight"), ignored=options.get("ignore_index", -100))
    return Joining(weigh=weigh, is_known=True)


def _counted(targets: Tensor, *, weight: Tensor | None, ignored: int) -> float:
    """Return what targets weigh in the mean of a cross entropy: those that count, or the weights of their classes."""
    if targets.is_floating_point():  # probabilities of classes, of which each sample counts once
        return 1.0
    counted = targets[targets != ignored]
    return float(counted.numel() if weight is None else weight[counted].double().sum())


# -- the loss of one step --------------------------------------------------------------------------------------------


class Taking(ABC):
    """Takes the loss of one batch, whose micro-batches come one after the other.

    Attributes:
        total: the loss of the batch, once all have come.
    """

    total: Tensor

    @abstractmethod
    def __call__(self, outputs: Any) -> Tensor:  # noqa: ANN401 - whatever the last layer gives
        """Return what backward begins with, (1,), for the next micro-batch."""
        ...


class PieceLoss(Taking):
    """The loss of each micro-batch by itself, times its share.

    Args:
        loss: of a micro-batch.
        joining: how their losses become one.
        targets: of each micro-batch.
    """

    def __init__(self, loss: Loss, joining: Joining, targets: Sequence[object]) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self._loss, self._joining = loss, joining
        self._left: list[tuple[Any, float]] = list(zip(targets, joining.shares(targets), strict=True))

    def __call__(self, outputs: Any) -> Tensor:  # noqa: ANN401 - whatever the last layer gives
        """Return the share of the next micro-batch in the loss, (1,)."""
        targets, share = self._left.pop(0)
        if self._joining.is_aligned and not _are_aligned(outputs, targets):
            raise UsageError(
                f"the loss is taken of outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}, which would "
                "be spread over each other: expected the same number of dimensions, and as many samples."
            )
        if share == 0:  # its own mean would be over nothing
            return _nothing(outputs)
        loss = self._loss(outputs, targets).reshape(1) * share
        self.total += loss.detach().double().sum()
        return loss


class BatchLoss(Taking):
    """The loss of the whole batch, once the outputs of all micro-batches are here; for any loss there is.

    Args:
        loss: of the batch.
        targets: of the batch.
        num: of micro-batches.
        dims: along which the micro-batches of each output lie one after the other; None for what all have the same.
    """

    def __init__(self, loss: Loss, targets: object, num: int, dims: Sequence[int | None]) -> None:
        self._loss, self._targets, self._num, self._dims = loss, targets, num, dims
        self._pieces: list[list[Any]] = []
        self._gradients: list[list[Tensor | None]] = []

    def __call__(self, outputs: Any) -> Tensor:  # noqa: ANN401 - whatever the last layer gives
        """Keep the outputs of the next micro-batch; with the last one take the loss of all."""
        leaves, spec = tree_flatten(outputs)
        index = len(self._pieces)
        self._pieces.append([one.detach() if isinstance(one, Tensor) else one for one in leaves])
        if len(self._pieces) == self._num:
            self._take(spec, [isinstance(one, Tensor) and one.requires_grad for one in leaves])
        return _Later.apply(self, index, *(one for one in leaves if isinstance(one, Tensor) and one.requires_grad))

    def gradients_of(self, index: int) -> list[Tensor | None]:
        """Return the gradients of the outputs of a micro-batch that have any."""
        return self._gradients[index]

    def _take(self, spec: TreeSpec, learned: Sequence[bool]) -> None:
        joined = joined_pieces(self._pieces, self._dims)
        self._pieces = []
        leaves = [one.requires_grad_() if learns else one for one, learns in zip(joined, learned, strict=True)]
        loss = self._loss(tree_unflatten(leaves, spec), self._targets).reshape(())
        loss.backward()
        self.total = loss.detach().double()
        found = [
            [None] * self._num if one.grad is None else one.grad.chunk(self._num, dim)
            for one, dim, learns in zip(leaves, self._dims, learned, strict=True)
            if learns
        ]
        self._gradients = [list(pieces) for pieces in zip(*found, strict=True)]


class _Later(torch.autograd.Function):
    """Begins the backward of a micro-batch with gradients that are known once all have come."""

    @staticmethod
    def forward(ctx: Any, taking: BatchLoss, index: int, *outputs: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        del outputs
        ctx.taking, ctx.index = taking, index
        return torch.zeros(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        del gradients
        return (None, None, *ctx.taking.gradients_of(ctx.index))


def cut_targets(targets: object, batch_size: int, num: int) -> list[Any]:
    """Return the targets of each micro-batch: of tensors in it that have as many entries as the batch, their part."""
    if isinstance(targets, Tensor) and (targets.ndim == 0 or len(targets) != batch_size):
        num_targets = len(targets) if targets.ndim else 1
        raise UsageError(f"the batch has {batch_size} samples and {num_targets} targets, expected as many.")

    def piece(index: int, one: Tensor) -> Tensor:
        return one.chunk(num)[index] if one.ndim and len(one) == batch_size else one

    return [tree_map_only(Tensor, partial(piece, index), targets) for index in range(num)]


def batch_dims(one: object, two: object, is_said: bool) -> list[int | None]:
    """Return along which dimension the outputs of two micro-batches lie one after the other, for each leaf.

    Args:
        one: the outputs of a micro-batch.
        two: those of one twice as large.
        is_said: how losses become one is known, so that an output need not have such a dimension.

    Raises:
        UsageError: an output that has gradients and no such dimension.
    """
    dims: list[int | None] = []
    for small, large in zip(tree_leaves(one), tree_leaves(two), strict=True):
        grown = [
            dim
            for dim in range(small.ndim if isinstance(small, Tensor) and small.ndim == large.ndim else 0)
            if large.shape[dim] == 2 * small.shape[dim]
        ]
        if len(grown) != 1 and isinstance(small, Tensor) and small.requires_grad and not is_said:
            raise UsageError(
                "the loss is not one of torch's own, so it is taken of the whole batch, but an output of "
                f"shape {tuple(small.shape)} does not grow with the batch: say reduction='mean', 'sum', or what "
                "targets weigh, to have the loss taken of each micro-batch."
            )
        dims.append(grown[0] if len(grown) == 1 else None)
    return dims


def joined_pieces(pieces: Sequence[Sequence[Any]], dims: Sequence[int | None]) -> list[Any]:
    """Return the leaves of the outputs of a batch, given those of its micro-batches."""
    return [
        found[0] if dim is None else torch.cat(list(found), dim)
        for found, dim in zip(zip(*pieces, strict=True), dims, strict=True)
    ]


def require_joining(
    loss: Loss, joining: Joining, outputs: object, dims: Sequence[int | None], targets: object, pieces: Sequence[object]
) -> None:
    """Raise UsageError when the loss of a batch does not follow from its micro-batches as the script says.

    Args:
        loss: of outputs and targets.
        joining: as the script says.
        outputs: of one micro-batch, which stand in for those of each.
        dims: along which the outputs of several lie one after the other.
        targets: of the batch.
        pieces: those of each micro-batch.
    """
    leaves, spec = tree_flatten(outputs)
    if any(dim is None and isinstance(one, Tensor) for one, dim in zip(leaves, dims, strict=True)):
        return  # what such an output is for the whole batch is not known
    with torch.no_grad():
        taking = PieceLoss(loss, joining, pieces)
        for _ in pieces:
            taking(outputs)
        joined = tree_unflatten(joined_pieces([leaves] * len(pieces), dims), spec)
        expected, found = float(loss(joined, targets)), float(taking.total)
    if abs(expected - found) > 1e-3 * max(abs(expected), abs(found)):  # what float32 and half precision round is less
        said = "sum" if joining.is_sum else "mean" if joining.weigh is None else "mean, weighed as the script says,"
        raise UsageError(
            f"parallelize: reduction says that the loss of a batch is the {said} of those of its micro-batches, but "
            f"for outputs like those of the first that is {found:g}, and the loss of all {len(pieces)} together is "
            f"{expected:g}. Leave reduction out to have the loss taken of the whole batch."
        )


def _are_aligned(outputs: Any, targets: Any) -> bool:  # noqa: ANN401
    tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    return tensors and outputs.ndim == targets.ndim and outputs.shape[:1] == targets.shape[:1]


def _nothing(outputs: object) -> Tensor:
    """Return 0 as a loss of outputs whose targets all are left out, with gradients of 0."""
    learned = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
    return whole(sum((one[:0].sum() for one in learned), torch.zeros(()))).reshape(1)
