"""The same calls made again in one process, as a notebook makes them when a cell is run again."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import run_job
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError
from paceline.training.strategy import Distributed

CELL = """
import torch, paceline
paceline.init()
model = torch.nn.Linear(2, 1)
torch.nn.init.constant_(model.weight, 0.5)
torch.nn.init.zeros_(model.bias)
optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **settings)
for _ in range(2):
    optimizer.zero_grad()
    model(torch.ones(3, 2)).square().sum().backward()
    optimizer.step()
"""


def small() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    for number, parameter in enumerate(model.parameters()):
        nn.init.constant_(parameter, 0.1 * (number + 1))
    return model


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def steps(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"strategy": paceline.strategies.all_reduce()}])
def test_a_cell_is_run_again(tmp_path: Path, settings: dict[str, Any]) -> None:
    def work(_: Session) -> bool:
        names: dict[str, Any] = {"settings": settings}
        exec(CELL, names)  # noqa: S102 - as a notebook does
        first = [parameter.detach().clone() for parameter in names["model"].parameters()]
        exec(CELL, names)  # noqa: S102 - as a notebook does
        return all(map(torch.equal, first, names["model"].parameters()))

    assert run_job(tmp_path, work, workers=2) == [True, True]


@pytest.mark.parametrize("settings", [{}, {"overlap": True}, {"strategy": paceline.strategies.all_reduce()}])
def test_a_model_goes_on_under_the_optimizer_of_the_second_call(tmp_path: Path, settings: dict[str, Any]) -> None:
    def work(_: Session) -> tuple[list[Tensor], str]:
        model = small()
        first, second = (distributed_and_trained(model, settings) for _ in range(2))
        with pytest.raises(UsageError, match=r"step of 'model': 'model-2' was distributed later for some of its"):
            first.step()
        with second.snapshot():
            return [parameter.detach().clone() for parameter in model.parameters()], second._settings.name

    alone = small()
    for _ in range(2):
        steps(alone, sgd(alone))
    for values, name in run_job(tmp_path, work, workers=2):
        assert all(map(torch.allclose, values, alone.parameters()))
        assert name == "model-2"


def distributed_and_trained(model: nn.Module, settings: dict[str, Any]) -> Distributed:
    optimizer = paceline.distributed(sgd(model), model=model, **settings)
    steps(model, optimizer)
    return optimizer


def test_a_table_asked_for_again_is_the_same_table(tmp_path: Path) -> None:
    def work(ps: Session) -> tuple[list[float], list[float]]:
        again: list[list[float]] = []
        for size in ({"shape": (2,)}, {"rows": 2}):
            name = next(iter(size))
            first = ps.table(name, update=paceline.update.Add(), **size)
            first.push([1.0, 2.0]) if name == "shape" else first.push([7], [[1.0, 2.0]])
            ps.clock()
            second = ps.table(name, update=paceline.update.Add(), **copy.copy(size))
            assert second is first
            again.append((second.pull() if name == "shape" else second.pull([7])[0]).tolist())
        return again[0], again[1]

    assert run_job(tmp_path, work) == [([1.0, 2.0], [1.0, 2.0])]


def test_a_name_that_was_given_twice_is_refused_and_leaves_the_first_as_it_is(tmp_path: Path) -> None:
    def work(_: Session) -> int:
        model = small()
        first = paceline.distributed(sgd(model), name="net")
        with pytest.raises(UsageError, match="has distributed 'net' already: give each optimizer a name of its own"):
            paceline.distributed(sgd(model), name="net")
        steps(model, first)
        return first.num_refused

    assert run_job(tmp_path, work) == [0]


def test_a_call_that_was_refused_takes_no_name(tmp_path: Path) -> None:
    def work(_: Session) -> str:
        with pytest.raises(UsageError, match="LBFGS"):
            paceline.distributed(torch.optim.LBFGS(small().parameters()))
        return paceline.distributed(sgd(small()))._settings.name

    assert run_job(tmp_path, work) == ["model"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (2, r"init\(2\): expected nothing, .* paceline run --workers N script.py"),
        ("paceline://host:1/a", r"an address is for connect: init\(connect\('paceline://host:1/a'\)\)"),
    ],
)
def test_init_says_what_it_takes(given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        paceline.init(given)


def test_init_says_that_servers_come_with_the_first_call(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        assert paceline.init() is ps
        with pytest.raises(UsageError, match=r"servers='node:2'\): this process has joined already, with servers=None"):
            paceline.init(servers="node:2")

    run_job(tmp_path, work)
