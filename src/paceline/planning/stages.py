"""Which layers a pipeline stage gets: neighbours, so that the dearest stage is as cheap as it can be."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.planning.model import Layer


def balanced_stages(layers: Sequence[Layer], num_stages: int) -> list[tuple[Layer, ...]]:
    """Cut the layers into stages of neighbours, each with one layer at least, by their operations.

    Example:
        >>> layers = [Layer(name, 1, flops=cost) for name, cost in zip("abcd", (3, 1, 1, 1))]
        >>> [[layer.name for layer in stage] for stage in balanced_stages(layers, 2)]
        [['a'], ['b', 'c', 'd']]
    """
    total = sum(layer.flops for layer in layers)
    costs = [layer.flops if total else layer.num_parameters for layer in layers]
    ends = balanced_ends(costs, num_stages)
    starts = [0, *ends[:-1]]
    return [tuple(layers[start:end]) for start, end in zip(starts, ends, strict=True)]


def balanced_ends(costs: Sequence[float], num_stages: int) -> list[int]:
    """Return behind which layers to cut, the last one included."""
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # worst[end]: the dearest stage when the layers before `end` are cut in the best way; choices say where.
    worst = [sum_ if end else float("inf") for end, sum_ in enumerate(sums)]
    choices: list[list[int]] = []
    for stage in range(1, num_stages):
        cuts = [0] * len(sums)
        found = [float("inf")] * len(sums)
        for end in range(stage + 1, len(sums)):
            cuts[end] = min(range(stage, end), key=lambda cut: max(worst[cut], sums[end] - sums[cut]))
            found[end] = max(worst[cuts[end]], sums[end] - sums[cuts[end]])
        worst = found
        choices.append(cuts)
    ends = [len(costs)]
    for cuts in reversed(choices):
        ends.insert(0, cuts[ends[0]])
    return ends
