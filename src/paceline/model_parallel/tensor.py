"""Tensor parallelism: each layer of a model is split over the ranks of a mesh, which compute it together.

A linear layer split by columns computes a part of the features on each rank; the next one, split by rows, takes these
parts and sums the results: one sum forward and one backward for the pair. Attention is such a pair around its heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from paceline.model_parallel.arrangement import whole
from paceline.model_parallel.split_layers import (
    ColumnLinear,
    LayerCut,
    Made,
    RankShare,
    RowLinear,
    SplitAttention,
    SplitEmbedding,
    SplitLayer,
    SplitRegion,
    VocabularyLinear,
    WholeCheck,
    generator_of,
)
from paceline.model_parallel.tensor_plan import (
    COLUMN,
    ROW,
    VOCABULARY,
    Plan,
    heads_of,
    plan_for,
    require_row,
    require_splittable,
)
from paceline.torch_private import tree_leaves, tree_map_only

_SIGNATURE: Final = inspect.signature(functional.cross_entropy)
_REDUCTIONS: Final = ("none", "mean", "sum")
# Functions that only change the shape of a tensor, or return it.
_SHAPES: Final = frozenset(
    (
        *("flatten", "unflatten", "reshape", "view", "view_as", "transpose", "permute", "movedim", "swapaxes", "mT"),
        *("squeeze", "unsqueeze", "contiguous", "__getitem__", "__get__", "size", "dim", "numel", "__len__", "stride"),
    )
)


def split_over(
    model: nn.Module, mesh: DeviceMesh, plan: Plan | None = None, row: Sequence[tuple[str, nn.Module]] = ()
) -> None:
    """Split layers of a model over the ranks of a 1-D mesh, in place; blocks until all ranks call it.

    Its parameters become those of the mesh's first rank, of which each rank keeps its part as an ordinary parameter of
    the same name; so optimizers and tables of servers work on parts. Other parameters stay whole on each rank, with the
    same values and the same gradients. Make optimizers afterwards. Random numbers are the same on all ranks from
    here on, except between a layer split by columns and the one split by rows. Where a vocabulary is split, take the
    loss inside of `split_loss`.

    A module whose layers are split is checked at its first call, without communication: the operations between its
    layers must compute the same on parts as on the whole. Else that call raises UsageError, on every rank.

    Args:
        model: the whole model. Split it before it is cut into stages.
        mesh: mesh of the tensor ranks.
        plan: how each layer is split, by patterns of layer names: "column", "column:3" (three layers that lie one
            after the other in one, as query, key and value do), "row", "vocabulary" (an embedding, or the layer that
            scores words) or "attention" (`nn.MultiheadAttention`). Default: the model's own `tensor_plan`, or
            a plan found from its layers.
        row: layers by name that are called one after the other in place of the model, as by the stages of a pipeline.

    Raises:
        UsageError: there is nothing to split; a layer cannot be split, such as a subclass or one with hooks; or a
            number of heads, features or words does not divide by the ranks. The model is not changed.

    Example::

        split_over(model, mesh, {"blocks.*.up": "column", "blocks.*.down": "row"})
    """
    share = RankShare.of(mesh)
    planned = plan_for(model, plan, share.size)
    require_splittable(model, planned, share.size)
    in_row = require_row(row, planned)
    _agree(model, share)
    _open_around_dropout(row, planned, share)
    regions = _open_regions(model, {name: kind for name, kind in planned.items() if name not in in_row}, share)
    made: Made = {}
    for name, kind in planned.items():
        region = regions.get(name.rpartition(".")[0]) if name not in in_row else None
        layer = _split(model.get_submodule(name), name, kind, share, made, region)
        layer.is_proven = layer.is_proven or name in in_row
        model.set_submodule(name, layer)
    _try_out(model, planned, in_row, regions, share.size)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # it would bypass the split layers


def split_loss() -> AbstractContextManager[object]:
    """Return a context in which `cross_entropy` accepts scores of a split vocabulary, without gathering them.

    Other losses of them are `DTensor`s; `paceline.model_parallel.tensor.plain` makes them ordinary tensors.
    """
    return SplitCrossEntropy()


def whole_state(module: nn.Module, mesh: DeviceMesh) -> dict[str, Tensor]:
    """Return the state of the whole module, given a split one, on every rank of the mesh; blocks until all call it."""
    share, cuts = RankShare.of(mesh), dict(_cuts(module))
    state = {name: whole(tensor).detach() for name, tensor in module.state_dict().items()}
    return {
        name: cuts[name].whole(share.gather(tensor)) if name in cuts else tensor.clone()
        for name, tensor in state.items()
    }


def squared_norm(module: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Return the sum of squares of all gradients of the whole module, float64, shape ().

    Gradients that all ranks have count once. The same bits on every rank; blocks until all call it.
    """
    share, cuts = RankShare.of(mesh), {id(module.get_parameter(name)) for name, _ in _cuts(module)}
    split, common = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for parameter in module.parameters():
        if parameter.grad is not None:
            total = split if id(parameter) in cuts else common
            total += whole(parameter.grad.detach().double().square().sum()).cpu()
    return share.add_up(split) + common


