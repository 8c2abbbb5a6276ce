"""Rules of `paceline.parallelize` for a module: where it can be cut into stages, and over how many ranks split."""

from __future__ import annotations

from collections.abc import Sequence

from torch.nn import Module

from paceline.errors import UsageError
from paceline.model_parallel.layers import layers_of, starts_of
from paceline.model_parallel.tensor_plan import plan_for, require_splittable
from paceline.tools.plan.model import Rules


def rules_of(module: Module, units: Sequence[Module]) -> Rules:
    """Return what holds for a module.

    Args:
        module: the whole, which may be a module around the model that adds the loss.
        units: the layers that are planned with, in the order in which they run.
    """
    model = _model_of(module)

    def no_split(size: int) -> str:
        try:
            require_splittable(model, plan_for(model, None, size), size)
        except UsageError as error:
            return str(error)
        return ""

    try:
        row = layers_of(model)
    except UsageError as error:
        return Rules(starts=(), no_row=str(error), no_split=no_split)
    index_of = {id(part): index for index, layer in enumerate(row) for part in layer.module.modules()}
    places = [next((index_of[id(part)] for part in unit.modules() if id(part) in index_of), None) for unit in units]
    starts = [places.index(start) for start in starts_of(row) if start in places]
    return Rules(starts=tuple(sorted(starts)), no_split=no_split)


def _model_of(module: Module) -> Module:
    """Return the module that a script gives to `parallelize`: not one around it that only adds a loss."""
    own = set(module.parameters())
    inner = [child for child in module.children() if own and set(child.parameters()) == own]
    try:
        layers_of(module)
    except UsageError:
        return _model_of(inner[0]) if len(inner) == 1 else module
    return module
