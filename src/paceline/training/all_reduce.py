"""All-reduce data parallelism: every worker holds the whole model and steps it with the mean of all gradients."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from paceline.core.calls import shown
from paceline.errors import UsageError
from paceline.training.all_reduce_parts import CombinedOptimizer
from paceline.training.collective_optimizer import CollectiveOptimizer, checked_weight
from paceline.training.ddp import DDPReplica, DDPSettings
from paceline.training.flat import segments_of
from paceline.training.state import checked_by_all
from paceline.training.strategy import Distributed, Settings, TrainingJob, require_fresh

_MOST_MB: Final = 1e6


@dataclass(frozen=True, slots=True)
class AllReduce:
    """All-reduce strategy: workers combine gradients while backward runs; see `paceline.all_reduce`.

    Args:
        unused: whether parameters may be left out of a forward; finding them costs a walk through the graph each time.
        bucket_mb: size of a bucket in megabytes.
    """

    unused: bool = False
    bucket_mb: float = 25.0

    def __post_init__(self) -> None:
        """Validate the bucket size."""
        if not 0 < self.bucket_mb <= _MOST_MB:
            raise UsageError(f"bucket_mb is {self.bucket_mb:g}, expected more than 0 and at most {_MOST_MB:g}.")
        if not isinstance(self.unused, bool):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            raise UsageError(f"unused is {shown(self.unused)}, expected True or False.")

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> Distributed:
        """Make an optimizer that steps the same way on all workers."""
        if settings.part is not None:
            return CombinedOptimizer(optimizer, model, settings, job)
        if model is None:
            raise UsageError(
                f"strategy all-reduce of '{settings.name}' follows the forward and backward of a module: give "
                "model=... to paceline.distributed."
            )
        return ReplicatedOptimizer(optimizer, model, settings, self, job)


class ReplicatedOptimizer(CollectiveOptimizer):
    """Optimizer used like the one it wraps, which steps on every worker with the mean of all workers' gradients.

    After `backward` the gradients are already combined, as in DistributedDataParallel, so clipping applies to the
    gradients of the step. State, groups and parameters are the same on all workers.

    Attributes:
        num_refused: steps that were not taken, by any worker, because the combined gradients were not finite.
    """

    no_slices = "all-reduce, which combines gradients in every backward: take servers, or leave slices out."

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module,
        settings: Settings,
        strategy: AllReduce,
        job: TrainingJob,
    ) -> None:
        require_fresh(optimizer)
        named, _ = segments_of(optimizer, model)
        super().__init__(optimizer, "all-reduce", settings, job)
        unused, bucket_mb, average = strategy.unused, strategy.bucket_mb, settings.average_buffers
        how = DDPSettings(settings.name, settings.scale, settings.nonfinite, unused, bucket_mb, average)
        self._replica = DDPReplica(model, named, how, job)
        job.exchange.when_closed(WeakMethod(self._replica.close))

    def send(self, samples: float | None) -> float:
        """Step with the gradients that the last backward has combined.

        Args:
            samples: number of samples behind them. Backward weights gradients by the samples that loaders from `shard`
                have returned since the last step; set another number before it, with `weigh`.

        Raises:
            UsageError: backward has not combined gradients since the last step, or with another weight; or they are not
                finite under nonfinite="halt".
            PeerError: a worker is gone.
        """
        weight = self._replica.consume_round(samples)
        self._apply()
        return weight

    def _named(self) -> Mapping[str, Tensor]:
        return self._replica.named

    def weigh(self, samples: float) -> None:
        """Set before backward how many samples the gradients of this step stand for, their weight in the mean.

        Needed only where that is not what loaders from `shard` have returned: the number of tokens, for example.
        """
        self._replica.weight = checked_weight(samples)

    def step_without_batch(self) -> None:
        """Take part in a step without a batch, with weight 0."""
        self.zero_grad()
        self._replica.backward_of_nothing()
        self._replica.consume_round(None)
        self._apply()
        self.zero_grad()  # scripts call it only after steps of their own

    def accumulate(self) -> AbstractContextManager[None]:
        """Combine no gradients of the passes in the block: the next backward after it combines their sum.

        Call forward inside too. Without this every backward combines what it adds, at the same cost each time.
        """
        return self._replica.accumulate()

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Put the state of all workers' last step into the model for the length of a `with` block.

        Embeddings read the same state. Gradients are off inside the block.
        """
        with torch.no_grad(), self._job.lookups.exactly():
            yield

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, with the parameters and buffers of worker 0.

        Every worker must call it, with the same state; blocks until all have.
        """
        with checked_by_all(self._job):
            self._set_state(state_dict)
        self._replica.copy_from_first()

    def detach(self) -> None:
        """Stop combining gradients."""
        self._replica.close(True)

    def _apply(self) -> None:
        """Step, unless the combined gradients are not finite."""
        told = self._replica.settle(self._numbers.encoded())
        self._numbers.align_gradients(told)
        with self._numbers.held(told):
            self._step_unless(self._replica.problem)
