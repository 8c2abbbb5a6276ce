"""Estimate of a strategy: memory of each role, and bytes and seconds of a step, by published formulas.

Bytes are those of one device. Only tensors are counted: the interpreter, libraries, and fragmentation of the allocator
come on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import msgspec
from msgspec.structs import asdict, replace

from paceline.errors import UsageError
from paceline.model_parallel.balance import balanced_ends
from paceline.tools.plan.intensity import pass_s
from paceline.tools.plan.machine import Device, Machines, NetworkLink
from paceline.tools.plan.model import Model, PlannedLayer, TrainingRecipe
from paceline.tools.plan.strategy import PlannedStrategy


def ring_bytes(num_ranks: int, size_bytes: float) -> float:
    """Return the bytes that each rank of a ring all-reduce sends: 2 (n - 1) / n of its bytes.

    Example:
        >>> ring_bytes(4, 100.0)
        150.0
    """
    return 2 * (num_ranks - 1) / num_ranks * size_bytes


def ring_s(num_ranks: int, size_bytes: float, link: NetworkLink) -> float:
    """Return the seconds of a ring all-reduce: its bytes, and the latency of 2 (n - 1) messages."""
    return ring_bytes(num_ranks, size_bytes) / link.bytes_per_s + 2 * (num_ranks - 1) * link.latency_s


def server_shares(num_workers: int, num_servers: int) -> tuple[float, float]:
    """Return the shares of the values of a server alone and of one beside a worker, which finish together.

    BytePS: a machine with a server alone 2 (n - 1) / (n² + k n - 2 k), one beside a worker (n - k) / (n² + k n - 2 k).
    With as many servers as workers or more, those beside workers keep nothing.

    Example:
        >>> server_shares(4, 2)
        (0.3, 0.1)
        >>> server_shares(4, 8)
        (0.125, 0.0)
    """
    if num_servers >= num_workers:
        return 1 / num_servers, 0.0
    parts = num_workers**2 + num_servers * num_workers - 2 * num_servers
    return 2 * (num_workers - 1) / parts, (num_workers - num_servers) / parts


def colocated_bytes(num_workers: int, num_servers: int, size_bytes: float) -> float:
    """Return the bytes that each machine sends under these shares: 2 n (n - 1) / (n² + k n - 2 k) of the bytes.

    Without servers alone these are the bytes of a ring; with as many as workers, the bytes themselves.

    Example:
        >>> [round(colocated_bytes(4, servers, 1.0), 3) for servers in range(5)]
        [1.5, 1.333, 1.2, 1.091, 1.0]
    """
    if num_servers >= num_workers:
        return size_bytes
    _, beside = server_shares(num_workers, num_servers)
    # A worker's machine pushes the shares of others, and sends its share of the values to all other workers.
    return ((1 - beside) + (num_workers - 1) * beside) * size_bytes


def alone_bytes(num_workers: int, num_servers: int, size_bytes: float) -> float:
    """Return the bytes that the busiest machine sends with servers alone: max(1, n / k) of the bytes.

    Example:
        >>> [round(alone_bytes(4, servers, 1.0), 2) for servers in (1, 2, 3, 4)]
        [4.0, 2.0, 1.33, 1.0]
    """
    return max(1.0, num_workers / num_servers) * size_bytes


def bubble_share(num_stages: int, num_micro_batches: int) -> float:
    """Return the share of a step in which a stage of a pipeline idles: (K - 1) / (M + K - 1).

    Example:
        >>> [round(bubble_share(2, number), 2) for number in (1, 2, 4, 8)]
        [0.5, 0.33, 0.2, 0.11]
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def balanced_stages(
    layers: Sequence[PlannedLayer], num_stages: int, starts: Sequence[int] | None = None
) -> list[tuple[PlannedLayer, ...]]:
    """Cut the layers into stages of neighbours, each with at least one layer, balanced by their operations.

    Args:
        layers: layers of the model.
        num_stages: number of stages.
        starts: layers that a stage after the first may begin with; None for all.

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


_MICRO_BATCHES_PER_STAGE = 4  # with these, the bubble is small


def with_micro_batches(strategy: PlannedStrategy, batch: int, wanted: int | None) -> PlannedStrategy:
    """Return the strategy with its number of micro-batches: `wanted`, or for a pipeline up to four for each stage.

    Args:
        strategy: the strategy; a replica gets `batch` / replicas samples.
        batch: samples of a step, of all replicas together.
        wanted: micro-batches of a replica; None for the largest number that divides its samples.

    Raises:
        UsageError: replicas or micro-batches do not divide the batch.
    """
    if batch % strategy.data:
        raise UsageError(
            f"strategy '{strategy}': a batch of {batch} cannot be shared evenly by {strategy.data} replicas; "
            f"choose a --batch that {strategy.data} divides."
        )
    if wanted is not None and wanted < strategy.pipeline and strategy.schedule == "1f1b":
        raise UsageError(
            f"strategy '{strategy}': {wanted} micro-batches cannot keep {strategy.pipeline} stages busy in turn, as "
            "1f1b does: choose more --micro-batches, or --schedule gpipe."
        )
    samples = batch // strategy.data
    if wanted is None:
        most = _MICRO_BATCHES_PER_STAGE * strategy.pipeline if strategy.pipeline > 1 else 1
        wanted = max(number for number in range(1, min(most, samples) + 1) if samples % number == 0)
    if samples % wanted:
        raise UsageError(
            f"strategy '{strategy}': {samples} samples of a replica cannot be cut into {wanted} equal micro-batches; "
            "choose --micro-batches that divide them."
        )
    return replace(strategy, num_micro_batches=wanted)


def check_model(strategy: PlannedStrategy, model: Model) -> None:
    """Raise UsageError when the model cannot be cut as the strategy says, as `paceline.parallelize` would."""
    if (strategy.pipeline > 1 or strategy.recompute) and model.rules.no_row:
        raise UsageError(f"strategy '{strategy}': {model.rules.no_row}")
    if strategy.pipeline > model.max_stages:
        can = f", which make {model.max_stages} stages at most: each needs parameters not shared with earlier layers"
        can = "" if model.rules.starts is None else can
        raise UsageError(
            f"strategy '{strategy}': {strategy.pipeline} stages, and {model.name} has {len(model.layers)} layers{can}; "
            "choose fewer stages."
        )
    if strategy.tensor == 1:
        return
    if why := model.rules.no_split(strategy.tensor):
        raise UsageError(f"strategy '{strategy}': {why}")
    if not any(layer.is_split for layer in model.layers):
        raise UsageError(
            f"strategy '{strategy}': no layer of {model.name} is known that tensor parallelism could split; it needs "
            "blocks of two linear layers or more, or a shape (--hidden, --heads)."
        )
    if model.num_heads is not None and model.num_heads % strategy.tensor:
        raise UsageError(
            f"strategy '{strategy}': {strategy.tensor} ranks do not divide the {model.num_heads} heads of {model.name}."
        )


_PASSES = 3  # backward computes twice what forward does
_PASSES_AGAIN = 4  # and forward once more under recomputation


class PlannedTask(msgspec.Struct, frozen=True, kw_only=True):
    """Training to plan for: the model, the samples of a step, and the recipe.

    `compute_s` is a measured step of the whole batch on one device, without communication; None to estimate it from
    the number of operations. `accumulated_s` is the same in as many micro-batches as a pipeline takes, whose gradients
    accumulate: it takes longer where weights pass the memory once for each, and less where activations stay in caches;
    None for as long as one batch.
    """

    model: Model
    batch: int
    recipe: TrainingRecipe
    compute_s: float | None = None
    accumulated_s: float | None = None

    def measured_s(self, strategy: PlannedStrategy) -> float | None:
        """Return the measured seconds of a step as this strategy computes it; None if there are none."""
        return self.compute_s if strategy.pipeline == 1 or self.accumulated_s is None else self.accumulated_s


class Role(msgspec.Struct, frozen=True):
    """One kind of process: its memory, its device, and the number of processes."""

    name: str
    memory: Memory
    device: Device
    count: int

    @property
    def fullness(self) -> float:
        """Share of the device's memory that it needs; more than 1 does not fit."""
        return self.memory.total / self.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether it fits its device."""
        return self.fullness <= 1


class PlannedBytes(msgspec.Struct, frozen=True):
    """Bytes that the busiest process of each kind sends in a step: for replicas, between stages, among tensor ranks."""

    data: float
    pipeline: float
    tensor: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.data + self.pipeline + self.tensor


class StepSeconds(msgspec.Struct, frozen=True):
    """Seconds of a step, without any overlap of its parts.

    `bubble` is the time in which a stage waits for others, with their communication.
    """

    compute: float
    bubble: float
    communicate: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.bubble + self.communicate


class Estimate(msgspec.Struct, frozen=True):
    """A strategy, the memory of its roles (for workers that of the largest stage), and bytes and seconds of a step."""

    strategy: PlannedStrategy
    roles: tuple[Role, ...]
    sent: PlannedBytes
    step: StepSeconds

    @property
    def fits(self) -> bool:
        """Whether every role fits its device."""
        return all(role.fits for role in self.roles)

    @property
    def fullness(self) -> float:
        """Fullness of the fullest device."""
        return max(role.fullness for role in self.roles)

    @property
    def bubble_share(self) -> float:
        """Share of a step in which a stage of a pipeline idles."""
        return bubble_share(self.strategy.pipeline, self.strategy.num_micro_batches)

    @property
    def worker(self) -> Role:
        """The role that computes."""
        return self.roles[0]


def estimate(
    task: PlannedTask, strategy: PlannedStrategy, machines: Machines, num_micro_batches: int | None = None
) -> Estimate:
    """Estimate one strategy.

    Raises:
        UsageError: the model, the batch or the devices cannot be cut as the strategy says.
    """
    strategy = with_micro_batches(strategy, task.batch, num_micro_batches)
    check_model(strategy, task.model)
    if strategy.pipeline > 1:
        task = replace(task, model=task.model.untied())
    stages = balanced_stages(task.model.layers, strategy.pipeline, task.model.rules.starts)
    sent, step = _pace(task, strategy, machines, stages)
    return Estimate(strategy, _roles(task, strategy, machines, stages), sent, step)


def _roles(
    task: PlannedTask, strategy: PlannedStrategy, machines: Machines, stages: Sequence[Sequence[PlannedLayer]]
) -> tuple[Role, ...]:
    """Return the worker of the stage that needs most memory, and the servers."""
    samples = _samples(task, strategy)
    between = [stage[-1].output_bytes for stage in stages[:-1]]
    inputs = [task.model.input_bytes, *between]
    passing = list(zip([0.0, *between], [*between, 0.0], strict=True))
    worker = max(
        (
            worker_memory(
                stage,
                input_bytes,
                strategy,
                task.recipe,
                samples,
                peak_in_flight(strategy, index),
                passing_bytes,
                gathers_ahead=not machines.device.is_host,
            )
            for index, (stage, input_bytes, passing_bytes) in enumerate(zip(stages, inputs, passing, strict=True))
        ),
        key=lambda memory: memory.total,
    )
    count = strategy.num_devices
    if not strategy.has_servers:
        return (Role("worker", worker, machines.device, count),)
    alone, beside = 1 / max(1, strategy.num_servers), 0.0
    if strategy.joint == "colocated-server":
        alone, beside = server_shares(strategy.data, strategy.num_servers)
    server = server_memory(task.model.num_parameters, strategy, task.recipe, alone)
    if machines.server_link.is_shared and not beside and strategy.pipeline == strategy.tensor == 1:
        worker, server = over_shared_memory(worker, server, task.recipe, strategy.data)
    elif not machines.device.is_host:
        worker = Memory(worker.weights, worker.gradients, 0.0, worker.activations)  # values arrive in the host's memory
    roles = [Role("worker", worker, machines.device, count)]
    if strategy.num_servers:
        roles.append(Role("server", server, machines.server_device, strategy.num_servers))
    if beside:
        part = server_memory(task.model.num_parameters, strategy, task.recipe, beside)
        roles.append(Role("beside worker", part, machines.server_device, strategy.data))
    return tuple(roles)


def _pace(
    task: PlannedTask, strategy: PlannedStrategy, machines: Machines, stages: Sequence[Sequence[PlannedLayer]]
) -> tuple[PlannedBytes, StepSeconds]:
    """Return bytes and seconds of a step, which the slowest stage determines."""
    samples, ranks = _samples(task, strategy), strategy.tensor
    passes = _PASSES_AGAIN if strategy.recompute else _PASSES
    compute_s = max(_stage_s(task, strategy, machines, stage, samples, passes) for stage in stages)
    reduced = [_reduced(stage, samples, strategy) for stage in stages]
    tensor_link, pipe_link = machines.link_over(ranks), machines.link_over(strategy.num_devices)
    tensor_s = max(sum(ring_s(ranks, size, tensor_link) for size in sizes) for sizes in reduced)
    cut_bytes = max((samples * stage[-1].output_bytes for stage in stages[:-1]), default=0.0)
    send_s = 2 * (cut_bytes / pipe_link.bytes_per_s + pipe_link.latency_s) if strategy.pipeline > 1 else 0.0
    largest = max(sum(layer.parameters_of(ranks) for layer in stage) for stage in stages)
    data_bytes, data_s = _joined(strategy, task.recipe, largest, machines)
    count = strategy.num_micro_batches
    sent = PlannedBytes(
        data=data_bytes,
        pipeline=count * cut_bytes * min(2, strategy.pipeline - 1),  # an inner stage sends on and back
        tensor=count * max(sum(ring_bytes(ranks, size) for size in sizes) for sizes in reduced),
    )
    tick_s = compute_s + tensor_s + send_s
    return sent, StepSeconds(
        compute=count * compute_s,
        bubble=(strategy.pipeline - 1) * tick_s,
        communicate=count * (tensor_s + send_s) + data_s,
    )


def _samples(task: PlannedTask, strategy: PlannedStrategy) -> float:
    """Return the samples of a micro-batch."""
    return task.batch / strategy.data / strategy.num_micro_batches


def _stage_s(
    task: PlannedTask,
    strategy: PlannedStrategy,
    machines: Machines,
    stage: Sequence[PlannedLayer],
    samples: float,
    passes: int,
) -> float:
    """Return the seconds of the passes over a stage: its share of a measured step, or by operations and memory."""
    measured_s = task.measured_s(strategy)
    if measured_s is None or not task.model.flops:
        return passes * pass_s(stage, samples, task.recipe, machines, strategy.tensor)
    rate = task.batch * sum(layer.step_flops(_PASSES) for layer in task.model.layers) / measured_s
    return samples * sum(layer.step_flops(passes, strategy.tensor) for layer in stage) / rate


def _reduced(stage: Sequence[PlannedLayer], samples: float, strategy: PlannedStrategy) -> list[float]:
    """Return the bytes of each all-reduce among tensor ranks: forward, backward, and forward again if recomputed."""
    times = 3 if strategy.recompute else 2
    if strategy.tensor == 1:
        return []
    return [samples * layer.output_bytes for layer in stage for _ in range(times * layer.num_all_reduces)]


def _joined(
    strategy: PlannedStrategy, recipe: TrainingRecipe, num_parameters: float, machines: Machines
) -> tuple[float, float]:
    """Return bytes and seconds of joining the replicas of a stage: gradients out, values back."""
    replicas, size = strategy.data, recipe.gradient_bytes * num_parameters
    link = machines.server_link if strategy.has_servers else machines.link_over(strategy.tensor * replicas)
    if strategy.joint == "parameter-server":
        if link.is_shared:
            return 0.0, _through_memory_s(strategy, recipe, num_parameters, link)
        pushing = strategy.num_devices
        sent = alone_bytes(pushing, strategy.num_servers, size)
        return sent, sent / link.bytes_per_s + 2 * link.latency_s
    if replicas == 1:
        return 0.0, 0.0
    if strategy.joint == "colocated-server":
        sent = colocated_bytes(replicas, strategy.num_servers, size)
        return sent, sent / link.bytes_per_s + 2 * link.latency_s
    if strategy.sharding < 3:
        return ring_bytes(replicas, size), ring_s(replicas, size, link)
    times = 1.5  # weights are gathered twice, for forward and for backward
    copied_s = _copied_s(replicas, recipe, num_parameters, machines.device)
    return times * ring_bytes(replicas, size), times * ring_s(replicas, size, link) + copied_s


# A byte of new memory costs as much as so many that are moved: ten where the system gives it page by page, and two
# thirds of what is freed are used again before that.
_NEW_MEMORY: Final = 3


def _copied_s(num_ranks: int, recipe: TrainingRecipe, num_parameters: float, device: Device) -> float:
    """Return the seconds in which a host copies what fsdp gathers and adds up; a GPU does so at hardly any cost.

    Twice in a step torch copies a rank's slices into a new buffer, from where they go to the other ranks, and what has
    come there into new parameters. Gradients are copied into a new buffer, from where they go to the ranks, which add
    them up into new slices and divide these.
    """
    if not device.is_host:
        return 0.0
    each = 1 / num_ranks
    weights = 2 * (2 * each + 2 + 2 + 2 * _NEW_MEMORY) * recipe.weight_bytes
    gradients = (2 + 2 + (1 + each) + 2 * each + (1 + each) * _NEW_MEMORY) * recipe.gradient_bytes
    return num_parameters * (weights + gradients) / device.memory_bytes_per_s


def _through_memory_s(
    strategy: PlannedStrategy, recipe: TrainingRecipe, num_parameters: float, link: NetworkLink
) -> float:
    """Return the seconds in which servers read gradients, and read and write values and state, in host memory."""
    gradients = strategy.data * recipe.gradient_bytes
    values = recipe.master_bytes or recipe.weight_bytes
    return num_parameters * (gradients + 2 * (values + recipe.moment_bytes)) / link.bytes_per_s


class Memory(msgspec.Struct, frozen=True):
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
        return asdict(self)


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
