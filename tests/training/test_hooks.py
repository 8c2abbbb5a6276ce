"""An optimizer that was distributed does not step by itself, as its worker would then train alone, without a word."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import loss_of, mlp, parameters, sgd
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError

BATCH_SIZE = 4
DATA = torch.randn(3 * BATCH_SIZE, 9, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
STRATEGIES: list[Any] = ["bsp", "all-reduce", "local-sgd:2", "downpour:2", {"0.*": "bsp", "*": "all-reduce"}]
REFUSED = "that paceline.distributed was given for 'model.*': it would train this worker alone. Step the optimizer that"


def train(model: nn.Module, given: torch.optim.Optimizer, made: paceline.Distributed) -> None:
    """Train an epoch in whose last clock worker 1 has no batch; the given optimizer refuses each step."""
    for (batch,) in paceline.shard(DataLoader(TensorDataset(DATA), batch_size=BATCH_SIZE)):
        made.zero_grad()
        loss_of(model, batch).backward()
        before = parameters(model)
        with pytest.raises(UsageError, match=REFUSED):
            given.step()
        assert torch.equal(before, parameters(model))
        made.step()


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_given_optimizer_is_stepped_by_the_distributed_one_alone(tmp_path: Path, strategy: Any) -> None:
    def work(_: Session) -> None:
        model = mlp().double()
        given = sgd(model)
        train(model, given, paceline.distributed(given, model=model, strategy=strategy))

    run_job(tmp_path, work, workers=2)


def test_it_may_be_distributed_again_in_another_way(tmp_path: Path) -> None:
    def work(_worker: Session) -> None:
        model = mlp().double()
        given = sgd(model)
        for strategy in ("bsp", "all-reduce"):  # servers step in the place of the given one, and all-reduce steps it
            train(model, given, paceline.distributed(given, model=model, strategy=strategy))

    run_job(tmp_path, work, workers=2)


def test_it_steps_again_where_the_worker_has_left(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = mlp().double()
        given = sgd(model)
        paceline.distributed(given, model=model)
        worker.close()
        before = parameters(model)
        loss_of(model, DATA).backward()
        given.step()
        assert not torch.equal(before, parameters(model))

    run_job(tmp_path, work)
