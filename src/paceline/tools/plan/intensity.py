"""Arithmetic intensity: whether operations or memory bound what a device computes, and from which batch on it is busy.

Williams et al., "Roofline" (2009): a device performs as many operations a second as it can, or as many as it has
operands for. A pass over a layer moves its weights once, whatever the batch, and its activations for every sample; so a
batch that is too small leaves a device waiting for weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from paceline.tools.plan.machine import Machines
from paceline.tools.plan.model import Model, PlannedLayer, TrainingRecipe


def moved_bytes(layer: PlannedLayer, recipe: TrainingRecipe, num_ranks: int = 1) -> tuple[float, float]:
    """Return the bytes that one pass over a layer moves: once, and for each sample.

    Args:
        layer: the layer. One without operations looks weights up, and moves only what it puts out.
        recipe: says the bytes of a weight.
        num_ranks: ranks of tensor parallelism that split it.
    """
    weights = recipe.weight_bytes * layer.parameters_of(num_ranks) if layer.flops else 0.0
    return weights, layer.kept_by(num_ranks) + layer.output_bytes


def pass_s(
    stage: Sequence[PlannedLayer], samples: float, recipe: TrainingRecipe, machines: Machines, num_ranks: int = 1
) -> float:
    """Return the seconds of one pass over layers: of each, the longer of its operations and its memory traffic."""
    rate, memory = machines.flops(recipe.precision), machines.device.memory_bytes_per_s
    total_s = 0.0
    for layer in stage:
        once, each = moved_bytes(layer, recipe, num_ranks)
        total_s += max(samples * layer.flops_of(num_ranks) / rate, (once + samples * each) / memory)
    return total_s


def busy_batch(model: Model, recipe: TrainingRecipe, machines: Machines) -> int | None:
    """Return the least number of samples that keeps a device busy: then it waits for operations, not for memory.

    None if no number does, as every sample moves too many bytes for its operations, or if operations are unknown.
    """
    moved = [moved_bytes(layer, recipe) for layer in model.layers]
    once, each = sum(once for once, _ in moved), sum(each for _, each in moved)
    # Operations that the device performs while memory moves a byte.
    ridge = machines.flops(recipe.precision) / machines.device.memory_bytes_per_s
    spare = model.flops - ridge * each
    return max(1, ceil(ridge * once / spare)) if spare > 0 else None
