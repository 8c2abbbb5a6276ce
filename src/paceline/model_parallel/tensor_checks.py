"""Checks of tensor-parallel plans against the model and the number of ranks, before anything is changed or sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from paceline.errors import UsageError
from paceline.model_parallel.tensor_plan import ATTENTION, COLUMN, HEAD_WIDTHS, HEADS, ROW, is_elementwise


def require_splittable(model: nn.Module, planned: Mapping[str, str], size: int) -> None:
    """Raise UsageError where layers cannot be split as planned over so many ranks."""
    _require_pairs(planned)
    for name, kind in planned.items():
        _require_division(model, name, kind, size)
    _require_apart(model, planned)


def require_row(row: Sequence[tuple[str, nn.Module]], planned: Mapping[str, str]) -> set[str]:
    """Return which layers of a row are split by columns or rows themselves, and not layers inside of them.

    Raises:
        UsageError: something stands between columns and rows that is not known to treat every feature by itself.
    """
    found: set[str] = set()
    opened = ""
    for name, layer in row:
        kind = planned.get(name, "")
        if kind.startswith(COLUMN) or kind == ROW:
            found.add(name)
            if bool(opened) == (kind == ROW):
                opened = name if kind != ROW else ""
                continue
        elif not opened or is_elementwise(layer):
            continue
        raise UsageError(
            f"layer '{opened or name}' is split by its features, but '{name}', a {type(layer).__name__}, does not go "
            "with that in a model that is cut into a row of layers: only activations and dropout may stand between "
            "one split by columns and one by rows. Put the three into one module, or leave them out of tensor_plan."
        )
    if opened:
        raise UsageError(f"layer '{opened}' is split by columns, but no layer behind it in the row is by rows.")
    return found


def heads_of(module: nn.Module) -> list[tuple[str, int]]:
    """Return what a module knows of numbers of heads."""
    numbers = [(name, getattr(module, name, None)) for name in HEADS]
    return [(name, number) for name, number in numbers if isinstance(number, int)]


def _head_width(module: nn.Module) -> int:
    """Return how many features a head of a module has, 1 for one that does not say."""
    widths = [getattr(module, name, None) for name in HEAD_WIDTHS]
    return next((width for width in widths if isinstance(width, int) and width > 0), 1)


def _require_pairs(planned: Mapping[str, str]) -> None:
    """Refuse columns that no rows add up, and rows that get no columns."""
    columns = [name for name, kind in planned.items() if kind.startswith(COLUMN)]
    rows = [name for name, kind in planned.items() if kind == ROW]
    if bool(columns) != bool(rows):
        given, missing = ("column", "row") if columns else ("row", "column")
        raise UsageError(
            f"layer '{(columns or rows)[0]}' is to be split by '{given}', but none by '{missing}': a layer split by "
            "columns needs one split by rows behind it, which adds up the parts."
        )


def _require_division(model: nn.Module, name: str, kind: str, size: int) -> None:
    """Refuse a layer that does not divide by the number of ranks."""
    layer = model.get_submodule(name)
    word, _, stacked = kind.partition(":")
    if word == COLUMN:
        for what, number in heads_of(model.get_submodule(name.rpartition(".")[0])):
            _require(name, f"{what}={number} around it", number, size)
    if isinstance(layer, nn.MultiheadAttention):
        _require(name, f"{layer.num_heads} heads", layer.num_heads, size)
        if not layer._qkv_same_embed_dim or layer.bias_k is not None or layer.add_zero_attn:  # pyright: ignore[reportPrivateUsage]
            raise UsageError(f"attention '{name}' cannot be split: it has kdim, vdim, add_bias_kv or add_zero_attn.")
    elif isinstance(layer, nn.Embedding):
        _require(name, f"{layer.num_embeddings} words", layer.num_embeddings, size)
    elif isinstance(layer, nn.Linear) and word == ROW:
        _require(name, f"{layer.in_features} input features", layer.in_features, size)
    elif isinstance(layer, nn.Linear):
        num_stacked = int(stacked or 1)
        what = f"{layer.out_features} output features" + (f" in {num_stacked} parts" if num_stacked > 1 else "")
        _require(name, what, layer.out_features, size * num_stacked)
        width = _head_width(model.get_submodule(name.rpartition(".")[0])) if word == COLUMN else 1
        if layer.out_features // num_stacked % width == 0:
            num_heads = layer.out_features // num_stacked // width
            _require(name, f"{num_heads} heads of {width} features", num_heads, size)


def _require(name: str, what: str, number: int, size: int) -> None:
    if number % size:
        raise UsageError(
            f"layer '{name}' cannot be split over {size} parts: it has {what}, which do not divide evenly. Choose "
            "another number of tensor ranks, or leave the layer out of the plan."
        )


def _require_apart(model: nn.Module, planned: Mapping[str, str]) -> None:
    """Refuse parameters that a layer which is split shares with one that is not, or is split another way."""
    way_of: dict[int, tuple[str, int]] = {}
    for name, kind in planned.items():
        way = 1 if kind == ROW else 0
        for own, parameter in model.get_submodule(name).named_parameters():
            if kind == ROW and own != "weight":
                continue
            other, other_way = way_of.setdefault(id(parameter), (f"{name}.{own}", way))
            if other_way != way:
                raise UsageError(f"'{name}.{own}' is '{other}', which is to be split another way: give both the same.")
    for path, module in model.named_modules(remove_duplicate=False):
        if not any(
            path == name or (kind == ATTENTION and path.startswith(f"{name}.")) for name, kind in planned.items()
        ):
            for own, parameter in module.named_parameters(recurse=False):
                if id(parameter) in way_of:
                    raise UsageError(
                        f"'{path}.{own}' is '{way_of[id(parameter)][0]}', which is to be split, but '{path}' is not: "
                        "have both split, or give them parameters of their own."
                    )
