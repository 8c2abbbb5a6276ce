"""Models on a CUDA device train as they do on the host. Skipped where there is no such device."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import adam, loss_of, micro_batch, parameters, seeded, sgd
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.training.device_copies import DeviceCopies
from paceline.training.parameter_server import DistributedOptimizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")

NUM_STEPS = 6


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    """Have CUDA open what it keeps open before a test counts, and compute alike every time."""
    torch.backends.cuda.matmul.allow_tf32 = False
    weight = torch.ones(2, 2, device="cuda", requires_grad=True)
    (weight @ weight).sum().backward()
    torch.cuda.synchronize()


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.training.parameter_server.BUCKET_BYTES", 1 << 16)


class Split(nn.Module):
    """Two layers, each on a device of its own, and large enough for memory that begins with a page."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 8192).to(first), nn.Linear(8192, 3).to(second)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = self.first(batch.to(self.first.weight.device)).tanh()
        return self.second(hidden.to(self.second.weight.device)).cpu()


def on_device() -> nn.Module:
    return seeded(lambda: Split("cuda", "cuda"))


def on_both() -> nn.Module:
    return seeded(lambda: Split("cuda", "cpu"))


Make = Callable[[], nn.Module]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model, micro_batch(rank, number)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def step_of_two_parts(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    if isinstance(optimizer, DistributedOptimizer):
        with optimizer.accumulate():
            loss_of(model, micro_batch(rank, 2 * number)).backward()
    else:
        loss_of(model, micro_batch(rank, 2 * number)).backward()
    loss_of(model, micro_batch(rank, 2 * number + 1)).backward()
    optimizer.step()


def alone(make: Make, act: Callable[..., None], wrap: Callable[[nn.Module], torch.optim.Optimizer]) -> Tensor:
    model = make()
    optimizer = wrap(model)
    for number in range(NUM_STEPS):
        act(model, optimizer, 0, number)
    return flat(model)


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1).cpu() for parameter in model.parameters()])


@pytest.mark.parametrize("carrier", ["shm", "tcp"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("act", [step, step_of_two_parts])
@pytest.mark.parametrize("make", [on_device, on_both])
def test_training_ends_where_a_plain_optimizer_does(
    tmp_path: Path, make: Make, act: Callable[..., None], overlap: bool, carrier: str
) -> None:
    def work(worker: Session) -> Tensor:
        model = make()
        optimizer = paceline.distributed(sgd(model), overlap=overlap, model=model)
        for number in range(NUM_STEPS):
            act(model, optimizer, 0, number)
        optimizer.wait_for_values()
        return flat(model)

    expected = alone(make, act, sgd)
    assert not torch.equal(expected, flat(make()))
    for found in run_job(tmp_path, work, workers=2, servers=2, carrier=carrier):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1", "essp:1", "asynchronous"])
def test_a_snapshot_and_every_policy(tmp_path: Path, consistency: str) -> None:
    def work(worker: Session) -> list[float]:
        model = on_device()
        optimizer = paceline.distributed(adam(model), consistency=consistency, model=model)
        losses: list[float] = []
        for number in range(30):
            step(model, optimizer, worker.rank, number % 3)
            before = flat(model)
            with optimizer.snapshot():
                losses.append(loss_of(model, micro_batch(0, 0)).item())
            assert torch.equal(flat(model), before), "training goes on from where it was"
        return losses

    for losses in run_job(tmp_path, work, workers=2, carrier="shm"):
        assert losses[-1] < losses[0]


def test_what_grad_scaler_does_is_pushed(tmp_path: Path) -> None:
    def train(optimizer: torch.optim.Optimizer, model: nn.Module) -> Tensor:
        scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
        for number in range(NUM_STEPS):
            optimizer.zero_grad()
            scaler.scale(loss_of(model, micro_batch(0, number)).cuda()).backward()
            scaler.step(optimizer)
            scaler.update()
        return flat(model)

    def work(worker: Session) -> Tensor:
        model = on_device()
        return train(paceline.distributed(sgd(model)), model)

    model = on_device()
    expected = train(sgd(model), model)
    torch.testing.assert_close(run_job(tmp_path, work, carrier="shm")[0], expected, rtol=1e-5, atol=1e-6)


@pytest.fixture
def device_copies() -> Iterator[DeviceCopies]:
    refused: list[str] = []
    yield DeviceCopies({torch.device("cuda", 0): torch.cuda.Stream()}, refused.append)
    assert refused == []


class Owner:
    pass


def test_a_gradient_that_is_computed_late_and_dropped_at_once_comes_whole(device_copies: DeviceCopies) -> None:
    owner, memory = Owner(), torch.frombuffer(mmap.mmap(-1, 1 << 24), dtype=torch.float32)
    device_copies.lock(owner, memory)
    assert memory.is_pinned()
    source = torch.ones(1 << 22, device="cuda")
    for _ in range(100):
        source = (source * 1.0001).sin().add(1)
    expected = source.clone()
    done = device_copies.fetch(source, memory)
    del source
    others = [torch.zeros(1 << 22, device="cuda") for _ in range(8)]  # one of them could be given its memory
    done.synchronize()
    assert torch.equal(memory, expected.cpu())
    assert len(others) == 8
    del owner
    gc.collect()
    assert not memory.is_pinned()


def test_values_are_there_for_what_is_computed_next(device_copies: DeviceCopies) -> None:
    values = torch.rand(1 << 20).pin_memory()
    weight = torch.zeros(1 << 20, device="cuda")
    device_copies.deliver(values, weight)
    total = weight.double().sum()
    for reading in device_copies.queued():
        reading.synchronize()
    assert total.item() == pytest.approx(values.double().sum().item())


def test_parameters_are_those_of_every_worker(tmp_path: Path) -> None:
    def work(worker: Session) -> Tensor:
        model = on_device()
        optimizer = paceline.distributed(sgd(model), overlap=True, model=model)
        for number in range(NUM_STEPS):
            optimizer.zero_grad()
            loss_of(model, micro_batch(worker.rank, number)).backward()
            optimizer.step()
        optimizer.wait_for_values()
        assert all(parameter.is_cuda for parameter in model.parameters())
        return parameters(model).cpu()

    first, second = run_job(tmp_path, work, workers=2, carrier="shm")
    assert torch.equal(first, second)