def cut_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of which this rank has a part, by full name."""
    return {name: module.get_parameter(name) for name, _ in _cuts(module)}


def _cuts(module: nn.Module) -> Iterator[tuple[str, LayerCut]]:
    """Yield the parameters of which this rank has a part, by full name; shared ones under each name."""
    for path, layer in module.named_modules():
        if isinstance(layer, SplitLayer):
            for name, cut in layer.cuts.items():
                if getattr(layer, name) is not None:
                    yield (f"{path}.{name}" if path else name), cut


def _split(
    layer: nn.Module, name: str, kind: str, share: RankShare, made: Made, region: SplitRegion | None
) -> SplitLayer:
    """Make this rank's part of a layer."""
    word, _, stacked = kind.partition(":")
    if isinstance(layer, nn.MultiheadAttention):
        return SplitAttention(layer, share, made, name)
    if isinstance(layer, nn.Embedding):
        return SplitEmbedding(layer, share, made, name)
    assert isinstance(layer, nn.Linear), "require_splittable has checked the plan"
    if word == VOCABULARY:
        return VocabularyLinear(layer, share, made, name)
    if word == COLUMN:
        return ColumnLinear(layer, share, made, region, name, int(stacked or 1))
    return RowLinear(layer, share, made, region, name)


def _open_regions(model: nn.Module, planned: Mapping[str, str], share: RankShare) -> dict[str, SplitRegion]:
    """Give each module with layers split by columns a region, and this rank's number of heads."""
    parents = {name.rpartition(".")[0] for name, kind in planned.items() if kind.startswith(COLUMN)}
    regions: dict[str, SplitRegion] = {}
    for path in sorted(parents):
        parent = model.get_submodule(path)
        if isinstance(parent, nn.Sequential):
            children = [(f"{path}.{name}" if path else name, child) for name, child in parent.named_children()]
            _open_around_dropout(children, planned, share)
        elif not isinstance(parent, nn.ModuleList | nn.ModuleDict):
            regions[path] = region = SplitRegion(share)
            region.end_with(parent)
            for name, number in heads_of(parent):
                setattr(parent, name, number // share.size)
    return regions


def _open_around_dropout(row: Sequence[tuple[str, nn.Module]], planned: Mapping[str, str], share: RankShare) -> None:
    """Make each dropout between columns and rows a region of its own: a model cut into stages has no forward."""
    inside = False
    for name, layer in row:
        kind = planned.get(name, "")
        inside = kind.startswith(COLUMN) or (inside and kind != ROW)
        if inside and isinstance(layer, nn.Dropout):
            SplitRegion(share).surround(layer)


def _try_out(
    model: nn.Module, planned: Mapping[str, str], in_row: Collection[str], regions: Mapping[str, SplitRegion], size: int
) -> None:
    """Check each smallest module around layers by columns and their rows at its first call."""
    rows = [name for name, kind in planned.items() if kind == ROW and name not in in_row]
    units: set[str] = set()
    for name, kind in planned.items():
        if kind.startswith(COLUMN) and name not in in_row:
            path = name
            while path:
                path = path.rpartition(".")[0]
                has_rows = any(row.startswith(f"{path}.") or not path for row in rows)
                if has_rows and not isinstance(model.get_submodule(path), nn.ModuleList | nn.ModuleDict):
                    break
            units.add(path)
    heads = [(owner, name) for path in regions for owner in (model.get_submodule(path),) for name, _ in heads_of(owner)]
    for path in units:
        WholeCheck(model.get_submodule(path), path or "the model", size, heads)


def _agree(model: nn.Module, share: RankShare) -> None:
    """Copy the values and random number state of the first rank to all ranks."""
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    with torch.no_grad():
        for tensor in tensors:
            share.copy_from_first(tensor)
    for device in {tensor.device for tensor in tensors} | {torch.device("cpu")}:
        generator = generator_of(device)
        state = generator.get_state()
        share.copy_from_first(state)
        generator.set_state(state)


class SplitCrossEntropy(TorchFunctionMode):
    """A context in which `cross_entropy` accepts scores that are split over the ranks of a mesh by words.

    It returns an ordinary tensor, the same on all ranks. Three numbers for each token are reduced, and no scores are
    gathered. Label smoothing, probabilities as targets, and all other functions of the scores are left to torch, whose
    `loss_parallel` is not used: inside of it every other use of `log_softmax` has wrong gradients.
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
