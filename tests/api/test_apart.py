"""Workers that share nothing but samples are told of, as each trains a model of its own; others are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session

APART = "have shared nothing but samples"


def read(*, training: bool = True) -> None:
    loader = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=2)
    with torch.set_grad_enabled(training):
        assert len(list(paceline.shard(loader))) > 0


def by_optimizer() -> None:
    paceline.distributed(torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1))


def by_message() -> None:
    if paceline.rank() == 0:
        paceline.send(torch.ones(1), to=1)
    else:
        paceline.receive(0)


def test_workers_that_train_each_for_itself_are_told_of_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_job(tmp_path, lambda _: read(), workers=2)
    [line] = [line for line in capfd.readouterr().err.splitlines() if APART in line]
    assert "the script has ended, and its 2 workers have" in line
    assert "Train with optimizer = paceline.distributed(optimizer, model=model)." in line


@pytest.mark.parametrize(
    "share",
    [
        by_optimizer,
        by_message,
        lambda: paceline.all_reduce(torch.ones(1)),
        lambda: paceline.push("mean", torch.ones(1)),
    ],
    ids=["optimizer", "message", "collective", "table"],
)
def test_those_that_share_something_are_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], share: Callable[[], object]
) -> None:
    def work(_: Session) -> None:
        read()
        share()

    run_job(tmp_path, work, workers=2)
    assert APART not in capfd.readouterr().err


@pytest.mark.parametrize(("workers", "training"), [(2, False), (1, True)])
def test_neither_are_those_that_evaluate_nor_one_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int, *, training: bool
) -> None:
    run_job(tmp_path, lambda _: read(training=training), workers=workers)
    assert APART not in capfd.readouterr().err
