"""All-reduce data parallelism: every worker has the whole model and steps it, with the mean of all gradients."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from paceline.errors import UsageError
from paceline.observe import trace as records
from paceline.training.combined import CombinedOptimizer
from paceline.training.flat import segments_of
from paceline.training.optimizer import Job, Settings, require_fresh
from paceline.training.part_job import PartJob
from paceline.training.replica import Replica, ReplicaSettings
from paceline.training.strategy import Distributed


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The workers combine their gradients among themselves while backward runs; see `paceline.all_reduce`.

    Args:
        unused: parameters may be left out of a forward; to find them costs a walk through the graph each time.
        bucket_mb: how much travels together.
    """

    unused: bool = False
    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        """Refuse buckets of nothing."""
        if self.bucket_mb <= 0:
            raise UsageError(f"bucket_mb is {self.bucket_mb:g}, expected more than 0.")

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: Job
    ) -> Distributed:
        """Make an optimizer that steps the same way on all workers."""
        if isinstance(job, PartJob):
            return CombinedOptimizer(optimizer, model, settings, job)
        if model is None:
            raise UsageError(
                f"strategy all-reduce of '{settings.name}' follows the forward and backward of a module: give "
                "model=... to paceline.distributed."
            )
        return ReplicatedOptimizer(optimizer, model, settings, self, job)


class ReplicatedOptimizer(Distributed):
    """Used like the optimizer it wraps, which steps on every worker with the mean of all workers' gradients.

    After `backward` the gradients are already combined, as in DistributedDataParallel: to clip them then clips what
    the step takes. State, groups and parameters are the same on all workers.

    Attributes:
        num_refused: steps that were not taken, by any worker, as the combined gradients were not finite.
    """

    no_slices = "all-reduce, which combines gradients in every backward: take servers, or leave slices out."

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module, settings: Settings, strategy: AllReduce, job: Job
    ) -> None:
        require_fresh(optimizer)
        named, _ = segments_of(optimizer, model)
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.num_refused = 0
        self.turn_s = time.monotonic()
        self.state = optimizer.state
        self._optimizer = optimizer
        self._settings = settings
        self._job = job
        self._num_samples = job.num_samples  # as of the last step
        unused, bucket_mb, average = strategy.unused, strategy.bucket_mb, settings.average_buffers
        how = ReplicaSettings(settings.name, settings.scale, settings.nonfinite, unused, bucket_mb, average)
        self._replica = Replica(model, named, how, job)
        job.exchange.when_closed(WeakMethod(self._replica.close))

    def __repr__(self) -> str:
        """Return what is distributed, and how."""
        own, kind = type(self).__name__, type(self._optimizer).__name__
        return super().__repr__().replace(own, f"Distributed {kind}, all-reduce", 1)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that come after the model was attached; used by the constructor before."""
        if "_replica" in self.__dict__:
            raise UsageError(
                f"'{self._settings.name}' has all its parameters from the start: give the wrapped optimizer every "
                "group, and freeze those that are to join later with requires_grad_(False)."
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the parameters, and with them those that embeddings have collected."""
        super().zero_grad(set_to_none)
        self._job.lookups.zero_grad()

    def send(self, samples: float | None) -> float:
        """Step with the gradients that the last backward has combined.

        Args:
            samples: how many samples they stand for. They are weighed while backward runs, by the samples that loaders
                from `shard` have handed out since the last step; say other numbers before, with `weigh`.

        Raises:
            UsageError: backward has not combined gradients since the last step, or weighed them differently; or they
                are not finite under nonfinite="halt".
            PeerError: a worker is gone.
        """
        weight = self._replica.take_round(samples)
        self._apply()
        return weight

    def receive(self) -> None:
        """Ask for nothing: every worker has stepped itself."""

    def weigh(self, samples: float) -> None:
        """Say before backward how many samples the gradients of this step stand for, their weight in the mean.

        Only where that is not what loaders from `shard` have handed out: the number of tokens, for example.
        """
        if not samples > 0:
            raise UsageError(f"weigh got {samples} samples, expected more than 0.")
        self._replica.weight = samples

    def follow(self) -> None:
        """Take the step of the others, for which this worker has no batch: its part weighs nothing."""
        self.zero_grad()
        self._replica.backward_of_nothing()
        self._replica.take_round(None)
        self._apply()

    def arrive(self) -> None:
        """Return at once: parameters never wait."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Combine nothing in the passes inside: the next backward outside combines what they have added up.

        Forward belongs inside too. Without this every backward combines what it adds, which costs as much each time.
        """
        return self._replica.accumulate()

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Hold one consistent state in the model for the length of a `with` block: that of all workers' last step.

        Embeddings read as much. Gradients are off meanwhile.
        """
        with torch.no_grad(), self._job.lookups.exactly():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, which is the same on all workers."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state, and parameters and buffers to what they are on worker 0.

        Every worker must call it, with the same state; blocks until all have.
        """
        self._optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state
        self._replica.copy_from_first()

    def _apply(self) -> None:
        """Step, unless the combined gradients are not finite: all workers see the same, so all do the same."""
        self.turn_s = time.monotonic()
        problem = self._replica.problem
        if not problem:
            self._optimizer.step()
        elif self._settings.nonfinite == "halt":
            raise UsageError(f"worker {self._job.rank}, step of '{self._settings.name}': {problem}")
        else:
            self.num_refused += 1
            now, name = self._job.meter.now(), self._settings.name
            self._job.meter.trace.record(records.Refusal(now, -1, self._job.rank, name, problem))
        self._replica.average_buffers()
