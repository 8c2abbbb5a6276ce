"""View of a job for the workers that hold the same part of a model, one in each replica."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.collective.collectives import Collectives
from paceline.errors import UsageError
from paceline.model_parallel.arrangement import Arrangement
from paceline.model_parallel.mesh import Mesh
from paceline.model_parallel.part import ModelPart
from paceline.training.embedding_gradients import EmbeddingLookups
from paceline.training.parameter_server import Settings, TrainingJob
from paceline.training.strategy import Distributed, Strategy
from paceline.training.weights import Weights
from paceline.update.table import TableSpec
from paceline.update.torch_rule import granularity_of
from paceline.worker.metrics import StepMetrics
from paceline.worker.table import Table


class WholeJob(TrainingJob, Protocol):
    """Job in which a given worker writes the initial values of a table."""

    def meet(self, place: str, problem: str = "", *, needs_first: bool = False, first: int = 0) -> None:
        """Wait until all workers reach the same place."""
        ...

    def open_table(
        self,
        spec: TableSpec,
        shape: tuple[int, ...],
        write_first: Callable[[Tensor], object],
        *,
        read_my_writes: bool,
        live: bool,
        first: int = 0,
    ) -> Table:
        """Declare a table and wait for its initial values, which worker `first` writes."""
        ...


@dataclass(frozen=True, slots=True)
class PartJob:
    """Job whose workers are the replicas of a part. Clocks, samples and servers are those of the whole job."""

    whole: WholeJob
    part: ModelPart

    @property
    def rank(self) -> int:
        """Number of this worker's replica."""
        return self.part.replica

    @property
    def size(self) -> int:
        """Number of replicas."""
        return self.part.grid.replicas

    @property
    def mesh(self) -> Mesh:
        """Process groups of the workers that hold the same part, and of those that hold the others."""
        assert self.part.mesh is not None, "several workers hold this model"
        return self.part.mesh

    @property
    def arrangement(self) -> Arrangement:
        """How all workers share models and data."""
        return self.whole.arrangement

    @property
    def num_samples(self) -> int:
        """Number of samples that loaders have given this replica so far."""
        return self.whole.num_samples

    @property
    def lookups(self) -> EmbeddingLookups:
        """Embedding lookups of this worker."""
        return self.whole.lookups

    @property
    def meter(self) -> StepMetrics:
        """Metrics of this worker's steps."""
        return self.whole.meter

    @property
    def exchange(self) -> Collectives:
        """Collective calls among all workers."""
        return self.whole.exchange

    def open_table(
        self,
        spec: TableSpec,
        shape: tuple[int, ...],
        write_first: Callable[[Tensor], object],
        *,
        read_my_writes: bool,
        live: bool,
    ) -> Table:
        """Declare a table of this part, with initial values from replica 0."""
        first = self.part.first
        return self.whole.open_table(spec, shape, write_first, read_my_writes=read_my_writes, live=live, first=first)

    def communicating(self) -> AbstractContextManager[None]:
        """Count the time inside the block as communication on the critical path of the loop."""
        return self.whole.communicating()

    def keep(self, weights: Weights) -> None:
        """Detach these weights from the servers' memory when this worker leaves."""
        self.whole.keep(weights)

    def clock(self, *, samples: float | None) -> int:
        """Finish the current clock of this worker."""
        return self.whole.clock(samples=samples)

    def heed(self) -> None:
        """End this process if it was told to leave."""
        self.whole.heed()

    def meet(self, place: str, problem: str = "", *, needs_first: bool = False) -> None:
        """Wait until all workers, also those of other parts, reach the same place."""
        self.whole.meet(place, problem, needs_first=needs_first, first=self.part.first)


def distribute_part(
    strategy: Strategy,
    optimizer: torch.optim.Optimizer,
    model: nn.Module | None,
    settings: Settings,
    job: WholeJob,
    part: ModelPart | None,
) -> Distributed:
    """Distribute the optimizer of a part of a model among the workers that hold it; a whole model among all workers.

    Raises:
        UsageError: `overlap`, as each micro-batch adds to the gradients; or an optimizer that needs whole tensors, for
            layers that are split.
    """
    if part is None:
        return strategy.distribute(optimizer, model, settings, job)
    if settings.overlap:
        raise UsageError(
            f"'{settings.name}' is told overlap=True, but the gradients of a model that is cut are whole only when "
            "forward_backward is over: leave it out."
        )
    if part.grid.tensor > 1 and model is not None:
        _require_elements(optimizer, model, settings.name)
    settings = replace(settings, name=f"{settings.name}{part.name_end}")
    made = strategy.distribute(optimizer, model, settings, PartJob(job, part))
    made.no_slices = "a model that several workers hold, who all need the same slices: leave them out."
    made.no_scaling = "a model that several workers hold, who do not see the same gradients: train in bfloat16."
    return made


def _require_elements(optimizer: torch.optim.Optimizer, model: nn.Module, name: str) -> None:
    """Refuse an optimizer that needs whole tensors, for parameters of which each rank has a part."""
    from paceline.model_parallel.tensor import (
        cut_parameters,  # takes half a second, and is imported already if layers are split
    )

    cut = {id(parameter): own for own, parameter in cut_parameters(model).items()}
    found = [cut[id(one)] for group in optimizer.param_groups for one in group["params"] if id(one) in cut]
    if found and granularity_of(optimizer) != "element":
        raise UsageError(
            f"'{name}': {type(optimizer).__name__} looks at whole tensors, and of '{found[0]}' each tensor rank has a "
            "part: every rank would step by what its part says. Take an optimizer that steps each element by itself "
            "(AdamW, SGD, ...) for parameters of split layers, or pipeline:K or all-reduce in place of tensor:T."
        )
