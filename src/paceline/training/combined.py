"""Gradients combined after backward, among those who hold the same part of a model: each steps it with their mean."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.tensors.summing import num_nonfinite
from paceline.training.agreed_numbers import COMPARED_EVERY, digest_of_values, numbers_of_first
from paceline.training.buffers import floating_buffers
from paceline.training.flat import Flat, segments_of
from paceline.training.optimizer import Settings, require_fresh
from paceline.training.part_job import PartJob
from paceline.training.state import checked_by_all
from paceline.training.together import NOT_FINITE, SteppedTogether


class CombinedOptimizer(SteppedTogether):
    """Used like the optimizer it wraps, which steps on every worker that holds the same part in the same way.

    Gradients are each worker's own until `step`: to clip them before clips those of one replica.

    Attributes:
        num_refused: steps that were not taken, by any worker, as the combined gradients were not finite.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: PartJob
    ) -> None:
        require_fresh(optimizer)
        named, _ = segments_of(optimizer, model)
        super().__init__(optimizer, "all-reduce", settings, job)
        self._part = job
        self._num_samples = job.num_samples  # as of the last step
        self._num_steps = 0
        self._flat = Flat.over(named)
        self._buffers = floating_buffers(model) if model is not None and settings.average_buffers else {}
        self._copy_from_first()

    def send(self, samples: float | None) -> float:
        """Combine the gradients of all replicas, and step.

        Args:
            samples: how many samples they stand for; by default as many as loaders from `shard` have handed out.

        Raises:
            UsageError: the combined gradients are not finite under nonfinite="halt".
            PeerError: a worker is gone.
        """
        weight = samples if samples is not None else float(self._job.num_samples - self._num_samples or 1)
        self._num_samples = self._job.num_samples
        self._step(weight if self._settings.scale == "samples" else 1.0)
        return weight

    def follow(self) -> None:
        """Take the step of the others, for which this replica has no batch: its part weighs nothing."""
        self.zero_grad()
        self._step(0.0)

    def accumulate(self) -> AbstractContextManager[None]:
        """Hold back nothing: gradients are combined in `step`."""
        return nullcontext()

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Hold one consistent state in the model, that of the last step; gradients are off meanwhile."""
        with torch.no_grad(), self._job.lookups.exactly():
            yield

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state, and parameters and buffers to what they are in replica 0; all workers must call it."""
        with checked_by_all(self._job):
            self._set_state(state_dict)
        self._copy_from_first()

    # -- behind the scenes -------------------------------------------------------------------------------------------

    def _step(self, weight: float) -> None:
        """Combine gradients that weigh so much, step with their mean, and average buffers."""
        with self._job.communicating():
            if self._settings.nonfinite == "zero":
                for tensor in self._flat.tensors:
                    if tensor.grad is not None:
                        tensor.grad.nan_to_num_(0.0, 0.0, 0.0)
            told = None
            if self._part.size > 1:
                told = self._numbers_of_first(weight)
                self._combine(weight)
            problem = self._problem()
        with self._numbers.held(told):
            self._step_unless(problem)
        with self._job.communicating():
            self._average_buffers(weight)

    def _numbers_of_first(self, weight: float) -> bytes | None:
        """Agree on the hyperparameters of a step, now and then also that all replicas are equal to the bit."""
        compared = self._num_steps % COMPARED_EVERY == 0
        self._num_steps += 1
        values = digest_of_values(self._flat.tensors) if compared else 0
        return numbers_of_first(self._part.mesh, self._numbers.encoded(), has_batch=weight > 0, values=values)

    def _combine(self, weight: float) -> None:
        """Replace each gradient by the weighted mean over the replicas; one that none of them has stays away."""
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
            tensor.grad = sum_.to(tensor.dtype).div_(divisor) if count else None

    def _problem(self) -> str:
        """Return why the combined gradients may not be used: all parts of the model hear of it and do the same."""
        if self._settings.nonfinite in ("ignore", "zero"):
            return ""
        own = any(tensor.grad is not None and num_nonfinite(tensor.grad) for tensor in self._flat.tensors)
        bad = torch.tensor([float(own)])
        mesh = self._part.mesh
        with mesh.explained(f"step of '{self._settings.name}'"):
            dist.all_reduce(bad, group=mesh.replica)
        return NOT_FINITE if bad.item() else ""

    def _average_buffers(self, weight: float) -> None:
        """Set floating-point buffers to the mean over the replicas that had a batch."""
        if self._part.size == 1 or not self._buffers:
            return
        own = float(weight > 0)
        buffers = list(self._buffers.values())
        *sums, count = self._summed([*(buffer * own for buffer in buffers), torch.tensor([own])])
        for buffer, sum_ in zip(buffers, sums, strict=True):
            buffer.copy_(sum_ / max(1.0, count.item()))

    def _summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the sums over the replicas, added as float32 at least and in one call; blocks until it is over."""
        dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors[:-1]) else torch.float32
        flat = torch.cat([tensor.reshape(-1).to(dtype) for tensor in tensors])
        mesh = self._part.mesh
        with mesh.explained(f"step of '{self._settings.name}'"):
            dist.all_reduce(flat, group=mesh.group("data"))
        sizes = [tensor.numel() for tensor in tensors]
        return [sum_.view(tensor.shape) for sum_, tensor in zip(flat.split(sizes), tensors, strict=True)]

    def _copy_from_first(self) -> None:
        """Set parameters and buffers to what they are in replica 0; blocks until all replicas have come."""
        mesh = self._part.mesh
        with mesh.explained(f"first values of '{self._settings.name}'"), torch.no_grad():
            for tensor in (*self._flat.tensors, *self._buffers.values()):
                dist.broadcast(tensor.data, src=self._part.part.first, group=mesh.group("data"))
