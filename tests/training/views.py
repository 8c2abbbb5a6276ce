"""Models whose parameters can be views of the servers' memory, and where they lie."""

from __future__ import annotations

import torch
from tests.training.recipes import one_batch, seeded
from torch import Tensor, nn

ALL = {"0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"}


def aligned() -> nn.Module:
    """Every tensor starts at a multiple of 64 bytes; two servers cut inside the second weight."""
    return seeded(lambda: nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 16), nn.Linear(16, 3)))


def of_many_pages() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(9, 512), nn.Tanh(), nn.Linear(512, 3)))


def of_peers(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory that was lent: mapped from another process's file, and privately."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            place, access, *_ = line.split()
            start, stop = (int(edge, 16) for edge in place.split("-"))
            if start <= tensor.data_ptr() < stop:
                return access.endswith("p") and "memfd:paceline" in line
    return False


def viewing(model: nn.Module) -> set[str]:
    """The parameters that are views of the servers' memory."""
    return {name for name, parameter in model.named_parameters() if of_peers(parameter)}


def run_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        one_batch(model, rank, step)
        optimizer.step()
