"""Search over strategies: which to consider, and the recommended one with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import ceil
from typing import Final

from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.tools.plan.estimate import Estimate, PlannedTask, estimate
from paceline.tools.plan.intensity import busy_batch
from paceline.tools.plan.machine import Machines
from paceline.tools.plan.quantities import in_bytes, in_seconds, three_digits
from paceline.tools.plan.strategy import Joint, PlannedStrategy, Schedule

_MAX_MIXED: Final = 5  # number of strategies of several kinds that are shown, the best
_MIXED_JOINTS: Final[tuple[Joint, ...]] = ("all-reduce", "fsdp", "parameter-server")
_THIN: Final = 0.5  # share of communication from which the link bounds a step
_FULL: Final = 0.9  # what is fuller is recommended only if nothing leaves more room
_NEAR: Final = 1.02  # of two whose times differ by less, the simpler one is recommended


def survey(
    task: PlannedTask, machines: Machines, num_servers: int, schedule: Schedule, num_micro_batches: int | None = None
) -> list[Estimate]:
    """Estimate all possible strategies of one kind of parallelism, and the best of several kinds.

    A strategy that does not fit uses recomputation if that lowers its memory.
    """
    tried = partial(_try, task, machines, schedule, num_micro_batches)
    plain = [found for strategy in _plain(machines, num_servers) if (found := tried(strategy))]
    mixed = [found for strategy in _mixed(machines, num_servers) if (found := tried(strategy))]
    mixed.sort(key=_rank)
    return plain + mixed[:_MAX_MIXED]


def recommend(estimates: Sequence[Estimate]) -> Estimate | None:
    """Return the fastest strategy that fits with some room; of equally fast ones, the simplest. None if none fits."""
    fitting = [one for one in estimates if one.fits]
    if not fitting:
        return None
    fitting = [one for one in fitting if one.fullness <= _FULL] or fitting
    fastest_s = min(one.step.total for one in fitting)
    near = [one for one in fitting if one.step.total <= _NEAR * fastest_s]
    return min(near, key=lambda one: (_complexity(one.strategy), one.step.total))


def explain(task: PlannedTask, machines: Machines, estimates: Sequence[Estimate]) -> str:
    """Return sentences that recommend a strategy with reasons, or say what would fit."""
    best = recommend(estimates)
    if best is None:
        return _nothing_fits(task, machines, estimates)
    worker = best.worker
    reasons = [
        f"Take {best.strategy}: a worker needs {in_bytes(worker.memory.total)} of {machines.device}, and a step takes "
        f"{in_seconds(best.step.total)}, of which communication is {best.step.communicate / best.step.total:.0%}."
    ]
    single = next((one for one in estimates if one.strategy.num_devices == 1), None)
    if best.strategy.num_devices > 1 and single is not None:
        reasons.append(
            f"One device alone would take {in_seconds(single.step.total)}."
            if single.fits
            else f"One device alone would need {in_bytes(single.worker.memory.total)}, which it does not have."
        )
    elif machines.num_devices > 1 and best.strategy.num_devices == 1:
        reasons.append("Over these links, more devices would only wait for each other.")
    reasons += _rejected(best, estimates)
    reasons += _intensity(task, machines, best)
    if best.step.communicate > _THIN * best.step.total:
        reasons.append(
            "Most of a step is communication: a larger batch, local steps between two exchanges, or a bound on "
            "staleness (ssp) gain more than another strategy here."
        )
    return " ".join(reasons)


def _intensity(task: PlannedTask, machines: Machines, best: Estimate) -> list[str]:
    """Return a sentence on the batch that keeps a device busy."""
    if task.compute_s is not None or not task.model.flops:
        return []
    least = busy_batch(task.model, task.recipe, machines)
    samples = task.batch / best.strategy.data / best.strategy.num_micro_batches
    if least is None:
        return [f"Memory and not operations bounds a {machines.device.name} on this model, at any batch."]
    if samples >= least:
        return []
    unit = "sample" if least == 1 else "samples"
    return [f"With {three_digits(samples)} at a time it waits for memory: {least} {unit} keep it busy."]


def _rejected(best: Estimate, estimates: Sequence[Estimate]) -> list[str]:
    """Return a sentence about simpler strategies that do not fit."""
    simpler = [
        one
        for one in estimates
        if not one.fits and one.strategy.num_devices > 1 and _complexity(one.strategy) < _complexity(best.strategy)
    ]
    if not simpler:
        return []
    return [f"{', '.join(str(one.strategy) for one in simpler[:3])} would be simpler and {_do(simpler)} not fit."]


def _do(several: Sequence[Estimate]) -> str:
    return "does" if len(several) == 1 else "do"


def _nothing_fits(task: PlannedTask, machines: Machines, estimates: Sequence[Estimate]) -> str:
    """Return sentences about the nearest strategy, and the number of devices that would hold the state."""
    nearest = min(estimates, key=lambda one: one.fullness)
    short = max(nearest.roles, key=lambda role: role.fullness)
    state = task.model.num_parameters * task.recipe.state_bytes
    return (
        f"Nothing fits. {nearest.strategy} comes nearest: its {short.name} needs {in_bytes(short.memory.total)}, and "
        f"{short.device} has less. Weights, gradients and optimizer state alone are {in_bytes(state)}, so "
        f"without servers it takes {ceil(state / machines.device.memory_bytes)} such devices at least. A smaller batch "
        "lowers the memory of activations."
    )


def _plain(machines: Machines, num_servers: int) -> Iterator[PlannedStrategy]:
    """Yield strategies of one kind of parallelism over all devices, and one device alone."""
    count = machines.num_devices
    yield PlannedStrategy()
    if count == 1:
        return
    yield PlannedStrategy(data=count, joint="all-reduce")
    yield PlannedStrategy(data=count, joint="parameter-server", num_servers=num_servers)
    if num_servers < count:
        yield PlannedStrategy(data=count, joint="colocated-server", num_servers=num_servers)
    for joint in ("zero-1", "zero-2", "fsdp"):
        yield PlannedStrategy(data=count, joint=joint)
    yield PlannedStrategy(pipeline=count)
    yield PlannedStrategy(tensor=count)


def _mixed(machines: Machines, num_servers: int) -> Iterator[PlannedStrategy]:
    """Yield every mesh of two or three kinds; ranks that split a layer stay within a machine."""
    count = machines.num_devices
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    for tensor in divisors:
        for pipeline in (number for number in divisors if (count // tensor) % number == 0):
            data = count // tensor // pipeline
            if (tensor > 1) + (pipeline > 1) + (data > 1) < 2 or tensor > machines.devices_per_machine:
                continue
            for joint in _MIXED_JOINTS if data > 1 else ("none",):
                if joint == "fsdp" and pipeline > 1:  # it would gather a stage once for each micro-batch
                    continue
                servers = num_servers if joint == "parameter-server" else 0
                yield PlannedStrategy(data=data, pipeline=pipeline, tensor=tensor, joint=joint, num_servers=servers)


def _try(
    task: PlannedTask, machines: Machines, schedule: Schedule, num_micro_batches: int | None, strategy: PlannedStrategy
) -> Estimate | None:
    """Estimate a strategy, recomputing if it does not fit without; None when model or batch cannot be cut so."""
    strategy = replace(strategy, schedule=schedule)
    wanted = num_micro_batches if strategy.pipeline > 1 else None
    try:
        found = estimate(task, strategy, machines, wanted)
    except UsageError:
        return None
    if found.fits or not task.model.knows_activations:
        return found
    try:
        again = estimate(task, replace(strategy, recompute=True), machines, wanted)
    except UsageError:
        return found
    return min(again, found, key=lambda one: one.fullness)


def _rank(one: Estimate) -> tuple[bool, float]:
    """Sort fitting strategies by time, before others by the memory that they lack."""
    return (not one.fits, one.step.total if one.fits else one.fullness)


def _complexity(strategy: PlannedStrategy) -> tuple[int, int, bool]:
    """Order strategies by complexity: kinds of parallelism, sharding or servers, recomputation."""
    return (strategy.num_axes, strategy.sharding or 2 * strategy.has_servers, strategy.recompute)
