"""Training twice: by the workers of a job, and by one process that accumulates the same micro-batches in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.training.parameter_server import DistributedOptimizer

torch.set_num_threads(1)

_seeding = threading.Lock()  # torch's generator belongs to the process, and workers here are threads of it


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    """Make a model with the same first values every time."""
    with _seeding:
        torch.manual_seed(0)
        return make()


def mlp() -> nn.Module:
    """224 parameters, so that two or three servers cut inside a tensor."""
    return seeded(lambda: nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def micro_batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(5, 9, generator=generator, dtype=dtype)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :3].sin()).square().mean()


def one_batch(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, micro_batch(rank, step)).backward()


def never(optimizer: torch.optim.Optimizer) -> Callable[[int], None]:
    return lambda step: None


@dataclass(frozen=True)
class Recipe:
    """How to train; `backward(model, rank, step)` leaves the gradients of one worker's step in the parameters."""

    model: Callable[[], nn.Module] = mlp
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam
    backward: Callable[[nn.Module, int, int], None] = one_batch
    schedule: Callable[[torch.optim.Optimizer], Callable[[int], None]] = never
    num_steps: int = 20


def parameters(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def train(worker: Session, recipe: Recipe, **settings: Any) -> tuple[Tensor, DistributedOptimizer]:
    """Train as one worker of a job: an ordinary loop with one changed line."""
    model = recipe.model()
    optimizer = paceline.distributed(recipe.optimizer(model), **settings)
    after_step = recipe.schedule(optimizer)
    for step in range(recipe.num_steps):
        optimizer.zero_grad()
        recipe.backward(model, worker.rank, step)
        optimizer.step()
        after_step(step)
    return parameters(model), optimizer


def train_alone(recipe: Recipe, num_workers: int) -> tuple[Tensor, torch.optim.Optimizer]:
    """Train in one process: the gradients of all workers are added in order, then divided by their number."""
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    after_step = recipe.schedule(optimizer)
    for step in range(recipe.num_steps):
        accumulate(model, recipe, num_workers, step)
        optimizer.step()
        after_step(step)
    return parameters(model), optimizer


def accumulate(model: nn.Module, recipe: Recipe, num_workers: int, step: int) -> None:
    """Leave the mean of the workers' gradients in the parameters; a missing one counts as zeros."""
    found: list[list[Tensor | None]] = []
    for rank in range(num_workers):
        model.zero_grad()
        recipe.backward(model, rank, step)
        found.append([parameter.grad for parameter in model.parameters()])
    for parameter, gradients in zip(model.parameters(), zip(*found, strict=True), strict=True):
        held = [gradient for gradient in gradients if gradient is not None]
        parameter.grad = sum(held[1:], start=held[0]) / num_workers if held else None
