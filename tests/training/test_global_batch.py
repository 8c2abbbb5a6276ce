"""Under bsp, P workers with their parts of the data equal one process with one large batch, in double precision."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import adam, loss_of, mlp, parameters, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
BATCH_SIZE = 4


def samples(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 9, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def train_on_shard(worker: Session, data: Tensor, make: MakeOptimizer, num_epochs: int) -> tuple[Tensor, int]:
    model = mlp().double()
    optimizer = paceline.distributed(make(model))
    loader = paceline.shard(DataLoader(TensorDataset(data), batch_size=BATCH_SIZE))
    for _ in range(num_epochs):
        for (batch,) in loader:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    with optimizer.snapshot():
        return parameters(model), worker.node.clock


def train_on_all(data: Tensor, make: MakeOptimizer, num_epochs: int, num_workers: int) -> Tensor:
    model = mlp().double()
    optimizer = make(model)
    for _ in range(num_epochs):
        for batch in data.split(BATCH_SIZE * num_workers):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("num_workers", [2, 4])
def test_ten_steps_equal_ten_large_batches(tmp_path: Path, make: MakeOptimizer, num_workers: int) -> None:
    data = samples(10 * BATCH_SIZE * num_workers)
    expected = train_on_all(data, make, 1, num_workers)
    for found, _ in run_job(tmp_path, lambda w: train_on_shard(w, data, make, 1), workers=num_workers, servers=2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("num_samples", [26, 34, 46], ids=["one-alone", "two-of-three", "a-short-one"])
def test_an_uneven_last_round_equals_the_mean_over_the_samples_there_are(tmp_path: Path, num_samples: int) -> None:
    data = samples(num_samples)
    expected = train_on_all(data, sgd, 2, 3)
    num_rounds = len(data.split(BATCH_SIZE * 3))
    for found, clock in run_job(tmp_path, lambda w: train_on_shard(w, data, sgd, 2), workers=3, servers=2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)
        assert clock == 2 * num_rounds


def test_two_optimizers_both_weigh_their_gradients_by_the_samples_of_the_batch(tmp_path: Path) -> None:
    data = samples(2 * BATCH_SIZE + 1)  # worker 0 has 4 + 1 samples, worker 1 has 4 and an empty-handed round

    def work(worker: Session) -> tuple[Tensor, Tensor, int]:
        first, second = mlp().double(), mlp().double()
        both = [(m, paceline.distributed(sgd(m), name=name)) for m, name in ((first, "first"), (second, "second"))]
        for (batch,) in paceline.shard(DataLoader(TensorDataset(data), batch_size=BATCH_SIZE)):
            for model, optimizer in both:
                optimizer.zero_grad()
                loss_of(model, batch).backward()
                optimizer.step()
        for _, optimizer in both:
            optimizer.step(samples=1 + worker.rank)  # no gradients new: those of the last batch again
        return parameters(first), parameters(second), worker.node.clock

    for first, second, clock in run_job(tmp_path, work, workers=2):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        assert clock == 6


def test_a_step_can_say_how_many_samples_it_stands_for(tmp_path: Path) -> None:
    def work(worker: Session) -> Tensor:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0))
        weight.grad = torch.tensor([float(worker.rank)])
        optimizer.step(samples=1 if worker.rank == 0 else 3)
        return weight.detach()

    assert run_job(tmp_path, work, workers=2) == [torch.tensor([-0.75])] * 2


def test_evaluation_counts_no_samples_and_finishes_no_clock(tmp_path: Path) -> None:
    data = samples(2 * BATCH_SIZE + 1)  # uneven for two workers

    def work(worker: Session) -> tuple[int, int]:
        optimizer = paceline.distributed(sgd(mlp()))
        loader = paceline.shard(DataLoader(TensorDataset(data), batch_size=BATCH_SIZE))
        with optimizer.snapshot():
            num_seen = sum(len(batch) for (batch,) in loader)
        with torch.no_grad():
            assert sum(len(batch) for (batch,) in loader) == num_seen
        assert worker.num_samples == 0
        return num_seen, worker.node.clock

    assert run_job(tmp_path, work, workers=2) == [(5, 0), (4, 0)]
