"""Memory that each role needs, by kind of content.

Every formula gives bytes of one device. Only tensors are counted: the interpreter, libraries, and fragmentation of the
allocator come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import accumulate

from paceline.tools.plan.model import PlannedLayer, TrainingRecipe
from paceline.tools.plan.strategy import PlannedStrategy


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one device.

    Args:
        weights: weights that are computed on or kept by a server, and the buffers of layers.
        gradients: gradients of one step; on a server the pushes.
        optimizer: master copy and moments.
        activations: peak of the activations, beyond memory that gradients fill later.
        buffers: receive buffers of values, layers or micro-batches.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    buffers: float = 0.0

    @property
    def total(self) -> float:
        """Peak of the memory."""
        return sum(self.by_part().values())

    def by_part(self) -> dict[str, float]:
        """Return the parts by their names."""
        return {part.name: getattr(self, part.name) for part in fields(self)}


def worker_memory(
    stage: Sequence[PlannedLayer],
    input_bytes: float,
    strategy: PlannedStrategy,
    recipe: TrainingRecipe,
    samples: float,
    in_flight: int,
    passing_bytes: tuple[float, float] = (0.0, 0.0),
    *,
    gathers_ahead: bool = True,
) -> Memory:
    """Return the memory of a device that computes one stage.

    Args:
        stage: layers of the stage.
        input_bytes: bytes of the input of a sample.
        strategy: how the layers are distributed.
        recipe: what is kept for each parameter.
        samples: samples of a micro-batch.
        in_flight: largest number of micro-batches whose backward pass has not run yet.
        passing_bytes: bytes of a sample that pass from the stage before, and to the stage after.
        gathers_ahead: whether fsdp gathers a layer while another computes.
    """
    count = sum(layer.parameters_of(strategy.tensor) for layer in stage)
    own_buffers = sum(layer.buffer_bytes for layer in stage)
    # Each micro-batch has a receive buffer, and torch an example of it. Outputs stay until their backward pass, and
    # those of the micro-batch before until they are sent.
    passing = samples * ((strategy.num_micro_batches + 1) * sum(passing_bytes) + 2 * passing_bytes[1])
    whole = _whole(stage, strategy, recipe, ahead=gathers_ahead)
    activations = _activations(stage, input_bytes, strategy, recipe, samples, in_flight, [0.0] * len(stage))
    beside = _activations(stage, input_bytes, strategy, recipe, samples, in_flight, whole) - activations
    if strategy.has_servers:
        return Memory(
            weights=recipe.weight_bytes * count + own_buffers,
            gradients=recipe.gradient_bytes * count,
            activations=activations,
            buffers=recipe.weight_bytes * count + passing,  # received values
        )
    replicas = strategy.data
    return Memory(
        weights=recipe.weight_bytes * count / (replicas if strategy.sharding >= 3 else 1) + own_buffers,
        gradients=recipe.gradient_bytes * count / (replicas if strategy.sharding >= 2 else 1),
        optimizer=recipe.optimizer_bytes * count / (replicas if strategy.sharding >= 1 else 1),
        activations=activations,
        buffers=beside + passing,
    )


def server_memory(num_parameters: float, strategy: PlannedStrategy, recipe: TrainingRecipe, share: float) -> Memory:
    """Return the memory of a server with this share of the model: values, optimizer state, a push of each worker.

    A copy of the values is kept for workers on slow connections.
    """
    held = num_parameters * share
    return Memory(
        weights=(recipe.master_bytes or recipe.weight_bytes) * held,
        gradients=strategy.data * recipe.gradient_bytes * held,
        optimizer=recipe.moment_bytes * held,
        buffers=recipe.weight_bytes * held,
    )


def over_shared_memory(
    worker: Memory, server: Memory, recipe: TrainingRecipe, num_workers: int
) -> tuple[Memory, Memory]:
    """Return the memory of both when they share values and gradients; each is charged an equal part.

    Values are mapped by all workers and a server, a gradient by its worker and a server. With master weights the
    values of server and worker differ, and only gradients are shared.
    """
    values = 1 / (1 + num_workers)
    same = recipe.master_bytes == 0
    return (
        Memory(
            weights=worker.weights - worker.buffers * (1 - values) if same else worker.weights,
            gradients=worker.gradients / 2,
            activations=worker.activations,
        ),
        Memory(
            weights=server.weights * values if same else server.weights,
            gradients=server.gradients / 2,
            optimizer=server.optimizer,
        ),
    )


def peak_in_flight(strategy: PlannedStrategy, stage_index: int) -> int:
    """Return the largest number of micro-batches in flight in a stage: all under gpipe, few under 1f1b."""
    if strategy.pipeline == 1:
        return 1
    if strategy.schedule == "gpipe":
        return strategy.num_micro_batches
    return min(strategy.num_micro_batches, strategy.pipeline - stage_index)


def _whole(
    stage: Sequence[PlannedLayer], strategy: PlannedStrategy, recipe: TrainingRecipe, *, ahead: bool
) -> list[float]:
    """Return what is whole while backward runs through each layer: gradients from zero-2 on, under fsdp weights too.

    Where layers are gathered `ahead`, those are its own weights and the weights of the layer before.
    """
    counts = [layer.parameters_of(strategy.tensor) if strategy.sharding >= 2 else 0.0 for layer in stage]
    weights = [recipe.weight_bytes * count if strategy.sharding == 3 else 0.0 for count in counts]
    before = [0.0, *weights[:-1]] if ahead else [0.0] * len(weights)
    return [
        own + next_ + recipe.gradient_bytes * count for own, next_, count in zip(weights, before, counts, strict=True)
    ]


def _fresh(layer: PlannedLayer, strategy: PlannedStrategy, recipe: TrainingRecipe) -> float:
    """Return the bytes of a gradient that backward makes before it is added to the one that is kept."""
    if not strategy.keeps_gradients or strategy.sharding >= 2:  # there, whole layers are counted as buffers
        return 0.0
    return recipe.gradient_bytes * layer.largest_of(strategy.tensor)


def _activations(
    stage: Sequence[PlannedLayer],
    input_bytes: float,
    strategy: PlannedStrategy,
    recipe: TrainingRecipe,
    samples: float,
    in_flight: int,
    whole: Sequence[float],
) -> float:
    """Return the most that activations and what is whole take, walking back through the last micro-batch's layers."""
    ranks = strategy.tensor
    kept = [samples * layer.kept_by(ranks) for layer in stage]
    working = [samples * layer.working_of(ranks) + _fresh(layer, strategy, recipe) for layer in stage]
    if strategy.recompute:
        inputs = samples * (input_bytes + sum(layer.output_bytes for layer in stage[:-1]))
        again = max(one + moment for one, moment in zip(kept, working, strict=True))
        kept, working = [inputs, *[0.0] * (len(stage) - 1)], [again] * len(stage)
    waiting = (in_flight - 1) * sum(kept)
    gradients = [recipe.gradient_bytes * layer.parameters_of(ranks) for layer in stage]
    if strategy.keeps_gradients:
        gradients = [0.0] * len(stage)
    # Backward through layer i: kept are the layers up to i, and there are gradients of those from i on.
    below = accumulate(kept)
    above = list(accumulate(reversed(gradients)))[::-1]
    peak = max(sum(moment) for moment in zip(below, working, above, whole, strict=True))
    return waiting + max(0.0, peak - sum(gradients))
