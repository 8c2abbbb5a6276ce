"""Loops that add up the gradients of several batches for a step learn with all workers what one process learns."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import seeded, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session

WORKERS, SIZE, EPOCHS = 3, 2, 3


def model_of() -> nn.Module:
    return seeded(lambda: nn.Linear(9, 4)).double()


def samples_of(num_batches: int) -> Tensor:
    return torch.randn(num_batches * SIZE, 9, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def loss_of(model: nn.Module, batch: Tensor, usual: int) -> Tensor:
    return model(batch).square().mean() / usual


def values_of(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def rounds(num_batches: int, usual: int) -> Iterator[list[list[int]]]:
    """Yield the batches of each worker in each step of an epoch."""
    own = [list(range(rank, num_batches, WORKERS)) for rank in range(WORKERS)]
    for first in range(0, len(own[0]), usual):
        yield [batches[first : first + usual] for batches in own]


def learned_alone(num_batches: int, usual: int) -> Tensor:
    model, batches = model_of(), samples_of(num_batches).split(SIZE)
    optimizer = sgd(model)
    for _ in range(EPOCHS):
        for taken in rounds(num_batches, usual):
            optimizer.zero_grad()
            total = sum(map(len, taken))
            for own in taken:
                for batch in own:  # a worker weighs as much as its samples
                    (loss_of(model, batches[batch], usual) * len(own) / total).backward()
            optimizer.step()
    return values_of(model)


def learn(model: nn.Module, optimizer: paceline.Distributed, mine: DataLoader[Sequence[Tensor]], usual: int) -> None:
    for _ in range(EPOCHS):
        for number, (batch,) in enumerate(mine, 1):
            if number % usual and number < len(mine):
                with optimizer.accumulate():
                    loss_of(model, batch, usual).backward()
            else:
                loss_of(model, batch, usual).backward()
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize("strategy", ["bsp", "all-reduce"])
@pytest.mark.parametrize("usual", [2, 3])
@pytest.mark.parametrize("num_batches", [15, 16, 17])
def test_an_epoch_ends_with_the_same_step_for_all(tmp_path: Path, num_batches: int, usual: int, strategy: str) -> None:
    """The last step of some workers has one batch less, or none."""

    def work(worker: Session) -> tuple[Tensor, int]:
        model = model_of()
        optimizer = paceline.distributed(sgd(model), model=model, strategy=strategy)
        learn(model, optimizer, paceline.shard(DataLoader(TensorDataset(samples_of(num_batches)), SIZE)), usual)
        return values_of(model), worker.node.clock

    expected, num_steps = learned_alone(num_batches, usual), EPOCHS * len(list(rounds(num_batches, usual)))
    for found, clock in run_job(tmp_path, work, workers=WORKERS):
        assert clock == num_steps
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
