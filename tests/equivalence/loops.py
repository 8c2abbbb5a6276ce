"""One training loop, by workers of a job and by plain torch with the batches of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from tests.equivalence.cells import OPTIMIZERS, Cell
from tests.training.recipes import seeded
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session

BATCH_SIZE, NUM_EPOCHS = 4, 3
_NUM_SAMPLES = {"even": 16, "one short": 14, "one missing": 20}


def samples(cell: Cell) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(_NUM_SAMPLES[cell.batches], 8, generator=generator, dtype=torch.float64)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :3].sin()).square().mean()


def model_of(cell: Cell) -> nn.Sequential:
    """Make the model of a loop: a convolution and a linear layer, or two linear ones where optimizers want matrices."""
    if cell.optimizer == "Muon":
        made = seeded(
            lambda: nn.Sequential(
                nn.Identity(), nn.Linear(8, 6, bias=False), nn.Identity(), nn.Tanh(), nn.Linear(6, 3, bias=False)
            )
        )
    else:
        made = seeded(
            lambda: nn.Sequential(
                nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 6, 2), nn.Flatten(), nn.Tanh(), nn.Linear(6, 3)
            )
        )
    model = made.double()
    assert isinstance(model, nn.Sequential)
    if cell.memory == "channels_last":
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if cell.memory == "transposed":
        model[4].weight = nn.Parameter(model[4].weight.detach().t().contiguous().t())
    if cell.parameters == "one unused":
        model[4].register_parameter("spare", nn.Parameter(torch.ones(2, 2, dtype=torch.float64)))
    freeze(cell, model, 0)
    return model


def freeze(cell: Cell, model: nn.Sequential, epoch: int) -> None:
    """Say which parameters are trained in an epoch."""
    if cell.parameters == "some frozen":
        model[1].weight.requires_grad_(False)
    if cell.parameters == "thawed later":
        model[1].requires_grad_(epoch > 0)
    if cell.parameters == "frozen later":
        model[4].weight.requires_grad_(epoch == 0)


def schedule_of(cell: Cell, optimizer: torch.optim.Optimizer) -> LRScheduler | None:
    if cell.schedule == "none":
        return None
    return StepLR(optimizer, 1, 0.5) if cell.schedule == "by epoch" else CosineAnnealingLR(optimizer, 9)


class Loop:
    """A model, its optimizer and its schedule, over some epochs."""

    name = ""

    def __init__(self, cell: Cell) -> None:
        self.cell = cell
        self.model = model_of(cell)
        self.optimizer = self.distributed(OPTIMIZERS[cell.optimizer](self.model))
        self.schedule = schedule_of(cell, self.optimizer)

    def distributed(self, optimizer: torch.optim.Optimizer) -> Any:
        return optimizer

    def states(self) -> dict[str, Any]:
        """Return what a checkpoint has beside the values."""
        state = self.optimizer.state_dict()
        outer = state.pop("outer", {})  # what servers keep goes by the names of tables
        state["outer"] = {table.removeprefix(self.name): one for table, one in outer.items()}
        return {"optimizer": state, "schedule": self.schedule.state_dict() if self.schedule else {}}

    def load_states(self, states: dict[str, Any]) -> None:
        """Go on from what `states` of another loop has returned."""
        if self.schedule is not None:
            self.schedule.load_state_dict(states["schedule"])
        state = states["optimizer"]
        outer = {self.name + table: one for table, one in state.pop("outer").items()}
        self.optimizer.load_state_dict({**state, "outer": outer} if outer and self.name else state)

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def epoch(self, number: int) -> None:
        freeze(self.cell, self.model, number)
        for parts in self.feed():
            self.optimizer.zero_grad()
            total = sum(map(len, parts))
            for part in parts:
                self.backward(part, len(part) / total)
            self.optimizer.step()
            if self.schedule is not None and self.cell.schedule == "by batch":
                self.schedule.step()
        if self.schedule is not None and self.cell.schedule == "by epoch":
            self.schedule.step()

    def feed(self) -> Iterator[tuple[Tensor, ...]]:
        raise NotImplementedError

    def backward(self, part: Tensor, weight: float) -> None:
        first, *others = part.chunk(1 if self.cell.accumulation == "none" else 2)
        count = 1 + len(others)
        if others:
            with self.accumulate():
                (loss_of(self.model, first) * (weight / count)).backward()
            (first,) = others
        (loss_of(self.model, first) * (weight / count)).backward()

    def accumulate(self) -> Any:
        return nullcontext()


class Plain(Loop):
    """Plain torch, with the batches of all workers in each step."""

    def __init__(self, cell: Cell, num_workers: int, values: list[Tensor] | None = None) -> None:
        super().__init__(cell)
        self.num_workers = num_workers
        if values is not None:
            set_values(self.model, values)

    def feed(self) -> Iterator[tuple[Tensor, ...]]:
        batches = samples(self.cell).split(BATCH_SIZE)
        return (batches[start : start + self.num_workers] for start in range(0, len(batches), self.num_workers))


class Distributed(Loop):
    """A worker of a job, with its own batches."""

    def __init__(self, cell: Cell, settings: Any, name: str, values: list[Tensor] | None = None) -> None:
        self.settings, self.name, self.first = settings, name, values
        super().__init__(cell)
        self.loader = paceline.shard(DataLoader(TensorDataset(samples(cell)), batch_size=BATCH_SIZE))

    def distributed(self, optimizer: torch.optim.Optimizer) -> Any:
        if self.first is not None:
            set_values(self.model, self.first)
        return paceline.distributed(optimizer, model=self.model, name=self.name, **self.settings)

    def values(self) -> list[Tensor]:
        with self.optimizer.snapshot():
            return super().values()

    def feed(self) -> Iterator[tuple[Tensor, ...]]:
        return (tuple(batch) for batch in self.loader)

    def accumulate(self) -> Any:
        return self.optimizer.accumulate() if self.cell.accumulation == "in accumulate()" else nullcontext()


def set_values(model: nn.Module, values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), values, strict=True):
            parameter.copy_(value)


def train_alone(cell: Cell, num_workers: int) -> list[Tensor]:
    """Return what plain torch learns."""
    loop = Plain(cell, num_workers)
    for epoch in range(NUM_EPOCHS):
        loop.epoch(epoch)
    return loop.values()


def train(worker: Session, cell: Cell, settings: Any, name: str) -> list[Tensor]:
    """Return what this worker of a job learns with the others."""
    num_workers = worker.size
    loop: Loop = Plain(cell, num_workers) if cell.state == "from plain torch" else Distributed(cell, settings, name)
    for epoch in range(NUM_EPOCHS):
        again = epoch == 1 and cell.state in ("loaded again", "from plain torch")
        if again or (epoch == 2 and cell.state == "to plain torch"):
            values, states = saved_by_first(worker, loop, name)
            loop = Distributed(cell, settings, f"{name} again", values) if again else Plain(cell, num_workers, values)
            loop.load_states(states)
        loop.epoch(epoch)
    return loop.values()


def saved_by_first(worker: Session, loop: Loop, name: str) -> Any:
    """Return the values and the states of a loop as worker 0 has them, through a file and back."""
    paceline.barrier()  # no pushes are under way
    values, states = loop.values(), loop.states()
    run_dir = worker.exchange.worker_set.run_dir
    assert run_dir is not None
    file = run_dir / f"{name}.pt"
    if worker.rank == 0:
        torch.save((values, states), file)
    paceline.barrier()
    return torch.load(file)
