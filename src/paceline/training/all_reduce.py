"""All-reduce data parallelism: every worker steps its model, or its part of one, with the mean of all gradients."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final
from weakref import WeakMethod

import msgspec
import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor, nn

from paceline.core.calls import checked, shown
from paceline.errors import UsageError
from paceline.model_parallel.parallelize import Parallel
from paceline.notices import tell
from paceline.training.buffers import floating_buffers
from paceline.training.collective_optimizer import (
    NOT_FINITE,
    CollectiveOptimizer,
    are_compared,
    checked_weight,
    digest_of_values,
    numbers_of_first,
    require_weighed,
)
from paceline.training.ddp import DDPReplica, DDPSettings
from paceline.training.flat import FlatParameters, laid_out_like, segments_of
from paceline.training.model_checks import require_dense_gradients
from paceline.training.same_batches import SameBatches, digest_of_batch
from paceline.training.state import checked_by_all, laid_out_for
from paceline.training.strategy import Distributed, Settings, TrainingJob, require_fresh
from paceline.update.summing import num_nonfinite

_MOST_MB: Final = 1e6


class AllReduce(msgspec.Struct, frozen=True):
    """All-reduce strategy: workers combine gradients while backward runs; see `paceline.strategies.all_reduce`.

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


@checked
def all_reduce(*, unused: bool = False, bucket_mb: float = 25.0) -> AllReduce:
    """Return all-reduce for `paceline.distributed(strategy=...)`: every worker keeps and steps the whole model.

    The gradient of a step is the mean of all workers', which are sent while backward runs (built on
    DistributedDataParallel). One process with the whole batch computes the same. `paceline.distributed` needs `model`.

    Args:
        unused: allow parameters that are not used in every forward, which costs a walk through the graph each time.
        bucket_mb: size of a bucket of gradients in megabytes.

    Raises:
        UsageError: `bucket_mb` is not more than 0.

    Example:
        >>> import torch, paceline
        >>> _ = paceline.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = paceline.distributed(sgd, strategy=paceline.strategies.all_reduce(), model=model, name="all")
        >>> model(torch.ones(2)).sum().backward()
        >>> optimizer.step()
    """
    return AllReduce(unused, bucket_mb)


class ReplicatedOptimizer(CollectiveOptimizer):
    """Optimizer used like the one it wraps, which steps on every worker with the mean of all workers' gradients.

    After `backward` the gradients are already combined, as in DistributedDataParallel, so clipping applies to the
    gradients of the step. State, groups and parameters are the same on all workers.

    Attributes:
        num_refused: steps that were not taken, by any worker, because the combined gradients were not finite.
    """

    no_slices = "all-reduce, which combines gradients in every backward: take servers, or leave slices out."
    clips_mean = True

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
        self._tell_of_scales()
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
            self._set_state(laid_out_for(self, state_dict, self._settings.name, self._named()))
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


