"""Optimizers one after the other: those of loops that are over take no part, even where a script still holds them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import loss_of, mlp, parameters, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError
from paceline.training.strategy import Distributed, optimizers_of_loop

BATCH_SIZE = 4
DATA = torch.randn(3 * BATCH_SIZE, 9, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
STRATEGIES: dict[str, dict[str, Any]] = {
    "servers": {},
    "overlap": {"overlap": True},
    "all-reduce": {"strategy": "all-reduce"},
    "groups": {"strategy": {"0.*": "bsp", "*": "all-reduce"}},
}


def epochs(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Any) -> None:
    for _ in range(2):
        for (batch,) in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("anew", [False, True], ids=["same model", "new model"])
def test_optimizers_of_loops_that_are_over_do_not_count_where_a_worker_has_no_batch(
    tmp_path: Path, strategy: str, anew: bool
) -> None:
    def work(_: Session) -> list[Tensor]:
        model, held, found = mlp().double(), list[Distributed](), list[Tensor]()
        for number in range(2):
            model = mlp().double() if anew else model
            made = paceline.distributed(sgd(model), model=model, name=f"loop {number}", **STRATEGIES[strategy])
            held.append(cast("Distributed", made))
            epochs(model, made, paceline.shard(DataLoader(TensorDataset(DATA), batch_size=BATCH_SIZE)))
            with made.snapshot():
                found.append(parameters(model))
        if not anew:
            with pytest.raises(UsageError, match="'loop 1' was distributed later for some of its parameters"):
                held[0].step()
        return found

    alone, expected = mlp().double(), list[Tensor]()
    for _ in range(2):
        alone = mlp().double() if anew else alone
        epochs(alone, sgd(alone), [(batch,) for batch in DATA.split(2 * BATCH_SIZE)])
        expected.append(parameters(alone))
    for found in run_job(tmp_path, work, workers=2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-14)


@dataclass
class Used:
    """What an optimizer has of its turns."""

    name: str
    turns: tuple[int, int]


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ({"first": (0, 0), "second": (0, 0)}, "first second"),  # made together, not used yet
        ({"first": (0, 1), "second": (0, 2)}, "first second"),
        ({"first": (3, 5), "second": (4, 6)}, "first second"),  # in turns
        ({"first": (8, 9), "second": (0, 0)}, "first"),  # the second is for later
        ({"first": (8, 9), "second": (2, 4)}, "first"),  # the second has its turn once in many batches
        ({"first": (8, 9), "second": (9, 9)}, "second"),  # made after the last turn of the first
        ({"first": (8, 9), "second": (9, 10)}, "second"),
        ({"first": (8, 9), "second": (10, 11)}, "second"),
    ],
)
def test_in_use_are_those_of_the_last_batch(turns: dict[str, tuple[int, int]], expected: str) -> None:
    given = [Used(name, own) for name, own in turns.items()]
    assert " ".join(cast("Any", one).name for one in optimizers_of_loop(cast("Any", given))) == expected
