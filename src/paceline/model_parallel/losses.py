"""Loss of a batch from the losses of its micro-batches: a mean, a sum, a weighted mean, or none of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from paceline.errors import UsageError
from paceline.model_parallel.arrangement import whole
from paceline.model_parallel.tensor_plan import has_hooks
from paceline.torch_private import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from paceline.worker.validation import brief

Loss: TypeAlias = Callable[[Any, Any], Tensor]
Reduction: TypeAlias = Literal["mean", "sum"] | Callable[[Any], Any]  # the last returns the weight of targets

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


class Joining(msgspec.Struct, frozen=True):
    """How the loss of a batch follows from the losses of its micro-batches.

    Args:
        is_sum: whether it is their sum; else it is their mean.
        weigh: weight of a micro-batch in the mean, by its targets; None for equal weights.
        is_known: whether the loss is torch's own, so that this is certain.
        is_aligned: whether outputs and targets are compared element by element, so the first dimension of both is the
            batch.
    """

    is_sum: bool = False
    weigh: Callable[[Any], Any] | None = None
    is_known: bool = False
    is_aligned: bool = False

    def shares(self, targets: Sequence[object]) -> list[float]:
        """Return the factor of the loss of each micro-batch.

        >>> Joining(weigh=len).shares([[1], [2, 3, 4]])
        [0.25, 0.75]
        """
        if self.is_sum:
            return [1.0] * len(targets)
        weights = [1.0 if self.weigh is None else float(self.weigh(piece)) for piece in targets]
        total = sum(weights)
        return [weight / total if total else 1 / len(targets) for weight in weights]


def joining_of(loss: Loss, said: Reduction | None) -> Joining | None:
    """Return how the loss of a batch follows from those of its micro-batches, by `said` or for torch's own losses.

    Returns:
        None for an unknown loss, which is computed on the whole batch.

    Raises:
        UsageError: `said` contradicts the loss, or the loss returns a number for each sample.

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
    """Return the function of torch that a loss calls, with its options; None for other losses."""
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
    weight = options.get("weight")
    if options.get("label_smoothing") and weight is not None and not weight.all():
        return None  # targets of a class without weight count by their smoothing, and not in the mean
    weigh = partial(_counted, weight=weight, ignored=options.get("ignore_index", -100))
    return Joining(weigh=weigh, is_known=True)


def _counted(targets: Tensor, *, weight: Tensor | None, ignored: int) -> float:
    """Return the weight of targets in the mean of a cross entropy: their number, or the weights of their classes."""
    if targets.is_floating_point():  # probabilities of classes, of which each sample counts once
        return 1.0
    counted = targets[targets != ignored]
    return float(counted.numel() if weight is None else weight[counted].double().sum())


# -- the loss of one step --------------------------------------------------------------------------------------------


class Taking(ABC):
    """Computes the loss of one batch, whose micro-batches come one after the other.

    Attributes:
        total: loss of the batch, once all micro-batches have come.
    """

    total: Tensor

    @abstractmethod
    def __call__(self, outputs: Any) -> Tensor:  # noqa: ANN401 - whatever the last layer gives
        """Return the tensor of shape (1,) that backward of the next micro-batch begins with.

        It is of float32 whatever the loss is: a schedule is told the dtypes of a stage before there is a loss, and
        older versions of torch compare them in every step.
        """
        ...


class PieceLoss(Taking):
    """Loss computed on each micro-batch, times its share.

    Args:
        loss: loss of a micro-batch.
        joining: how the losses of micro-batches become that of the batch.
        targets: targets of each micro-batch.
    """

    def __init__(self, loss: Loss, joining: Joining, targets: Sequence[object]) -> None:
        self.total = torch.zeros((), dtype=torch.float64)
        self._loss, self._joining = loss, joining
        self._left: list[tuple[Any, float]] = list(zip(targets, joining.shares(targets), strict=True))

    def __call__(self, outputs: Any) -> Tensor:  # noqa: ANN401 - whatever the last layer gives
        """Return the share of the next micro-batch in the loss, of shape (1,)."""
        targets, share = self._left.pop(0)
        if self._joining.is_aligned and not _are_aligned(outputs, targets):
            raise UsageError(
                f"the loss compares outputs {tuple(outputs.shape)} with targets {tuple(targets.shape)}, which would "
                "be broadcast: expected the same number of dimensions, and as many samples."
            )
        if share == 0:  # its own mean would be over nothing
            return _nothing(outputs)
        loss = one_number(self._loss(outputs, targets)).reshape(1) * share
        self.total += loss.detach().double().sum()
        return loss.float()


