"""State shared by the ranks that split one layer: their slices, the sums over them, and their random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

_ADDED_AS: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}  # rounded once, after all additions


@dataclass(frozen=True, slots=True)
class RankShare:
    """This rank's place among the ranks of a 1-D mesh that split layers between them."""

    mesh: DeviceMesh
    rank: int
    size: int

    @staticmethod
    def of(mesh: DeviceMesh) -> RankShare:
        """Return this rank's place in a mesh."""
        return RankShare(mesh, mesh.get_local_rank(), mesh.size())

    @property
    def group(self) -> ProcessGroup:
        """The connections to the other ranks."""
        return self.mesh.get_group()

    def copy_from_first(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the first rank; blocks until all have come."""
        dist.broadcast(tensor, src=dist.get_global_rank(self.group, 0), group=self.group)

    def add_up(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, the same bits on each; blocks until all have come."""
        total = tensor.to(_ADDED_AS.get(tensor.dtype, tensor.dtype), copy=True).contiguous()
        dist.all_reduce(total, group=self.group)
        return total.to(tensor.dtype)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the same shape; blocks until all have come."""
        own = tensor.detach().contiguous()
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.group)
        return found


@dataclass(frozen=True, slots=True)
class LayerCut:
    """How a parameter is divided: evenly along a dimension.

    Args:
        num_stacked: matrices that lie one after the other along it, each of which is divided.

    Example:
        >>> LayerCut(0, num_stacked=2).part(torch.arange(8), rank=1, size=2)
        tensor([2, 3, 6, 7])
    """

    dim: int
    num_stacked: int = 1

    def part(self, whole: Tensor, rank: int, size: int) -> Tensor:
        """Return a rank's part, in memory of its own."""
        stacked = whole.chunk(self.num_stacked, self.dim)
        return torch.cat([one.chunk(size, self.dim)[rank] for one in stacked], self.dim)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """Put the parts of all ranks together again."""
        stacked = zip(*(part.chunk(self.num_stacked, self.dim) for part in parts), strict=True)
        return torch.cat([one for pieces in stacked for one in pieces], self.dim)


class SplitRegion:
    """Where each rank computes its own part: from the layers that are split by columns to the one split by rows.

    What comes in is the same on all ranks; its gradient is the sum of theirs, taken once for all layers that it enters.
    Inside, dropout is drawn from a stream of each rank's own, seeded by the one that all have in common: so that
    different parts are dropped inside, the same outside, and a recomputation repeats both.
    """

    def __init__(self, share: RankShare) -> None:
        self._share = share
        self._entered: tuple[Tensor, Tensor] | None = None  # what came in last, and as what
        self._common: tuple[torch.Generator, Tensor] | None = None  # the stream outside, while one is inside

    def enter(self, tensor: Tensor) -> Tensor:
        """Return a tensor as the layers inside take it."""
        if self._entered is None or self._entered[0] is not tensor:
            self._entered = (tensor, enter(tensor, self._share))
        return self._entered[1]

    def draw_alone(self, device: torch.device) -> None:
        """Let random numbers be this rank's own from here on."""
        if self._common is None:
            generator = generator_of(device)
            seed = int(torch.randint(1 << 62, (), generator=generator, device=generator.device))
            self._common = (generator, generator.get_state())
            generator.manual_seed(seed + self._share.rank)

    def draw_together(self) -> None:
        """Let random numbers be the same on all ranks again."""
        if self._common is not None:
            generator, state = self._common
            generator.set_state(state)
            self._common = None

    def end_with(self, module: nn.Module) -> None:
        """Leave nothing behind when a module's forward is over, however it ends."""

        def close(module: nn.Module, inputs: object, outputs: object) -> None:
            del module, inputs, outputs
            self.draw_together()
            self._entered = None

        module.register_forward_hook(close, always_call=True)

    def surround(self, dropout: nn.Module) -> None:
        """Let a layer by itself draw from this rank's stream."""

        def begin(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            if module.training:
                self.draw_alone(inputs[0].device)

        dropout.register_forward_pre_hook(begin)
        self.end_with(dropout)


def generator_of(device: torch.device) -> torch.Generator:
    """Return the generator that layers on a device draw from."""
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def enter(tensor: Tensor, share: RankShare) -> Tensor:
    """Return the same values; their gradient is the sum of the gradients of all ranks."""
    return _Enter.apply(tensor, share) if tensor.requires_grad and torch.is_grad_enabled() else tensor


def leave(tensor: Tensor, share: RankShare) -> Tensor:
    """Return the sum of the tensors of all ranks; each of them has the gradient of the sum. Blocks."""
    return _Leave.apply(tensor, share)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, share: RankShare) -> Tensor:  # noqa: ANN401 - torch's own
        ctx.share = share
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        return ctx.share.add_up(gradients[0]), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, share: RankShare) -> Tensor:  # noqa: ANN401
        del ctx
        return share.add_up(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401
        del ctx
        return gradients[0], None
