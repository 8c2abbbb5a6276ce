"""A snapshot shows every worker the same complete state, and training goes on as if it had not been taken."""

import threading
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import micro_batch, mlp, one_batch, parameters, sgd
from tests.training.test_buffers import normalised
from torch import Tensor, nn

import paceline
from paceline.api.session import Session


def state(model: nn.Module) -> Tensor:
    return torch.cat([tensor.reshape(-1).float() for tensor in model.state_dict().values()]).clone()


@pytest.mark.parametrize("carrier", ["memory", "shm"])
def test_under_bsp_all_workers_hold_the_same_bytes(tmp_path: Path, carrier: str) -> None:
    def work(worker: Session) -> list[Tensor]:
        model, seen = mlp(), []
        optimizer = paceline.distributed(sgd(model))
        for step in range(10):
            optimizer.zero_grad()
            one_batch(model, worker.rank, step)
            optimizer.step()
            with optimizer.snapshot():
                seen.append(parameters(model))
        return seen

    first, *others = run_job(tmp_path, work, workers=4, servers=3, carrier=carrier)
    for other in others:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, other, strict=True))


@pytest.mark.parametrize("carrier", ["memory", "shm"])
def test_training_is_not_affected_even_in_the_middle_of_an_accumulation(tmp_path: Path, carrier: str) -> None:
    def train(worker: Session, *, look: bool, name: str) -> Tensor:
        model = normalised()
        optimizer = paceline.distributed(sgd(model), model=model, name=name)
        for step in range(5):
            optimizer.zero_grad()
            for part in range(2):
                model(micro_batch(worker.rank, 2 * step + part)).square().mean().backward()
                if look:
                    with optimizer.snapshot():
                        assert not torch.is_grad_enabled()
                        model.eval()(micro_batch(0, 0))
                        model.train()
            optimizer.step()
        return state(model)

    def work(worker: Session) -> tuple[Tensor, Tensor]:
        return train(worker, look=False, name="one"), train(worker, look=True, name="two")

    for without, with_snapshots in run_job(tmp_path, work, workers=2, servers=2, carrier=carrier):
        assert torch.equal(without, with_snapshots)


def test_lazy_training_keeps_its_old_values_and_the_snapshot_shows_the_new_ones(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[float, float, float]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0), consistency="ssp:9", fetch_every=None)
        paceline.barrier()  # both have fetched the first values, and will fetch no others
        for _ in range(3):
            weight.grad = torch.ones(1)
            optimizer.step()
        paceline.barrier()
        before = weight.item()
        with optimizer.snapshot():
            during = weight.item()
        return before, during, weight.item()

    assert run_job(tmp_path, work, workers=2, servers=1) == [(-3.0, -6.0, -3.0)] * 2


@pytest.mark.parametrize("consistency", ["ssp:3", "essp:3"])
def test_under_staleness_it_contains_every_clock_below_the_workers_own(tmp_path: Path, consistency: str) -> None:
    def work(worker: Session) -> list[float]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0), consistency=consistency)
        seen: list[float] = []
        for clock in range(1, 11):
            weight.grad = torch.ones(1)
            optimizer.step()
            with optimizer.snapshot():
                seen.append(-weight.item() - 3 * clock)  # what is there beyond the complete clocks
        return seen

    for seen in run_job(tmp_path, work, workers=3):
        assert all(extra >= 0 for extra in seen)


def test_a_worker_that_a_quorum_left_behind_continues_from_the_snapshot(tmp_path: Path) -> None:
    """The snapshot takes it to the clock of the others, where gradients of its old values have no place."""
    others_are_done = threading.Event()

    def work(worker: Session) -> tuple[float, float, int]:
        weight = nn.Parameter(torch.zeros(1))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0), consistency="backup:1")
        paceline.barrier()
        for _ in range(5 if worker.rank < 2 else 0):
            weight.grad = torch.ones(1)
            optimizer.step()
        if worker.rank == 0:
            others_are_done.set()
        assert others_are_done.wait(120)
        with optimizer.snapshot():
            during = weight.item()
        return during, weight.item(), worker.node.clock

    assert run_job(tmp_path, work, workers=3) == [(-5.0, -5.0, 5)] * 3


def test_the_model_keeps_training_after_an_error_inside(tmp_path: Path) -> None:
    def work(worker: Session) -> bool:
        model = mlp()
        optimizer = paceline.distributed(sgd(model), consistency="ssp:2", fetch_every=None)
        before = parameters(model)
        with pytest.raises(ZeroDivisionError), optimizer.snapshot():
            _ = 1 / 0
        return torch.equal(parameters(model), before) and torch.is_grad_enabled()

    assert run_job(tmp_path, work) == [True]
