"""A server tells that workers push the same gradients: once, early, and never of what may well be the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.core.consistency import Consistency
from paceline.core.messages import Push, PushId
from paceline.server.push_checks import CLOCKS, SameGradients

FORGOTTEN = (
    "did the script forget paceline.shard(loader), or draw the same random numbers on all workers "
    "(torch.manual_seed(seed + paceline.rank()))? Workers that train on the same samples learn no more than one of "
    "them."
)


class Watching:
    """One watched table, and what is told of it."""

    def __init__(self, consistency: str = "bsp") -> None:
        self.told: list[str] = []
        self.same = SameGradients(self.told.append)
        self.same.watch("model", Consistency.parse(consistency))

    def push(self, worker: int, clock: int, gradient: Tensor) -> None:
        self.same.note(Push(PushId(1, worker, 0, clock), "model", clock, 0), gradient)


def gradient(seed: int, size: int = 1000) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_the_same_in_two_clocks_is_told_once() -> None:
    watching = Watching()
    for clock in range(CLOCKS):
        for worker in (0, 1, 2):
            watching.push(worker, clock + 7, gradient(clock))
    assert watching.told == [
        f"workers 0 and 1 pushed the same gradient of table 'model' at clocks 7 and 8: {FORGOTTEN}"
    ]


@pytest.mark.parametrize("consistency", ["ssp:2", "essp:1", "asynchronous"])
def test_where_updates_show_on_arrival_only_the_first_clock_can_tell(consistency: str) -> None:
    watching = Watching(consistency)
    for clock in range(2):
        for worker in (1, 3):
            watching.push(worker, clock, gradient(worker * clock))
    assert watching.told == [f"workers 1 and 3 pushed the same gradient of table 'model' at clock 0: {FORGOTTEN}"]


QUIET = {
    "gradients of their own": lambda worker, clock: gradient(10 * worker + clock),
    "the same only once, as to warm up": lambda worker, clock: gradient(worker * clock),
    "zeros": lambda worker, clock: torch.zeros(1000),
    "constants": lambda worker, clock: torch.full((1000,), clock + 1.0),
    "the same in every clock": lambda worker, clock: gradient(0),
    "few numbers": lambda worker, clock: gradient(clock, size=4),
    "NaN": lambda worker, clock: torch.full((1000,), torch.nan),
    "differences in a part": lambda worker, clock: torch.cat((gradient(clock), gradient(worker, size=10))),
}


@pytest.mark.parametrize("case", QUIET)
def test_what_may_well_be_the_same_is_not_told(case: str) -> None:
    watching = Watching()
    for clock in range(CLOCKS):
        for worker in (0, 1):
            watching.push(worker, clock, QUIET[case](worker, clock))
    assert watching.told == []


def test_one_worker_and_later_clocks_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = Watching()
    for clock in range(100):
        watching.push(0, clock, gradient(clock))
    monkeypatch.setattr("paceline.server.push_checks._digest", pytest.fail)
    for clock in range(CLOCKS, 100):
        watching.push(1, clock, gradient(clock))
    assert watching.told == []


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_script_that_forgets_to_shard_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sharded: bool, servers: int
) -> None:
    data = [gradient(number, size=8) for number in range(12)]

    def work(worker: Session) -> None:
        model = nn.Linear(8, 4)
        nn.init.ones_(model.weight)
        words = paceline.Embedding(100, 4, name="words", update=paceline.update.SGD(lr=0.1), init=0.5)
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1))
        for sample in paceline.shard(data) if sharded else data:
            optimizer.zero_grad()
            ((model(sample) + words(torch.tensor([int(sample[0] * 10) % 100]))[0]) ** 2).sum().backward()
            optimizer.step()

    run_job(tmp_path, work, workers=2, servers=servers)
    told = capsys.readouterr().err.splitlines()
    assert told == (
        []
        if sharded
        else [f"paceline: workers 0 and 1 pushed the same gradient of table 'model' at clocks 0 and 1: {FORGOTTEN}"]
    )


def test_rows_are_looked_at_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work(worker: Session) -> None:
        users = worker.table("users", rows=4, update=paceline.update.SGD(lr=0.1))
        for clock in range(3):
            users.push([1, 2, 3, 4], gradient(clock, size=16).view(4, 4))
            worker.clock()

    run_job(tmp_path, work, workers=2)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: workers 0 and 1 pushed the same gradient of table 'users' at clocks 0 and 1")
