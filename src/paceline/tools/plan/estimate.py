"""Estimate of a strategy: memory of each role, and bytes and seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.tools.plan.batch import check_model, with_micro_batches
from paceline.tools.plan.machine import Device, Machines, NetworkLink
from paceline.tools.plan.memory import (
    Memory,
    over_shared_memory,
    peak_in_flight,
    server_memory,
    worker_memory,
)
from paceline.tools.plan.model import Model, PlannedLayer, TrainingRecipe
from paceline.tools.plan.stages import balanced_stages
from paceline.tools.plan.strategy import PlannedStrategy
from paceline.tools.plan.timing import alone_bytes, bubble_share, colocated_bytes, ring_bytes, ring_s, server_shares

_PASSES = 3  # backward computes twice what forward does
_PASSES_AGAIN = 4  # and forward once more under recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedTask:
    """What is to be trained: the model, the samples of a step, and how numbers are kept.

    `compute_s` is a measured step of the whole batch on one device, without communication; None takes the operations.
    """

    model: Model
    batch: int
    recipe: TrainingRecipe
    compute_s: float | None = None


@dataclass(frozen=True, slots=True)
class Role:
    """One kind of process: what it needs, on which device, and how many there are."""

    name: str
    memory: Memory
    device: Device
    count: int

    @property
    def fullness(self) -> float:
        """The share of the device's memory that it needs; more than 1 does not fit."""
        return self.memory.total / self.device.memory_bytes

    @property
    def fits(self) -> bool:
        """Whether the device has as much."""
        return self.fullness <= 1


@dataclass(frozen=True, slots=True)
class PlannedBytes:
    """What the busiest process of each kind sends in a step: for the replicas, between stages, among tensor ranks."""

    data: float
    pipeline: float
    tensor: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.data + self.pipeline + self.tensor


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long a step takes, one thing after another: nothing is taken to hide behind anything else.

    `bubble` is when a stage waits for others, with what they send meanwhile.
    """

    compute: float
    bubble: float
    communicate: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.bubble + self.communicate


@dataclass(frozen=True, slots=True)
class Estimate:
    """A strategy, the needs of each of its roles (the neediest stage's for workers), and a step's bytes and seconds."""

    strategy: PlannedStrategy
    roles: tuple[Role, ...]
    sent: PlannedBytes
    step: Seconds

    @property
    def fits(self) -> bool:
        """Whether every role fits its device."""
        return all(role.fits for role in self.roles)

    @property
    def fullness(self) -> float:
        """How full the fullest device is."""
        return max(role.fullness for role in self.roles)

    @property
    def bubble_share(self) -> float:
        """The share of a pipeline's ticks in which a stage has nothing to do."""
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
    """Return the worker of the neediest stage, and the servers."""
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
) -> tuple[PlannedBytes, Seconds]:
    """Return bytes and seconds of a step; the slowest stage sets the pace of all."""
    samples, ranks = _samples(task, strategy), strategy.tensor
    passes = _PASSES_AGAIN if strategy.recompute else _PASSES
    rate = _flops_per_s(task, machines)
    compute_s = max(passes * samples * sum(layer.flops_of(ranks) for layer in stage) / rate for stage in stages)
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
    return sent, Seconds(
        compute=count * compute_s,
        bubble=(strategy.pipeline - 1) * tick_s,
        communicate=count * (tensor_s + send_s) + data_s,
    )


def _samples(task: PlannedTask, strategy: PlannedStrategy) -> float:
    """Return the samples of a micro-batch."""
    return task.batch / strategy.data / strategy.num_micro_batches


def _flops_per_s(task: PlannedTask, machines: Machines) -> float:
    """Return the operations a second that a device reaches: as measured, or its share of the best it can."""
    if task.compute_s is not None and task.model.flops:
        return _PASSES * task.model.flops * task.batch / task.compute_s
    return machines.device.flops(task.recipe.precision) * machines.utilisation


def _reduced(stage: Sequence[PlannedLayer], samples: float, strategy: PlannedStrategy) -> list[float]:
    """Return the bytes of each all-reduce among tensor ranks: forward, backward, and forward again if recomputed."""
    times = 3 if strategy.recompute else 2
    if strategy.tensor == 1:
        return []
    return [samples * layer.output_bytes for layer in stage for _ in range(times * layer.num_all_reduces)]


def _joined(
    strategy: PlannedStrategy, recipe: TrainingRecipe, num_parameters: float, machines: Machines
) -> tuple[float, float]:
    """Return bytes and seconds of keeping the replicas of a stage the same, gradients there and values back."""
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
    times = 1.5 if strategy.sharding == 3 else 1.0  # weights are gathered twice, for forward and for backward
    return times * ring_bytes(replicas, size), times * ring_s(replicas, size, link)


def _through_memory_s(
    strategy: PlannedStrategy, recipe: TrainingRecipe, num_parameters: float, link: NetworkLink
) -> float:
    """Return how long servers read gradients, and read and write values and optimizer state, in the host's memory."""
    gradients = strategy.data * recipe.gradient_bytes
    values = recipe.master_bytes or recipe.weight_bytes
    return num_parameters * (gradients + 2 * (values + recipe.moment_bytes)) / link.bytes_per_s