class CombinedOptimizer(CollectiveOptimizer):
    """Optimizer used like the one it wraps; all workers that hold the same part of the model step identically.

    After `forward_backward` the gradients are already combined, as under all-reduce of whole models, so clipping
    applies to the gradients of the step.

    Attributes:
        num_refused: steps that were not taken, by any worker, because the combined gradients were not finite.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> None:
        require_fresh(optimizer)
        named, _ = segments_of(optimizer, model)
        if model is not None:
            require_dense_gradients(model, settings.name)
        super().__init__(optimizer, "all-reduce", settings, job)
        self._mesh, self._num_replicas = settings.mesh(job), settings.num_replicas(job)
        self._flat = FlatParameters.over(named)
        self._buffers = floating_buffers(model) if model is not None and settings.average_buffers else {}
        self._weight: float | None = None  # of the gradients of this step, where the script has set it
        self._done: float | None = None  # the weight used, once they are combined
        self._holding = False
        self._num_steps = 0
        self._num_combined = 0  # since the last step
        is_telling = settings.first == 0  # one part tells of the data of all
        self._same_batches = SameBatches(job.rank, settings.name, tell if is_telling else str)
        self._weights: list[float] = []  # of the gradients of all replicas, when they were last combined
        if isinstance(model, Parallel):
            model.when_backward(WeakMethod(self._after_backward))
        self._copy_from_first()

    def send(self, samples: float | None) -> float:
        """Step with the gradients that `forward_backward` has combined.

        Args:
            samples: how many samples they stand for. `forward_backward` weights them by the samples that loaders from
                `shard` have returned since the last step; set other numbers before, with `weigh`. Gradients that a
                script has computed without `forward_backward` are weighted and combined here.

        Raises:
            UsageError: the gradients have another weight, or are not finite under nonfinite="halt".
            PeerError: a worker is gone.
        """
        if self._done is None:
            self._weight = samples if samples is not None else self._weight
            self._after_backward(finish=True)
        where = f"worker {self._job.rank}, step of '{self._settings.name}'"
        done, self._weight = self._done or 0.0, None
        scale = self._settings.scale if self._num_replicas > 1 else "mean"  # a single replica needs no weights
        weight = require_weighed(where, scale, samples, done)
        self._num_samples = self._job.num_samples
        self._apply(weight)
        return weight

    def weigh(self, samples: float) -> None:
        """Set before `forward_backward` how many samples its gradients stand for, their weight in the mean.

        Needed only where that is not what loaders from `shard` have returned: the number of tokens, for example.
        """
        self._weight = checked_weight(samples)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, combined or not."""
        super().zero_grad(set_to_none)
        self._done, self._num_combined = None, 0

    def step_without_batch(self) -> None:
        """Take part in a step without a batch, with weight 0."""
        self.zero_grad()
        self._weight = 0.0
        self._after_backward(finish=True)
        self._weight = None
        self._apply(0.0)
        self.zero_grad()  # scripts call it only after steps of their own

    @contextmanager
    def accumulate(self) -> Generator[None]:
        """Combine no gradients of the passes in the block: the next pass after it combines their sum."""
        holding, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = holding

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Put the state of the last step into the model for the length of a `with` block; gradients are off inside."""
        with torch.no_grad(), self._job.lookups.exactly():
            yield

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state, with the parameters and buffers of replica 0; all workers must call it."""
        with checked_by_all(self._job):
            self._set_state(laid_out_for(self, state_dict, self._settings.name, self._named()))
        self._copy_from_first()

    def _named(self) -> Mapping[str, Tensor]:
        return self._flat.named

    # -- behind the scenes -------------------------------------------------------------------------------------------

    def _after_backward(self, *, finish: bool = False) -> None:
        """Combine the gradients of this replica with those of the others, unless more are to be added."""
        if (self._holding and not finish) or self._successor:
            return
        weight = self._weight
        if weight is None:
            weight = float(self._job.num_samples - self._num_samples or 1)
        self._done = weight
        with self._job.metrics.communicating():
            if self._settings.nonfinite == "zero":
                for tensor in self._flat.tensors:
                    if tensor.grad is not None:
                        tensor.grad.nan_to_num_(0.0, 0.0, 0.0)
            if self._num_replicas > 1:
                self._combine(weight if self._settings.scale == "samples" or weight == 0 else 1.0)
        self._num_combined += 1

    def _apply(self, weight: float) -> None:
        """Step with combined gradients, and average buffers."""
        with self._job.metrics.communicating():
            if self._num_replicas > 1:
                self._agree("step", weight)  # before calls whose sizes may differ
            self._copy_gradients()
            told = self._numbers_of_first(weight) if self._num_replicas > 1 else None
            self._numbers.align_gradients(told)
            problem = self._problem()
        with self._numbers.held(told):
            self._step_unless(problem)
        self._done, self._num_combined, self._num_steps = None, 0, self._num_steps + 1
        with self._job.metrics.communicating():
            self._average_buffers(weight)

    def _numbers_of_first(self, weight: float) -> bytes | None:
        """Agree on the hyperparameters of a step, periodically also that all replicas are equal to the bit."""
        values = digest_of_values(self._flat.tensors) if are_compared(self._num_steps) else 0
        return numbers_of_first(self._mesh, self._numbers.encoded(), has_batch=weight > 0, values=values)

    def _agree(self, what: str, weight: float) -> list[float]:
        """Return the weight of each replica's gradients; blocks until all replicas make the same call.

        Raises:
            UsageError: a replica has run `forward_backward` more often for this step.
        """
        digest, same = 0, self._same_batches
        if same.is_checking and what == "gradients":
            digest = digest_of_batch([one.grad for one in self._flat.tensors])
        numbers = [self._num_steps, self._num_combined, what == "gradients", weight, digest]
        own = torch.tensor(numbers, dtype=torch.float64)
        mesh, told = self._mesh, [torch.zeros_like(own) for _ in range(self._num_replicas)]
        with mesh.explained(f"step of '{self._settings.name}'", mesh.group("data")):
            dist.all_gather(told, own, group=mesh.group("data"))
        if any(not torch.equal(one[:3], own[:3]) for one in told):
            done = "; ".join(
                f"replica {replica} has taken {one[0]:g} steps, then run it {one[1]:g} times, and is in "
                f"{'forward_backward' if one[2] else 'step'}"
                for replica, one in enumerate(told)
            )
            raise UsageError(
                f"worker {self._job.rank}, step of '{self._settings.name}': all replicas have to run "
                f"forward_backward equally often for a step, as it combines their gradients: {done}. Run all but the "
                "last of a step inside of optimizer.accumulate()."
            )
        if same.is_checking and what == "gradients":
            ranks = [mesh.grid.rank(replace(mesh.position, replica=replica)) for replica in range(len(told))]
            same.compare(ranks, [int(one[4]) for one in told])
        return [float(one[3]) for one in told]

    def _combine(self, weight: float) -> None:
        """Replace each gradient by the weighted mean over the replicas; one that no replica has stays None.

        Gradients combined before for the same step are the same on all replicas, so their mean does not change them.
        """
        if self._settings.scale == "sum" and self._num_combined:
            raise UsageError(
                f"'{self._settings.name}': scale='sum' would add up again what the last forward_backward has combined: "
                "run all but the last of a step inside of optimizer.accumulate()."
            )
        self._weights = self._agree("gradients", weight)
        tensors = self._flat.tensors
        gradients = [tensor.grad for tensor in tensors]
        present = [0.0 if gradient is None or weight == 0 else 1.0 for gradient in gradients]
        sent = [
            (torch.zeros_like(tensor) if gradient is None else gradient.detach() * weight)
            for tensor, gradient in zip(tensors, gradients, strict=True)
        ]
        *sums, tail = self._summed([*sent, torch.tensor([weight, *present], dtype=torch.float64)])
        total, *counts = tail.tolist()
        divisor = 1.0 if self._settings.scale == "sum" else total or 1.0
        for tensor, sum_, count in zip(tensors, sums, counts, strict=True):
            tensor.grad = laid_out_like(tensor.detach(), sum_.to(tensor.dtype).div_(divisor)) if count else None

    def _copy_gradients(self) -> None:
        """Give replicas without a batch the gradients of the first one with a batch, as its script has left them."""
        if self._num_replicas == 1 or all(self._weights) or not any(self._weights):
            return
        tensors = self._flat.tensors
        present = torch.tensor([float(tensor.grad is not None) for tensor in tensors], dtype=torch.float64)
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad.contiguous() for one in tensors]
        mesh, position = self._mesh, self._mesh.position
        first = next(replica for replica, weight in enumerate(self._weights) if weight)
        with mesh.explained(f"step of '{self._settings.name}'", mesh.group("data")):
            for tensor in (present, *gradients):
                source = mesh.grid.rank(replace(position, replica=first))
                dist.broadcast(tensor, src=source, group=mesh.group("data"))
        for tensor, gradient, has in zip(tensors, gradients, present.tolist(), strict=True):
            tensor.grad = laid_out_like(tensor.detach(), gradient) if has else None

    def _problem(self) -> str:
        """Return why the combined gradients may not be used, agreed with all parts of the model."""
        if self._settings.nonfinite in ("ignore", "zero"):
            return ""
        own = any(tensor.grad is not None and num_nonfinite(tensor.grad) for tensor in self._flat.tensors)
        bad = torch.tensor([float(own)])
        mesh = self._mesh
        with mesh.explained(f"step of '{self._settings.name}'"):
            dist.all_reduce(bad, group=mesh.replica)
        return NOT_FINITE if bad.item() else ""

    def _average_buffers(self, weight: float) -> None:
        """Set floating-point buffers to the mean over the replicas that had a batch."""
        if self._num_replicas == 1 or not self._buffers:
            return
        self._agree("buffers", weight)
        own = float(weight > 0)
        buffers = list(self._buffers.values())
        *sums, count = self._summed([*(buffer * own for buffer in buffers), torch.tensor([own])])
        for buffer, sum_ in zip(buffers, sums, strict=True):
            buffer.copy_(sum_ / max(1.0, count.item()))

    def _summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over the replicas, in float32 or more and in one call; blocks until it is over."""
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors[:-1]) else torch.float32
        flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
        mesh = self._mesh
        with mesh.explained(f"step of '{self._settings.name}'", mesh.group("data")):
            dist.all_reduce(flat, group=mesh.group("data"))
        sizes = [tensor.numel() for tensor in tensors]
        return [sum_.view(tensor.shape) for sum_, tensor in zip(flat.split(sizes), tensors, strict=True)]

    def _copy_from_first(self) -> None:
        """Set parameters and buffers to those of replica 0; blocks until all replicas call it."""
        mesh = self._mesh
        with mesh.explained(f"first values of '{self._settings.name}'", mesh.group("data")), torch.no_grad():
            for tensor in (*self._flat.tensors, *self._buffers.values()):
                dist.broadcast(tensor.data, src=self._settings.first, group=mesh.group("data"))
