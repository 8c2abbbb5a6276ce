"""Where each push is an update, all pushes of a clock with a share of the rate step as far as their mean does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import run_job
from torch import Tensor
from torch.utils.data import DataLoader

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError

WORKERS = 4
RATE = 0.5
NUM_STEPS = 3
# Gradients are small integers and the rate is a power of 2, so that sums have the same bits in any order.
ONE_BY_ONE = ("ssp:2", "essp:1", "asynchronous", "downpour:1", "downpour:3")
SAMPLES = torch.randint(-8, 8, (96, 5), generator=torch.Generator().manual_seed(1)).float()


def slope(rank: int, step: int) -> Tensor:
    """The gradient of a step of a worker, wherever its parameters are."""
    return SAMPLES[WORKERS * step + rank]


def values(optimizer: paceline.Distributed, weights: Tensor) -> list[float]:
    """The values once the pushes of all workers are applied."""
    paceline.barrier()
    with optimizer.snapshot():
        return weights.detach().tolist()


def train(ps: Session, strategy: str, **options: Any) -> list[float]:
    weights = torch.nn.Parameter(torch.ones(5))
    optimizer = paceline.distributed(torch.optim.SGD([weights], lr=RATE), strategy=strategy, **options)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        (weights * slope(ps.rank, step)).sum().backward()
        optimizer.step()
    return values(optimizer, weights)


def steps_of_the_mean() -> list[float]:
    weights = torch.ones(5)
    for step in range(NUM_STEPS):
        weights -= RATE * torch.stack([slope(rank, step) for rank in range(WORKERS)]).mean(0)
    return weights.tolist()


@pytest.mark.parametrize("strategy", ONE_BY_ONE)
def test_pushes_with_a_share_of_the_rate_step_as_their_mean(tmp_path: Path, strategy: str) -> None:
    expected = steps_of_the_mean()
    found = run_job(tmp_path, lambda ps: train(ps, strategy, divide_lr=True), workers=WORKERS, servers=2)
    assert found == [expected] * WORKERS


def test_without_it_each_push_is_applied_in_full(tmp_path: Path) -> None:
    found = run_job(tmp_path, lambda ps: train(ps, "ssp:2"), workers=WORKERS)
    further = (torch.tensor(steps_of_the_mean()) - 1) * WORKERS
    assert found == [(1 + further).tolist()] * WORKERS


@pytest.mark.parametrize("strategy", ["bsp", "ssp:2"])
def test_the_launcher_may_ask_for_it_under_any_policy(tmp_path: Path, strategy: str) -> None:
    found = run_job(tmp_path, lambda ps: train(ps, strategy), workers=WORKERS, divide_lr=True)
    assert found == [steps_of_the_mean()] * WORKERS


def test_gradients_that_leave_during_backward_have_their_share(tmp_path: Path) -> None:
    found = run_job(tmp_path, lambda ps: train(ps, "ssp:2", divide_lr=True, overlap=True), workers=WORKERS)
    assert found == [steps_of_the_mean()] * WORKERS


def train_on_slices(ps: Session) -> list[float]:
    weights = torch.nn.Parameter(torch.ones(5))
    loader = paceline.shard(DataLoader(SAMPLES, batch_size=8), slices=4)  # pyright: ignore[reportArgumentType]
    optimizer = paceline.distributed(torch.optim.SGD([weights], lr=RATE), consistency="ssp:1", divide_lr=True)
    for batch in loader:
        optimizer.zero_grad()
        (batch @ weights).mean().backward()
        optimizer.step()
    return values(optimizer, weights)


def test_slices_have_their_share_of_the_samples(tmp_path: Path) -> None:
    found = run_job(tmp_path, train_on_slices, workers=2)
    expected = 1 - RATE * SAMPLES.reshape(-1, 16, 5).mean(1).sum(0)
    assert found == [expected.tolist()] * 2


def test_rows_of_embeddings_step_as_their_mean_where_the_launcher_asks(tmp_path: Path) -> None:
    def work(ps: Session) -> list[float]:
        rows = paceline.Embedding(3, 5, update=paceline.update.SGD(lr=RATE), init=1.0, consistency="ssp:1")
        for step in range(NUM_STEPS):
            (rows(torch.tensor([1])) * slope(ps.rank, step)).sum().backward()
            ps.clock()
        ps.barrier()
        return rows.table.pull(torch.tensor([1]))[0].tolist()

    assert run_job(tmp_path, work, workers=WORKERS, divide_lr=True)[0] == steps_of_the_mean()


def test_the_state_and_the_groups_keep_the_rate_that_was_given(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        weights = torch.nn.Parameter(torch.ones(5))
        optimizer = paceline.distributed(torch.optim.SGD([weights], lr=RATE), consistency="ssp:1", divide_lr=True)
        weights.sum().backward()
        optimizer.step()
        assert optimizer.param_groups[0]["lr"] == optimizer.state_dict()["param_groups"][0]["lr"] == RATE

    run_job(tmp_path, work)


def test_what_has_no_rate_to_divide_is_refused(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        weights = torch.nn.Parameter(torch.ones(5))
        with pytest.raises(UsageError, match=r"not in proportion to one.*AdamW"):
            paceline.distributed(torch.optim.Rprop([weights]), consistency="ssp:1", divide_lr=True)
        with pytest.raises(UsageError, match="divide_lr is 'yes', expected True or False or None"):
            paceline.distributed(torch.optim.SGD([weights]), divide_lr="yes")  # pyright: ignore[reportArgumentType]

    run_job(tmp_path, work)
