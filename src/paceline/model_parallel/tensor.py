"""Tensor parallelism: each layer of a model is split over the ranks of a mesh, which compute it together.

A linear layer split by columns computes a part of the features on each rank; the next one, split by rows, takes these
parts and sums the results: one sum forward and one backward for the pair. Attention is such a pair around its heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.model_parallel.arrangement import whole
from paceline.model_parallel.equivalence import WholeCheck
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
    generator_of,
)
from paceline.model_parallel.split_loss import SplitCrossEntropy
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

    Other losses of them are `DTensor`s; `paceline.model_parallel.split_loss.plain` makes them ordinary tensors.
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
