"""Conversion of a model into one that several workers hold together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage] - what all kinds of it are

from paceline.collective.collectives import Collectives
from paceline.errors import UsageError
from paceline.job.strategy import Distribution
from paceline.model_parallel.arrangement import Arrangement
from paceline.model_parallel.cutting import Placement, ends_of
from paceline.model_parallel.layers import drop, layers_of, materialise, require_apart, tree_of
from paceline.model_parallel.losses import Loss, Reduction, joining_of
from paceline.model_parallel.mesh import Mesh
from paceline.model_parallel.parallel import Parallel
from paceline.model_parallel.part import ModelPart
from paceline.model_parallel.pipeline import SCHEDULES, Pipeline, Schedule
from paceline.model_parallel.stage import PipelineStage
from paceline.worker.validation import brief


@dataclass(frozen=True, slots=True)
class ParallelizeOptions:
    """What a script asks of `paceline.parallelize`, which says what it means; None leaves it to the launcher."""

    pipeline: int | None = None
    tensor: int | None = None
    data: str | None = None
    micro_batches: int | None = None
    schedule: Schedule = "1f1b"
    recompute: bool = False
    balance: Any = None
    placement: Placement | None = None
    reduction: Reduction | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be."""
        for name, number in (
            ("pipeline", self.pipeline),
            ("tensor", self.tensor),
            ("micro_batches", self.micro_batches),
        ):
            if number is not None and not (isinstance(number, int) and number >= 1):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise UsageError(f"parallelize: {name} is {brief(number)}, expected a whole number of 1 or more.")
        if self.schedule not in SCHEDULES:
            raise UsageError(f"parallelize: schedule is {self.schedule!r}, expected {' or '.join(SCHEDULES)}.")

    def over(self, launched: Distribution) -> Distribution:
        """Return how the work is shared: as the script says, and else as the launcher was told.

        >>> str(ParallelizeOptions(pipeline=2, data="ssp:3").over(Distribution.parse("all-reduce+tensor:2")))
        'ssp:3+pipeline:2+tensor:2'
        """
        if self.data is not None:
            said = Distribution.parse(self.data)
            if said.data is None or said.ranks_per_replica > 1:
                raise UsageError(
                    f"parallelize: data is '{self.data}', expected how replicas become one model, as 'ssp:3' or "
                    "'all-reduce'. Stages and ranks are pipeline=... and tensor=..."
                )
            launched = replace(said, pipeline=launched.pipeline, tensor=launched.tensor)
        return replace(launched, pipeline=self.pipeline or launched.pipeline, tensor=self.tensor or launched.tensor)


def keep_part(
    model: nn.Module, loss: Loss, asked: ParallelizeOptions, exchange: Collectives, arrangement: Arrangement
) -> Parallel:
    """Keep this worker's part of a model, and connect it to the others; see `paceline.parallelize`."""
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
        raise UsageError(f"parallelize: the model is {brief(model)}, expected a torch.nn.Module.")
    if isinstance(loss, type) or not callable(loss):
        raise UsageError(
            f"parallelize: loss is {brief(loss)}, expected a function of outputs and targets, "
            "torch.nn.functional.cross_entropy for example, or a loss module that was made."
        )
    wanted = asked.over(arrangement.distribution)
    stages, count = wanted.pipeline, asked.micro_batches
    if stages > 1 and count is not None and count < stages and asked.schedule == "1f1b":
        raise UsageError(
            f"parallelize: {count} micro-batches cannot keep {stages} stages busy in turn, as 1f1b does: give at least "
            f"{stages}, or schedule='gpipe'."
        )
    grid = arrangement.settle(wanted)
    part = ModelPart(grid, exchange.worker_set.rank, arrangement.mesh(exchange) if grid.is_split else None)
    made = _cut(model, loss, asked, part)
    arrangement.enter(made, part)
    return made


def _cut(model: nn.Module, loss: Loss, asked: ParallelizeOptions, part: ModelPart) -> Parallel:
    """Return the part of a model that this worker holds; the values of what others hold are gone from the model."""
    mesh, stage = part.mesh, part.position.stage
    joining = joining_of(loss, asked.reduction)
    # A BatchNorm mostly cannot learn from one sample.
    min_size = 2 if any(isinstance(one, _BatchNorm) for one in model.modules()) else 1
    if mesh is not None:
        _require_cpu(model)
    ends = _ends(model, asked, mesh) if mesh is not None and mesh.grid.pipeline > 1 else None
    if mesh is not None and mesh.grid.tensor > 1:
        loss = _split(model, loss, mesh, in_row=ends is not None or asked.recompute)
    if ends is None or mesh is None:
        materialise(model)
        run = (
            PipelineStage([layer.module for layer in layers_of(model)], recompute=True).run
            if asked.recompute
            else model
        )
        return Parallel(model, run, loss, part)
    layers = layers_of(model)
    own = layers[ends[stage - 1] if stage else 0 : ends[stage]]
    drop([layer for layer in layers if layer not in own], own)
    held = tree_of(own)
    materialise(held)
    held.train(model.training)
    run = PipelineStage([layer.module for layer in own], recompute=asked.recompute)
    pipeline = Pipeline(mesh, run, loss, joining, asked.schedule, asked.micro_batches, min_size)
    return Parallel(held, pipeline, loss, part)


def _require_cpu(model: nn.Module) -> None:
    away = [name for name, parameter in model.named_parameters() if parameter.device.type not in ("cpu", "meta")]
    if away:
        raise UsageError(
            f"parallelize: '{away[0]}' is on an accelerator, but stages and ranks speak to each other over Gloo, on "
            "the CPU: leave the model there."
        )


def _ends(model: nn.Module, asked: ParallelizeOptions, mesh: Mesh) -> list[int]:
    """Return behind which layers stages end."""
    layers = layers_of(model)
    ends = ends_of(layers, asked.placement, asked.balance, mesh)
    require_apart(layers, ends)
    return ends


def _split(model: nn.Module, loss: Loss, mesh: Mesh, *, in_row: bool) -> Loss:
    """Split the layers of a model over tensor ranks, in place; return the loss of what it gives then.

    Args:
        model: the whole one.
        loss: of what it gives.
        mesh: of all workers.
        in_row: its layers are called one after the other, and its own forward is not.
    """
    from paceline.model_parallel.split_loss import loss_of_split
    from paceline.model_parallel.tensor import split_over  # takes half a second

    materialise(model)
    with mesh.explained("splitting layers"):
        split_over(
            model, mesh.axis("tensor"), row=[(one.name, one.module) for one in layers_of(model)] if in_row else ()
        )
    return partial(loss_of_split, loss)
