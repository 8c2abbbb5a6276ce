"""Jobs of workers that step by themselves, where some join late, leave, have no batch, or are out of step."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
import torch
from tests.jobs import Job, job, run_job, start_and_join
from tests.training.recipes import seeded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.script import bind
from paceline.api.session import Session
from paceline.errors import UsageError
from paceline.training.local_sgd import LocalOptimizer, LocalSGD


def slope() -> nn.Module:
    """A weight that moves by the learning rate at every step, whatever it is."""
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    return model


def go(model: nn.Module, optimizer: Any, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.ones(1, 1, dtype=torch.float64)).sum().backward()
        optimizer.step()


def attach(model: nn.Module, strategy: LocalSGD, lr: float = 1.0, **settings: Any) -> LocalOptimizer:
    inner = torch.optim.SGD(model.parameters(), lr=lr)
    optimizer = paceline.distributed(inner, strategy=strategy, model=model, **settings)
    assert isinstance(optimizer, LocalOptimizer)
    return optimizer


def weight(model: nn.Module) -> float:
    return next(model.parameters()).item()


def common(model: nn.Module, optimizer: LocalOptimizer) -> float:
    with optimizer.snapshot():
        return weight(model)


def version(started: Job, table: str = "model") -> int:
    return started.servers[0]._tables[table].shard.version


def test_a_worker_that_joins_late_starts_from_what_is_there(tmp_path: Path) -> None:
    """Worker 1 dies in the middle of a round; its next life exchanges when worker 0 does."""
    has_died, has_joined, results = Event(), Event(), dict[int, tuple[float, float]]()
    strategy = paceline.strategies.local_sgd(steps=4)

    def live(started: Job, rank: int) -> None:
        with started.join(rank) as worker:
            bind(worker)
            model = slope()
            optimizer = attach(model, strategy)
            go(model, optimizer, 6)
            if rank == 1:
                started.kill(worker)
                has_died.set()
                return
            assert has_joined.wait(120)
            go(model, optimizer, 6)
            results[rank] = weight(model), common(model, optimizer)
            worker.barrier()

    def live_again(started: Job) -> None:
        assert has_died.wait(120)
        with started.join(1, incarnation=1) as worker:
            bind(worker)
            model = slope()
            optimizer = attach(model, strategy)
            has_joined.set()
            assert (worker.node.clock, weight(model)) == (6, -4.0)
            go(model, optimizer, 6)
            results[1] = weight(model), common(model, optimizer)
            worker.barrier()

    with job(tmp_path, workers=2) as started:
        threads = [Thread(target=live, args=(started, rank), daemon=True) for rank in (0, 1)]
        start_and_join([*threads, Thread(target=live_again, args=(started,), daemon=True)])
        assert version(started) == 3
    assert results[0] == results[1]
    assert results[0][1] == pytest.approx(-4 - (4 * 4 + 2 * 2) / 6 - 4, rel=1e-12)


def test_one_that_leaves_stops_no_other(tmp_path: Path) -> None:
    def work(worker: Session) -> float:
        model = slope()
        optimizer = attach(model, paceline.strategies.local_sgd(steps=4), lr=1.0 + worker.rank)
        go(model, optimizer, 5 if worker.rank else 12)
        if worker.rank:
            worker.close()
            return 0.0
        return common(model, optimizer)

    assert run_job(tmp_path, work, workers=2)[0] == -4 * 1.5 - 4 - 4


def test_a_worker_without_a_batch_keeps_its_steps_for_the_next_exchange(tmp_path: Path) -> None:
    """Of five batches worker 1 gets two, so it has none in clocks 3 and 6, of which the latter is an exchange."""

    def work(worker: Session) -> tuple[float, float]:
        model = slope()
        optimizer = attach(model, paceline.strategies.local_sgd(steps=2))
        for _ in range(2):
            for (batch,) in paceline.shard(DataLoader(TensorDataset(torch.ones(10, 1).double()), batch_size=2)):
                optimizer.zero_grad()
                model(batch).mean().backward()
                optimizer.step()
        return weight(model), common(model, optimizer)

    first, second = run_job(tmp_path, work, workers=2)
    expected = -2 - (2 * 4 + 1 * 2) / 6 - 2
    assert first == pytest.approx((expected, expected), rel=1e-12)
    assert second == pytest.approx((expected - 1, expected), rel=1e-12)


# -- out of step -----------------------------------------------------------------------------------------------------


class Alone:
    """A worker of a job that the test moves by hand; asynchronous workers do not wait."""

    def __init__(self, started: Job, rank: int, strategy: LocalSGD, **settings: Any) -> None:
        self.session, self.model = started.join(rank), slope()
        bind(self.session)
        self.optimizer = attach(self.model, strategy, **settings)

    def go(self, num_steps: int) -> None:
        bind(self.session)
        go(self.model, self.optimizer, num_steps)

    @property
    def own(self) -> float:
        return weight(self.model)


def test_each_arrival_is_an_outer_step(tmp_path: Path) -> None:
    strategy = paceline.strategies.diloco(steps=2, outer_momentum=0.0, outer_lr=0.5, asynchronous=True)
    with job(tmp_path, workers=2) as started:
        fast, slow = Alone(started, 0, strategy), Alone(started, 1, strategy)
        fast.go(4)
        assert fast.own == -2.0
        slow.go(1)
        assert slow.own == -1.0
        slow.go(1)
        assert slow.own == -3.0  # its way is one of the old values, and counts in full
        assert version(started) == 3
        for worker in (fast, slow):
            worker.session.close()


def test_a_quorum_makes_one_step_of_several_arrivals(tmp_path: Path) -> None:
    strategy = paceline.strategies.diloco(steps=2, outer_lr=1.0, asynchronous=True, quorum=2, grace_s=10.0, delayed=2)
    now_s = [0.0]
    with job(tmp_path, workers=3) as started:
        workers = [Alone(started, rank, strategy, lr=1.0 + rank) for rank in range(3)]
        started.servers[0]._tables["model"].shard._merger.now = lambda: now_s[0]
        workers[0].go(2)
        workers[1].go(2)
        now_s[0] = 9.0
        assert [worker.own for worker in workers] == [0.0, 0.0, 0.0]
        assert common(workers[0].model, workers[0].optimizer) == 0.0
        now_s[0] = 10.0  # the window is over: a reader sees the merge, and worker 2 is too late for it
        assert common(workers[0].model, workers[0].optimizer) == -3.0 / 2
        workers[2].go(2)
        assert version(started) == 1
        state = workers[0].optimizer.state_dict()["outer"]["model"][0]  # merges what is left
        assert version(started) == 2
        assert state["step"].item() == 2.0
        assert state["momentum_buffer"].item() == (3.0 + 6.0) / 2
        assert common(workers[0].model, workers[0].optimizer) == -4.5 - 0.9 * 4.5
        for worker in workers:
            worker.session.close()


def test_buffers_are_averaged_and_schedules_are_followed(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[float, float]:
        model = seeded(lambda: nn.Sequential(nn.BatchNorm1d(1, affine=False, momentum=1.0), slope())).double()
        optimizer = attach(model, paceline.strategies.local_sgd(steps=2))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(2):
            optimizer.zero_grad()
            mine = torch.tensor([[0.0], [2.0]], dtype=torch.float64) + 10 * worker.rank
            (model(mine).sum() * 0 + model[1].weight.sum()).backward()
            optimizer.step()
            schedule.step()
        return model[0].running_mean.item(), weight(model)

    assert run_job(tmp_path, work, workers=2) == [(6.0, -1.5)] * 2


def test_buffers_of_several_dtypes_go_a_part_of_the_way(tmp_path: Path) -> None:
    """They share a table of the wider dtype."""

    def work(worker: Session) -> tuple[float, float]:
        model = slope()
        model.register_buffer("wide", torch.zeros(1))
        model.register_buffer("narrow", torch.zeros(1, dtype=torch.bfloat16))
        optimizer = attach(model, paceline.strategies.local_sgd(steps=1, merge=0.5))
        for buffer in model.buffers():
            buffer.fill_(4 * worker.rank)
        go(model, optimizer)
        wide, narrow = model.buffers()
        return wide.item(), narrow.item()

    assert run_job(tmp_path, work, workers=2) == [(1.0, 1.0), (3.0, 3.0)]  # half of the way to 2


def test_what_is_not_finite_is_not_learned(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[float, int]:
        model = slope()
        optimizer = attach(model, paceline.strategies.local_sgd(steps=3))
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 1).double()).sum().backward()
            if (worker.rank, step) == (1, 1):
                model.weight.grad.fill_(float("nan"))
            optimizer.step()
        halting = attach(model, paceline.strategies.local_sgd(steps=3), name="halting", nonfinite="halt")
        model.weight.grad.fill_(float("inf"))
        with pytest.raises(UsageError, match=f"worker {worker.rank}, step .* not finite"):
            halting.step()
        before = weight(model)
        zeroing = attach(model, paceline.strategies.local_sgd(steps=3), name="zeroing", nonfinite="zero")
        zeroing.step()
        assert weight(model) == before
        return before, optimizer.num_refused

    assert run_job(tmp_path, work, workers=2) == [(-2.5, 0), (-2.5, 1)]


@pytest.mark.parametrize(
    ("strategy", "due"),
    [
        (paceline.strategies.local_sgd(2), "every 2 clocks, if it has a batch in the last of them"),
        (paceline.strategies.downpour(push_every=2), "every 2 steps of its own"),
    ],
)
def test_steps_left_over_as_a_worker_had_no_batch_are_told_with_that_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: Any, due: str
) -> None:
    """Worker 1 has three of seven batches."""

    def work(_: Session) -> None:
        model = slope()
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distributed(inner, strategy=strategy, model=model)
        for (batch,) in paceline.shard(DataLoader(TensorDataset(torch.ones(7, 1, dtype=torch.float64)))):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    run_job(tmp_path, work, workers=2, servers=1)
    told = [line for line in capsys.readouterr().err.splitlines() if "worker 1 leaves" in line]
    assert told == [
        "paceline: worker 1 leaves at clock 4 with 1 step of 'model' that was never pushed: the servers and the other "
        "workers do not have it. It had no batch in a clock of the others, so it has made 3 steps, and it pushes "
        f"{due}: have batches that divide by the workers (drop_last=True)."
    ]
