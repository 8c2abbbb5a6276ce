"""Strategies whose gradients pass no server tell that workers train on the same samples: once, and only where sure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import run_job
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.training.same_batches import STEPS, SameBatches, digest_of_batch

FORGOTTEN = (
    "did the script forget paceline.shard(loader), or draw the same random numbers on all workers "
    "(torch.manual_seed(seed + paceline.rank()))? Workers that train on the same samples learn no more than one of "
    "them."
)


def batch(seed: int, size: int = 1000) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_of_several_pairs_one_is_told_by_one_worker() -> None:
    told: list[str] = []
    for rank in range(4):
        same = SameBatches(rank, "model", told.append)
        for step in range(STEPS):
            same.compare(range(4), [digest_of_batch([batch(step)])] * 4)
    assert told == [f"workers 0 and 1 computed with the same batches in two of the first steps of 'model': {FORGOTTEN}"]


QUIET = {
    "batches of their own": lambda worker, step: batch(10 * worker + step),
    "the same only once, as to warm up": lambda worker, step: batch(worker * step),
    "the same in every step": lambda worker, step: batch(0),
    "constants": lambda worker, step: torch.full((1000,), step + 1.0),
    "few numbers": lambda worker, step: batch(step, size=4),
    "nothing": lambda worker, step: torch.empty(0),
    "complex": lambda worker, step: torch.complex(batch(step), batch(step)),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_may_well_be_the_same_is_not_told(case: str) -> None:
    same = SameBatches(0, "model", pytest.fail)
    for step in range(STEPS):
        same.compare((0, 1), [digest_of_batch([QUIET[case](worker, step)]) for worker in (0, 1)])
    assert not same.is_checking


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("strategy", ["all-reduce", "local-sgd:2"])
def test_a_script_that_forgets_to_shard_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: Any, sharded: bool
) -> None:
    data = [batch(number, size=8) for number in range(16)]

    def work(_: Session) -> None:
        model = nn.Linear(8, 4)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), strategy=strategy, model=model)
        for sample in paceline.shard(data) if sharded else data:
            optimizer.zero_grad()
            (model(sample) ** 2).sum().backward()
            optimizer.step()

    run_job(tmp_path, work, workers=2)
    told = capsys.readouterr().err.splitlines()
    assert [line.partition(": did")[0] for line in told] == (
        []
        if sharded
        else ["paceline: workers 0 and 1 computed with the same batches in two of the first steps of 'model'"]
        if strategy == "all-reduce"
        else ["paceline: workers 0 and 1 pushed the same gradient of table 'model' at clocks 1 and 3"]
    )