class BatchLoss(Taking):
    """Loss computed on the whole batch, once the outputs of all micro-batches are there; for any loss.

    Args:
        loss: loss of the batch.
        targets: targets of the batch.
        num: number of micro-batches.
        dims: of each output leaf, the dimension along which micro-batches are concatenated; None for leaves that do
            not grow with the batch.
    """

    def __init__(self, loss: Loss, targets: object, num: int, dims: Sequence[int | None]) -> None:
        self._loss, self._targets, self._num, self._dims = loss, targets, num, dims
        self._pieces: list[list[Any]] = []
        self._gradients: list[list[Tensor | None]] = []

    def __call__(self, outputs: Any) -> Tensor:  # noqa: ANN401 - whatever the last layer gives
        """Keep the outputs of the next micro-batch; with the last one compute the loss."""
        leaves, spec = tree_flatten(outputs)
        index = len(self._pieces)
        self._pieces.append([one.detach() if isinstance(one, Tensor) else one for one in leaves])
        if len(self._pieces) == self._num:
            self._take(spec, [isinstance(one, Tensor) and one.requires_grad for one in leaves])
        return _Later.apply(self, index, *(one for one in leaves if isinstance(one, Tensor) and one.requires_grad))

    def gradients_of(self, index: int) -> list[Tensor | None]:
        """Return the gradients of those outputs of a micro-batch that require gradients."""
        return self._gradients[index]

    def _take(self, spec: TreeSpec, learned: Sequence[bool]) -> None:
        joined = joined_pieces(self._pieces, self._dims)
        self._pieces = []
        leaves = [one.requires_grad_() if learns else one for one, learns in zip(joined, learned, strict=True)]
        loss = one_number(self._loss(tree_unflatten(leaves, spec), self._targets)).reshape(())
        loss.backward()
        self.total = loss.detach().double()
        found = [
            [one.grad] * self._num if one.grad is None or dim is None else one.grad.chunk(self._num, dim)
            for one, dim, learns in zip(leaves, self._dims, learned, strict=True)
            if learns
        ]
        self._gradients = [list(pieces) for pieces in zip(*found, strict=True)]


class _Later(torch.autograd.Function):
    """Begins the backward of a micro-batch with gradients that are known once all micro-batches have come."""

    @staticmethod
    def forward(ctx: Any, taking: BatchLoss, index: int, *outputs: Tensor) -> Tensor:  # noqa: ANN401 - torch's own
        del outputs
        ctx.taking, ctx.index = taking, index
        return torch.zeros(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # noqa: ANN401
        del gradients
        return (None, None, *ctx.taking.gradients_of(ctx.index))


def one_number(loss: object) -> Tensor:
    """Return what a loss function has given.

    Raises:
        UsageError: it is not a tensor of one number.

    Example:
        >>> one_number(torch.ones(1))
        tensor([1.])
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise UsageError(f"the loss gives {brief(loss)}, expected a tensor with one number for the batch.")
    return loss


def cut_targets(targets: object, batch_size: int, num: int) -> list[Any]:
    """Return the targets of each micro-batch: tensors as long as the batch are cut, others are repeated."""
    if isinstance(targets, Tensor) and (targets.ndim == 0 or len(targets) != batch_size):
        num_targets = len(targets) if targets.ndim else 1
        raise UsageError(f"the batch has {batch_size} samples and {num_targets} targets, expected as many.")

    def piece(index: int, one: Tensor) -> Tensor:
        return one.chunk(num)[index] if one.ndim and len(one) == batch_size else one

    return [tree_map_only(Tensor, partial(piece, index), targets) for index in range(num)]


def batch_dims(one: object, two: object, is_said: bool) -> list[int | None]:
    """Return, for each leaf, the dimension along which the outputs of micro-batches are concatenated.

    Args:
        one: outputs of a micro-batch.
        two: outputs of a micro-batch twice as large.
        is_said: whether the script names the reduction, so that an output need not have such a dimension.

    Raises:
        UsageError: an output requires gradients and has no such dimension.
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
                "the loss is not one of torch's own, so it is computed on the whole batch, but an output of "
                f"shape {tuple(small.shape)} does not grow with the batch: give reduction='mean', 'sum', or a function "
                "for the weight of targets, to compute the loss on each micro-batch."
            )
        dims.append(grown[0] if len(grown) == 1 else None)
    return dims


