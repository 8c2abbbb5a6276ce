"""Assignment of consecutive layers to pipeline stages, so that the most expensive stage is as cheap as possible."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from paceline.model_parallel.balance import balanced_ends
from paceline.tools.plan.model import PlannedLayer


def balanced_stages(
    layers: Sequence[PlannedLayer], num_stages: int, starts: Sequence[int] | None = None
) -> list[tuple[PlannedLayer, ...]]:
    """Cut the layers into stages of neighbours, each with one layer at least, by their operations.

    Args:
        layers: of the model.
        num_stages: that they are cut into.
        starts: the layers that a stage after the first may begin with; None for all.

    Example:
        >>> layers = [PlannedLayer(name, 1, flops=cost) for name, cost in zip("abcd", (3, 1, 1, 1))]
        >>> [[layer.name for layer in stage] for stage in balanced_stages(layers, 2)]
        [['a'], ['b', 'c', 'd']]
    """
    total = sum(layer.flops for layer in layers)
    costs = [layer.flops if total else layer.num_parameters for layer in layers]
    edges = [0, *(range(1, len(layers)) if starts is None else starts), len(layers)]
    ends = balanced_ends([sum(costs[start:end]) for start, end in pairwise(edges)], num_stages)
    return [tuple(layers[start:end]) for start, end in pairwise([0, *(edges[end] for end in ends)])]
