"""Gradients combined after backward, among those who hold the same part of a model: each steps it with their mean."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.observe import trace as records
from paceline.tensors.summing import num_nonfinite
from paceline.training.buffers import floating_buffers
from paceline.training.flat import Flat, segments_of
from paceline.training.optimizer import Settings, require_fresh
from paceline.training.part_job import PartJob
from paceline.training.strategy import Distributed


class CombinedOptimizer(Distributed):
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
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.num_refused = 0
        self.turn_s = time.monotonic()
        self.state = optimizer.state
        self._optimizer = optimizer
        self._settings = settings
        self._job = job
        self._part = job
        self._num_samples = job.num_samples  # as of the last step
        self._flat = Flat.over(named)
        averaged = model is not None and settings.average_buffers
        self._buffers = floating_buffers(model) if averaged and model is not None else {}
        self._copy_from_first()

    def __repr__(self) -> str:
        """Return what is distributed, and how."""
        own, kind = type(self).__name__, type(self._optimizer).__name__
        return super().__repr__().replace(own, f"Distributed {kind}, all-reduce", 1)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse groups that come after the others were combined; used by the constructor before."""
        if "_flat" in self.__dict__:
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

    def receive(self) -> None:
        """Ask for nothing: every worker has stepped itself."""

    def follow(self) -> None:
        """Take the step of the others, for which this replica has no batch: its part weighs nothing."""
        self.zero_grad()
        self._step(0.0)

    def arrive(self) -> None:
        """Return at once: parameters never wait."""

    def accumulate(self) -> AbstractContextManager[None]:
        """Hold back nothing: gradients are combined in `step`."""
        return nullcontext()

    @contextmanager
    def snapshot(self) -> Generator[None]:
        """Hold one consistent state in the model, that of the last step; gradients are off meanwhile."""
        with torch.no_grad(), self._job.lookups.exactly():
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped optimizer, which is the same in all replicas."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the state, and parameters and buffers to what they are in replica 0; all workers must call it."""
        self._optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self._optimizer.param_groups, self._optimizer.state
        self._copy_from_first()

    # -- behind the scenes -------------------------------------------------------------------------------------------

    def _step(self, weight: float) -> None:
        """Combine gradients that weigh so much, step with their mean, and average buffers."""
        self.turn_s = time.monotonic()
        with self._job.communicating():
            if self._settings.nonfinite == "zero":
                for tensor in self._flat.tensors:
                    if tensor.grad is not None:
                        tensor.grad.nan_to_num_(0.0, 0.0, 0.0)
            if self._part.size > 1:
                self._combine(weight)
            problem = self._problem()
        if not problem:
            self._optimizer.step()
        elif self._settings.nonfinite == "halt":
            raise UsageError(f"step of '{self._settings.name}': {problem}")
        else:
            self.num_refused += 1
            rank, meter = self._job.exchange.company.rank, self._job.meter
            meter.trace.record(records.Refusal(meter.now(), -1, rank, self._settings.name, problem))
        with self._job.communicating():
            self._average_buffers(weight)

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
        if not bad.item():
            return ""
        return "the combined gradients have NaN or infinity: a worker's loss was not finite, or the rate is too high"

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
