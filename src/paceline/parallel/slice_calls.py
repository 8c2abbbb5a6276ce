"""What torch calls to gather the slices of a layer, and to add up its gradients into slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

Guard = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class SliceCall:
    """A call among ranks in the middle of forward or backward.

    Args:
        guard: is entered around it, to say who is to blame if it fails.
    """

    guard: Guard = nullcontext

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for what it gives or takes."""
        return torch.empty(size, dtype=dtype, device=device)


class GatherSlices(SliceCall):
    """Gives every rank all slices."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        """Gather; blocks until all ranks have come."""
        del async_op
        with self.guard():
            dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group)


class ScatterSums(SliceCall):
    """Adds up gradients, each rank getting its slice of the sum.

    Gloo's own adds everything up everywhere first, which sends 2 (n-1)/n times the gradients. Here each rank sends
    every other its slice, (n-1)/n times, and each adds up what it gets.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: object, async_op: bool = False
    ) -> None:
        """Add up; blocks until all ranks have come."""
        del async_op
        slices = torch.empty_like(input_tensor)
        with self.guard():
            dist.all_to_all_single(slices, input_tensor, group=group)
        torch.sum(slices.view(group.size(), -1), 0, out=output_tensor.view(-1))
        if op == ReduceOp.AVG:
            output_tensor.div_(group.size())