def joined_pieces(pieces: Sequence[Sequence[Any]], dims: Sequence[int | None]) -> list[Any]:
    """Return the output leaves of a batch, given those of its micro-batches.

    Raises:
        UsageError: a leaf that does not grow with the batch differs between micro-batches.
    """
    return [
        _only(found) if dim is None else torch.cat(list(found), dim)
        for found, dim in zip(zip(*pieces, strict=True), dims, strict=True)
    ]


def _only(found: Sequence[Any]) -> Any:  # noqa: ANN401 - whatever the last layer gives
    """Return the leaf that all micro-batches have, which is that of the batch."""
    first = found[0]
    for other in found[1:]:
        if isinstance(first, Tensor | int | float) and not _are_equal(first, other):
            raise UsageError(
                f"the loss is computed on the whole batch, but an output, {brief(first)}, does not grow with the batch "
                "and differs between its micro-batches, so there is none of the batch: leave it out of what the model "
                "gives, or give reduction='mean', 'sum', or a function for the weight of targets, to compute the loss "
                "on each micro-batch."
            )
    return first


def _are_equal(one: Tensor | float, other: Any) -> bool:  # noqa: ANN401
    if isinstance(one, Tensor):
        same = isinstance(other, Tensor) and one.shape == other.shape
        return same and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
    return type(one) is type(other) and bool(one == other or one != one)  # NaN is equal to NaN here


def require_joining(
    loss: Loss, joining: Joining, outputs: object, dims: Sequence[int | None], targets: object, pieces: Sequence[object]
) -> None:
    """Raise UsageError when the loss of a batch does not follow from its micro-batches as the script says.

    Args:
        loss: function of outputs and targets.
        joining: how the script says it follows.
        outputs: outputs of one micro-batch, which stand in for those of each.
        dims: of each output leaf, the dimension along which micro-batches are concatenated.
        targets: targets of the batch.
        pieces: targets of each micro-batch.
    """
    leaves, spec = tree_flatten(outputs)
    if any(dim is None and isinstance(one, Tensor) for one, dim in zip(leaves, dims, strict=True)):
        return  # the output for the whole batch is not known
    with torch.no_grad():
        taking = PieceLoss(loss, joining, pieces)
        for _ in pieces:
            taking(outputs)
        joined = tree_unflatten(joined_pieces([leaves] * len(pieces), dims), spec)
        expected, found = float(loss(joined, targets)), float(taking.total)
    if abs(expected - found) > 1e-3 * max(abs(expected), abs(found)):  # beyond rounding of float32 and half
        said = "sum" if joining.is_sum else "mean" if joining.weigh is None else "mean, weighed as the script says,"
        raise UsageError(
            f"parallelize: reduction says that the loss of a batch is the {said} of those of its micro-batches, but "
            f"for outputs like those of the first that is {found:g}, and the loss of all {len(pieces)} together is "
            f"{expected:g}. Leave reduction out to compute the loss on the whole batch."
        )


def _are_aligned(outputs: Any, targets: Any) -> bool:  # noqa: ANN401
    tensors = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    return tensors and outputs.ndim == targets.ndim and outputs.shape[:1] == targets.shape[:1]


def _nothing(outputs: object) -> Tensor:
    """Return a loss of 0 with gradients of 0, for outputs whose targets are all ignored."""
    learned = [one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad]
    return whole(sum((one[:0].sum() for one in learned), torch.zeros(()))).reshape(1).float()
