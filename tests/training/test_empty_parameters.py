"""Parameters and tables without elements are legal: everywhere, they are carried along and never in the way."""

import io
from pathlib import Path

import pytest
import torch
from tests.jobs import CARRIERS, run_job
from torch import Tensor, nn

import paceline
from paceline.api.session import Session

POLICIES = ("bsp", "ssp:1", "essp:1", "asynchronous", "backup:1", "bound=1,visible=on_clock")
SHAPES = ((0,), (0, 3), (3, 0))
STEPS = 3


class Gaps(nn.Module):
    """A model with parameters without elements: first, between others, and last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.zeros(0))
        self.one = nn.Linear(3, 70)
        self.between = nn.Parameter(torch.zeros(0, 3))
        self.two = nn.Linear(70, 1)
        self.last = nn.Parameter(torch.zeros(2, 0))

    def forward(self, inputs: Tensor) -> Tensor:
        empty = self.first.sum() + self.between.sum() + self.last.sum()
        return self.two(self.one(inputs)).square().mean() + empty


def train(model: Gaps, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).backward()
        optimizer.step()


def values(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).clone()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(
    ("num_servers", "options"),
    [(1, {}), (3, {}), (1, {"overlap": True}), (3, {"strategy": "ssp:1", "views": True})],
    ids=["one", "three", "overlap", "views"],
)
def test_a_model_with_empty_parameters_learns_as_in_one_process(
    carrier: str, num_servers: int, options: dict[str, object], tmp_path: Path
) -> None:
    def work(_worker: Session) -> Tensor:
        model = Gaps()
        optimizer = paceline.distributed(torch.optim.Adam(model.parameters(), lr=0.01), model=model, **options)
        train(model, optimizer)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        optimizer.load_state_dict(torch.load(file))
        train(model, optimizer)
        with optimizer.snapshot():
            return values(model)

    alone = Gaps()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), 2 * STEPS)
    for found in run_job(tmp_path, work, workers=1, servers=num_servers, carrier=carrier):
        assert torch.equal(found, values(alone))


@pytest.mark.parametrize("strategy", ["local-sgd:2", "diloco:2", "downpour:2"])
def test_strategies_with_rounds_carry_empty_parameters(strategy: str, tmp_path: Path) -> None:
    def work(_worker: Session) -> list[tuple[int, ...]]:
        model = Gaps()
        train(model, paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.01), model=model, strategy=strategy))
        return [tuple(parameter.shape) for parameter in model.parameters()]

    expected = [tuple(parameter.shape) for parameter in Gaps().parameters()]
    assert run_job(tmp_path, work, workers=1, carrier="memory") == [expected]


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_tables_without_elements_are_pushed_pulled_and_waited_for(
    carrier: str, num_servers: int, tmp_path: Path
) -> None:
    def work(worker: Session) -> None:
        tables = [
            worker.table(f"{policy} {shape}", shape=shape, update=paceline.update.Adam(lr=0.5), consistency=policy)
            for policy in POLICIES
            for shape in SHAPES
        ]
        for _ in range(STEPS):
            pushed = [table.push(torch.zeros(table.shape)) for table in tables]
            worker.clock()
            for table in tables:
                assert tuple(table.pull().shape) == table.shape
                assert tuple(table.pull(exact=True).shape) == table.shape
            worker.barrier()
            assert all(push.result(30) is not None for push in pushed)
        assert tables[0].pull_later().result(30).numel() == 0
        assert tables[0].call("summary")

    run_job(tmp_path, work, workers=2, servers=num_servers, carrier=carrier)
