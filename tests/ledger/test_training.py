"""The same ledger behind an optimizer: each step of each worker counts once in every parameter, however it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import job
from tests.ledger.pairs import Choice, all_of, name_of, pairwise
from tests.ledger.tables import CARRIERS, NAMED, POLICIES, Counting, assert_counts
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.core.consistency import Consistency

NUM_WORKERS = 2
NUM_STEPS = 5
NUM_MARKS = NUM_WORKERS * NUM_STEPS
NUM_LAYERS = 3
LEARNING_RATE = 1.0  # so that a value is minus the number of pushes that have come to it

AXES: dict[str, Any] = {
    "carrier": CARRIERS,
    "policy": POLICIES,
    "overlap": ("no", "backward", "both ways"),
    "views": ("auto", "yes", "no"),
    "to_none": (True, False),
    "size_bytes": (1000, 300 << 10, (4 << 20) + 40),  # of a layer: below and above memory that is mapped; a bucket
    "num_servers": (1, 3),
}
SEVERAL_BUCKETS = AXES | {"policy": NAMED, "size_bytes": (1000, 300 << 10)}


class Marked(nn.Module):
    """A layer whose gradient is what it is called with."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.marks = nn.Parameter(torch.zeros(numel))

    def forward(self, total: Tensor, mark: int) -> Tensor:
        gradient = torch.zeros_like(self.marks).view(-1, NUM_MARKS)
        gradient[:, mark] = 1.0
        return total + (self.marks * gradient.view(-1)).sum()


class Marks(nn.Module):
    """Layers one after the other."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Marked(numel) for _ in range(NUM_LAYERS))

    def forward(self, mark: int) -> Tensor:
        total = torch.zeros(())
        for layer in self.layers:
            total = layer(total, mark)
        return total


def train(ps: Session, choice: Choice) -> int:
    """Take all steps, look at the values after each, and at all of them in the end; return the refused pushes."""
    policy = Consistency.parse(str(choice["policy"]))
    model = Marks(int(choice["size_bytes"]) // 4 // NUM_MARKS * NUM_MARKS)
    optimizer = paceline.distributed(
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        consistency=policy,
        scale="sum",
        views={"auto": None, "yes": True, "no": False}[str(choice["views"])],
        overlap=choice["overlap"] != "no",
        model=model if choice["overlap"] == "both ways" else None,
    )
    num_made = 0
    while ps.node.clock < NUM_STEPS:
        optimizer.zero_grad(set_to_none=bool(choice["to_none"]))
        model(ps.rank * NUM_STEPS + num_made).backward()
        optimizer.step()
        num_made += 1
        if num_made % 2:  # else the next step begins while this one's values and answers are under way
            optimizer.wait_for_values()
            for values in counted(model):
                look_at(values.clone(), num_made, policy)
    ps.barrier()
    with optimizer.snapshot():
        found = counted(model)
        if not policy.backups:
            for values in found:
                assert_counts(values, torch.ones(NUM_MARKS), f"worker {ps.rank}")
    ps.barrier()
    return optimizer.num_refused


def counted(model: nn.Module) -> list[Tensor]:
    """How often each mark has counted, (places, marks), by layer."""
    return [-parameter.detach().view(-1, NUM_MARKS) / LEARNING_RATE for parameter in model.parameters()]


def look_at(values: Tensor, num_made: int, policy: Consistency) -> None:
    assert ((values == 0) | (values == 1)).all(), f"after {num_made} steps: {values[(values != 0) & (values != 1)]}"
    if policy.bound is not None and not policy.backups:
        marks = values.view(-1, NUM_WORKERS, NUM_STEPS)
        assert (marks[:, :, : max(0, num_made - policy.bound)] == 1).all(), f"too old after {num_made} steps"


def run(choice: Choice, directory: Path) -> None:
    num_servers = int(choice["num_servers"])
    counting = [Counting() for _ in range(num_servers)]
    with job(
        directory, workers=NUM_WORKERS, servers=num_servers, carrier=str(choice["carrier"]), traces=counting
    ) as started:
        num_refused = sum(started.run(lambda ps: train(ps, choice)))
        tables = sorted(started.servers[0]._tables)
        for trace in counting:
            if "backup" in str(choice["policy"]):
                assert trace.num_applied.total() + num_refused <= NUM_MARKS * len(tables)
            else:
                assert num_refused == 0
                assert trace.num_applied == dict.fromkeys(tables, NUM_MARKS)
        for server in started.servers:
            assert not any(table.num_waiting for table in server._tables.values())
            assert server._receive_buffers.pool.num_lent == 0


@pytest.fixture
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.training.parameter_server.BUCKET_BYTES", 1000)


@pytest.mark.usefixtures("several_buckets")
@pytest.mark.parametrize("choice", pairwise(SEVERAL_BUCKETS | {"to_none": (True,)}), ids=name_of)
def test_every_step_counts_once(choice: Choice, tmp_path: Path) -> None:
    run(choice, tmp_path)


# Under bsp `grad` lies in the memory of a push, which is still under way where modules wait for values by themselves.
UNDER_WAY = {"policy": ("bsp",), "overlap": ("both ways",), "to_none": (False,), "size_bytes": (300 << 10,)}


@pytest.mark.usefixtures("several_buckets")
@pytest.mark.parametrize(
    "choice",
    [*pairwise(SEVERAL_BUCKETS | {"to_none": (False,)}, seed=1), *pairwise(SEVERAL_BUCKETS | UNDER_WAY)],
    ids=name_of,
)
def test_every_step_counts_once_where_gradients_are_zeroed_in_place(choice: Choice, tmp_path: Path) -> None:
    run(choice, tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_every_combination(carrier: str, policy: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    for choice in all_of(AXES | {"carrier": (carrier,), "policy": (policy,)}):
        run(choice, tmp_path_factory.mktemp("cell"))
