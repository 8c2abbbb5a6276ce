"""Under bsp, P workers and S servers compute the very bits of one process that accumulates the same micro-batches."""

from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import Recipe, adam, sgd, train, train_alone
from torch import Tensor

from paceline.api.session import Session

RECIPES = {"sgd": Recipe(optimizer=sgd, num_steps=40), "adam": Recipe(optimizer=adam, num_steps=40)}


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], Tensor]:
    return {(name, p): train_alone(recipe, p)[0] for name, recipe in RECIPES.items() for p in (1, 2, 3, 4)}


def _train_both(worker: Session) -> dict[str, Tensor]:
    return {name: train(worker, recipe, name=name, consistency="bsp")[0] for name, recipe in RECIPES.items()}


@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (1, 3), (2, 2), (3, 1), (4, 3)])
def test_bits_in_memory(tmp_path: Path, alone: dict[tuple[str, int], Tensor], workers: int, servers: int) -> None:
    _assert_same_bits(tmp_path, alone, workers, servers, "memory")


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("workers", "servers"), [(1, 3), pytest.param(2, 2, marks=pytest.mark.campaign), (3, 1), (4, 3)]
)
def test_bits_between_processes(
    tmp_path: Path, alone: dict[tuple[str, int], Tensor], workers: int, servers: int, carrier: str
) -> None:
    _assert_same_bits(tmp_path, alone, workers, servers, carrier)


def _assert_same_bits(
    directory: Path, alone: dict[tuple[str, int], Tensor], workers: int, servers: int, carrier: str
) -> None:
    found = run_job(directory, _train_both, workers=workers, servers=servers, carrier=carrier)
    for name in RECIPES:
        for rank, values in enumerate(found):
            assert torch.equal(values[name], alone[name, workers]), f"{name}, worker {rank}"
