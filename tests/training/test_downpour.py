"""Downpour: what each worker steps and when, against the same in one process; waits are for the warm start only."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.jobs import DEADLINE_S, run_job
from tests.training.recipes import adam, loss_of, micro_batch, mlp, parameters
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.errors import DeadlineExceeded, UsageError
from paceline.job.strategy import Distribution
from paceline.training.arguments import choose_strategy
from paceline.training.downpour import DownpourOptimizer
from paceline.worker.table import Table

Make = Callable[[nn.Module], torch.optim.Optimizer]


def adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def pour(model: nn.Module, make: Make, *, with_model: bool = False, **cadence: float) -> DownpourOptimizer:
    strategy = paceline.strategies.downpour(**cadence)
    optimizer = paceline.distributed(make(model), strategy=strategy, model=model if with_model else None)
    assert isinstance(optimizer, DownpourOptimizer)
    return optimizer


def backward(model: nn.Module, step: int) -> None:
    loss_of(model, micro_batch(0, step, torch.float64)).backward()


def reference(make: Make, num_steps: int, push_every: int, fetch_every: int, local_lr: float) -> list[Tensor]:
    """The loop of one worker, written down: its own copy, and the values on the servers after each step."""
    local, servers = mlp().double(), mlp().double()
    rule = make(servers)
    accrued = [torch.zeros_like(parameter) for parameter in local.parameters()]
    seen: list[Tensor] = []
    for step in range(1, num_steps + 1):
        local.zero_grad()
        backward(local, step - 1)
        with torch.no_grad():
            for parameter, total in zip(local.parameters(), accrued, strict=True):
                total += parameter.grad
                parameter -= local_lr * parameter.grad
        if step % push_every == 0:
            for parameter, total in zip(servers.parameters(), accrued, strict=True):
                parameter.grad = total.clone()
                total.zero_()
            rule.step()
        if step % fetch_every == 0:
            with torch.no_grad():
                for own, theirs, total in zip(local.parameters(), servers.parameters(), accrued, strict=True):
                    own.copy_(theirs - local_lr * total)
        seen += [parameters(local), parameters(servers)]
    return seen


@pytest.mark.parametrize("make", [adagrad, momentum])
@pytest.mark.parametrize(("push_every", "fetch_every"), [(1, 1), (3, 2), (2, 3), (1, 4)])
def test_a_worker_does_what_the_loop_on_paper_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Make, push_every: int, fetch_every: int
) -> None:
    num_pushes, num_fetches = [], []
    push, ask = Table.push, Table.start_read
    monkeypatch.setattr(Table, "push", lambda *a, **k: num_pushes.append(a[0].name) or push(*a, **k))
    monkeypatch.setattr(Table, "start_read", lambda *a, **k: num_fetches.append(a[0].name) or ask(*a, **k))

    def work(worker: Session) -> list[Tensor]:
        model = mlp().double()
        optimizer = pour(model, make, push_every=push_every, fetch_every=fetch_every, local_lr=0.02)
        seen: list[Tensor] = []
        for step in range(8):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            seen.append(parameters(model))
            with optimizer.snapshot():
                seen.append(parameters(model))
            assert torch.equal(parameters(model), seen[-2])
        assert worker.node.clock == 8
        return seen

    (found,) = run_job(tmp_path, work, servers=2)
    torch.testing.assert_close(found, reference(make, 8, push_every, fetch_every, 0.02), rtol=1e-12, atol=1e-14)
    assert (len(num_pushes), len(num_fetches)) == (8 // push_every, 1 + 8 // fetch_every)


@pytest.mark.parametrize("make", [adagrad, adam])
def test_one_worker_that_always_pushes_and_fetches_is_the_plain_optimizer(tmp_path: Path, make: Make) -> None:
    reference_model = mlp().double()
    plain = make(reference_model)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    for step in range(6):
        plain.zero_grad()
        backward(reference_model, step)
        plain.step()
        schedule.step()

    def work(_: Session) -> None:
        model = mlp().double()
        optimizer = pour(model, make, with_model=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        for step in range(6):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            schedule.step()
        model.state_dict()  # waits for the values that the last step asked for
        assert torch.equal(parameters(model), parameters(reference_model))
        assert "downpour" in repr(optimizer)
        state = optimizer.state_dict()
        torch.testing.assert_close(state, plain.state_dict(), rtol=0, atol=0)
        with torch.no_grad():
            model[0].weight.zero_()
        optimizer.load_state_dict(state)
        assert model[0].weight.abs().sum() == 0
        torch.testing.assert_close(optimizer.state_dict(), state, rtol=0, atol=0)

    run_job(tmp_path, work)


def test_the_others_begin_where_the_first_worker_is_after_its_warm_start(tmp_path: Path) -> None:
    """Worker 0 needs no other meanwhile, and the others have finished as many clocks when they begin."""
    num_steps = 5
    others_began = threading.Barrier(3)
    steps_of_first: list[int] = []
    expected = reference(adagrad, num_steps, 1, 1, 0.1)[-1]

    def work(worker: Session) -> int:
        model = mlp().double()
        optimizer = pour(model, adagrad, warm_start_steps=num_steps)
        if worker.rank:
            assert steps_of_first == list(range(num_steps))
            torch.testing.assert_close(parameters(model), expected, rtol=1e-12, atol=1e-14)
        for step in range(num_steps if worker.rank == 0 else 0):
            optimizer.zero_grad()
            backward(model, step)
            steps_of_first.append(step)
            optimizer.step()
        others_began.wait(DEADLINE_S / 2)
        return worker.node.clock

    assert run_job(tmp_path, work, workers=3) == [num_steps] * 3


def test_the_others_wait_for_a_warm_start_no_longer_than_for_anything(tmp_path: Path) -> None:
    is_declared, gave_up = threading.Event(), threading.Event()

    def work(worker: Session) -> None:
        if worker.rank == 0:
            pour(mlp(), adagrad, warm_start_steps=3)  # and takes no step
            is_declared.set()
            assert gave_up.wait(DEADLINE_S / 2)
            return
        assert is_declared.wait(DEADLINE_S / 2)
        with pytest.raises(DeadlineExceeded, match=r"values of table 'model\.start' at clock 1 \(bsp\)"):
            pour(mlp(), adagrad, warm_start_steps=3)
        gave_up.set()

    run_job(tmp_path, work, workers=2, wait_timeout_s=3.0)


def test_every_gradient_is_applied_once(tmp_path: Path) -> None:
    """With gradients that do not depend on the values the order is all one: the sum of all is what comes out."""

    def work(worker: Session) -> Tensor:
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        idle = nn.Parameter(torch.ones(2))
        sgd = torch.optim.SGD([model.weight, idle], lr=0.5, weight_decay=0.0)
        optimizer = paceline.distributed(sgd, strategy="downpour:2")
        for step in range(6):
            optimizer.zero_grad()
            (model(torch.ones(1, 2)).sum() * (worker.rank + 1) * (step + 1)).backward()
            optimizer.step()
        worker.barrier()
        with optimizer.snapshot():
            assert idle.tolist() == [1.0, 1.0]
            return model.weight.detach().clone()

    for weight in run_job(tmp_path, work, workers=3, servers=2):
        assert weight.tolist() == [[-0.5 * 21 * 6] * 2]


def test_gradients_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    def work(_: Session) -> tuple[float, int]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = pour(model, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), push_every=3, fetch_every=9)
        for value in (1.0, float("nan"), 2.0):
            optimizer.zero_grad()
            model(torch.full((1, 1), value)).sum().backward()
            optimizer.step()
        with optimizer.snapshot():
            on_servers = model.weight.item()
        assert model.weight.item() == on_servers
        halting = paceline.distributed(
            torch.optim.SGD(model.parameters(), lr=1.0), strategy="downpour", nonfinite="halt", name="halting"
        )
        model(torch.full((1, 1), float("inf"))).sum().backward()
        with pytest.raises(UsageError, match=r"worker 0, step of 'halting': a gradient has NaN or infinity"):
            halting.step()
        return on_servers, optimizer.num_refused

    assert run_job(tmp_path, work) == [(-3.0, 1)]


def test_statistics_of_the_model_are_averaged(tmp_path: Path) -> None:
    def work(worker: Session) -> float:
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 1)).double()
        optimizer = pour(model, adagrad, with_model=True)
        worker.barrier()  # both begin with the same statistics
        model(torch.tensor([[0.0], [2.0]], dtype=torch.float64) + 10 * worker.rank).sum().backward()
        optimizer.step()
        optimizer.wait_for_values()
        worker.barrier()
        with optimizer.snapshot():
            return model[0].running_mean.item()

    assert run_job(tmp_path, work, workers=2) == [6.0, 6.0]


def test_numbers_that_make_no_sense_are_refused() -> None:
    assert choose_strategy("downpour:3", Distribution()) == paceline.strategies.downpour(push_every=3, fetch_every=3)
    assert choose_strategy(None, Distribution.parse("downpour")) == paceline.strategies.downpour()
    with pytest.raises(UsageError, match=r"^push_every of downpour is 0, expected 1 or more steps\.$"):
        paceline.strategies.downpour(push_every=0)
    with pytest.raises(UsageError, match=r"^warm_start_steps of downpour is -1, expected 0 or more steps\.$"):
        paceline.strategies.downpour(warm_start_steps=-1)
    with pytest.raises(UsageError, match=r"^local_lr of downpour is nan, expected 0 or a number above\.$"):
        paceline.strategies.downpour(local_lr=float("nan"))


def test_sparse_gradients_are_refused(tmp_path: Path) -> None:
    def work(_: Session) -> None:
        layer = nn.Embedding(3, 2, sparse=True)
        sgd = torch.optim.SGD(layer.named_parameters(), lr=0.1)
        optimizer = paceline.distributed(sgd, strategy="downpour")
        layer(torch.tensor([1])).sum().backward()
        with pytest.raises(UsageError, match=r"^parameter 'weight' has a sparse gradient: build its layer with"):
            optimizer.step()

    run_job(tmp_path, work)
