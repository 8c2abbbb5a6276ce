"""Fully sharded data parallelism: every worker computes with the whole model, and stores and steps a slice of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from paceline.core.calls import checked
from paceline.errors import UsageError
from paceline.training.strategy import Settings, TrainingJob
from paceline.update.torch_rule import granularity_of

if TYPE_CHECKING:
    from paceline.training.fsdp_optimizer import ShardedOptimizer


@checked
def fsdp() -> FullySharded:
    """Return fully sharded data parallelism for `paceline.distributed(strategy=...)`, on torch's FSDP2.

    Each worker keeps a slice of every parameter, gradient and state of the optimizer, and gathers a layer while it
    runs; `paceline.distributed` needs `model`. Learning is that of one process with the whole
    batch. A step sends and receives 3 (n-1)/n times the bytes of the model, all-reduce 2 (n-1)/n.

    Needs workers that are processes, on the CPU: `paceline run --transport shm` or tcp.

    Example:
        >>> import paceline
        >>> paceline.strategies.fsdp()
        FullySharded()
    """
    return FullySharded()


_NOT_ON_SLICES: Final = ("Rprop",)  # it writes to elements by a mask


@dataclass(frozen=True, slots=True)
class FullySharded:
    """Strategy in which each worker keeps a slice of the model; see `paceline.strategies.fsdp`."""

    def distribute(
        self, optimizer: torch.optim.Optimizer, model: nn.Module | None, settings: Settings, job: TrainingJob
    ) -> ShardedOptimizer:
        """Shard a model unless it is sharded, and make an optimizer that steps this worker's slice."""
        if model is None:
            raise UsageError(
                f"strategy fsdp of '{settings.name}' shards a module and follows its forward and backward: give "
                "model=... to paceline.distributed."
            )
        if any(group.get("fused") for group in optimizer.param_groups):
            raise UsageError(
                f"strategy fsdp of '{settings.name}': fused optimizers cannot step slices: leave out fused=True."
            )
        slow = [name for name in _NOT_ON_SLICES if type(optimizer) is getattr(torch.optim, name, None)]
        if slow or granularity_of(optimizer) != "element":
            why = "does what torch cannot do with slices" if slow else "looks at whole tensors"
            raise UsageError(
                f"strategy fsdp of '{settings.name}': {type(optimizer).__name__} {why}, and each worker has a slice of "
                "every parameter. Take an optimizer that steps each element by itself (AdamW, SGD, ...), or all-reduce "
                "in place of fsdp."
            )
        if settings.part is not None and settings.part.grid.pipeline > 1:
            raise UsageError(
                f"strategy fsdp of '{settings.name}' does not go with pipeline, which runs backward once for each "
                "micro-batch: take all-reduce or the parameter server between replicas of a pipeline."
            )
        from paceline.training.fsdp_optimizer import ShardedOptimizer  # its imports from torch take half a second

        return ShardedOptimizer(optimizer, model, settings, job)
