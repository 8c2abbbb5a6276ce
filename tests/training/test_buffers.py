"""Buffers such as BatchNorm's follow the mean of the workers, and nothing else changes them."""

from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import micro_batch, seeded, sgd
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError

MOMENTUM = 0.25


def normalised() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(9, 4), nn.BatchNorm1d(4, momentum=MOMENTUM), nn.Linear(4, 3)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    optimizer.zero_grad()
    model(micro_batch(rank, number)).square().mean().backward()
    optimizer.step()


def means_of_batches(model: nn.Module, ranks: range, number: int) -> Tensor:
    """What BatchNorm measures in the workers' batches of one step, averaged over the workers."""
    with torch.no_grad():
        return torch.stack([model[0](micro_batch(rank, number)).mean(0) for rank in ranks]).mean(0)


@pytest.mark.parametrize("strategy", ["bsp", "ssp:2", "all-reduce"])
def test_batches_that_torch_would_not_combine_are_refused(tmp_path: Path, strategy: str) -> None:
    def work(worker: Session) -> None:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(normalised())
        paceline.distributed(sgd(model), model=model, strategy=strategy)

    with pytest.raises(UsageError, match=r"layer '1' is a SyncBatchNorm.*GPUs only.*Take BatchNorm"):
        run_job(tmp_path, work, workers=2)


def test_a_worker_alone_has_nothing_to_combine(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(normalised())
        step(model, paceline.distributed(sgd(model), model=model), worker.rank, 0)

    run_job(tmp_path, work)


def test_under_bsp_the_statistics_move_by_the_mean_of_the_workers_moves(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[Tensor, Tensor, int]:
        model = normalised()
        optimizer = paceline.distributed(sgd(model), model=model)
        expected = torch.zeros(4)
        for number in range(5):
            expected = (1 - MOMENTUM) * expected + MOMENTUM * means_of_batches(model, range(worker.size), number)
            step(model, optimizer, worker.rank, number)
        return model[1].running_mean, expected, int(model[1].num_batches_tracked)

    results = run_job(tmp_path, work, workers=3, servers=2)
    for found, expected, num_batches in results:
        assert torch.equal(found, results[0][0])
        torch.testing.assert_close(found, expected)
        assert num_batches == 5


@pytest.mark.parametrize("consistency", ["ssp:1", "essp:2", "asynchronous", "backup:1"])
def test_under_every_policy_the_statistics_stay_those_of_the_data(tmp_path: Path, consistency: str) -> None:
    """With the same batch on every worker, the statistics converge to its own, whichever worker is late."""

    def work(worker: Session) -> tuple[Tensor, Tensor]:
        model = normalised()
        optimizer = paceline.distributed(
            torch.optim.SGD(model.parameters(), lr=0.0), model=model, consistency=consistency
        )
        for _ in range(40):
            step(model, optimizer, 0, 0)
        with optimizer.snapshot():
            return model[1].running_mean.clone(), means_of_batches(model, range(1), 0)

    for found, expected in run_job(tmp_path, work, workers=3, servers=2):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("consistency", ["ssp:1", "essp:1", "asynchronous"])
def test_each_worker_moves_the_statistics_by_its_share_alone(tmp_path: Path, consistency: str) -> None:
    def work(worker: Session) -> tuple[Tensor, Tensor]:
        model = normalised()
        optimizer = paceline.distributed(sgd(model), model=model, consistency=consistency, fetch_every=2)
        expected = MOMENTUM * means_of_batches(model, range(worker.size), 0)
        paceline.barrier()  # no worker has moved yet when the last one measures
        step(model, optimizer, worker.rank, 0)
        paceline.barrier()
        with optimizer.snapshot():
            return model[1].running_mean.clone(), expected

    for found, expected in run_job(tmp_path, work, workers=3, servers=2):
        torch.testing.assert_close(found, expected)


def test_workers_start_from_the_buffers_of_worker_0(tmp_path: Path) -> None:
    def work(worker: Session) -> Tensor:
        model = normalised()
        model[1].running_mean.fill_(float(worker.rank))
        paceline.distributed(sgd(model), model=model)
        return model[1].running_mean

    assert all(torch.equal(found, torch.zeros(4)) for found in run_job(tmp_path, work, workers=2))


def test_a_batch_that_is_not_finite_leaves_no_trace_in_the_statistics(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[bool, int]:
        model = normalised()
        optimizer = paceline.distributed(sgd(model), model=model)
        step(model, optimizer, worker.rank, 0)
        optimizer.zero_grad()
        bad = torch.nan if worker.rank == 1 else 1.0
        (model(micro_batch(worker.rank, 1) * bad)).square().mean().backward()
        optimizer.step()
        step(model, optimizer, worker.rank, 2)
        return all(bool(tensor.isfinite().all()) for tensor in model.state_dict().values()), optimizer.num_refused

    assert run_job(tmp_path, work, workers=2) == [(True, 0), (True, 1)]


@pytest.mark.parametrize("strategy", ["bsp", "all-reduce", "local-sgd:1", "diloco:1"])
def test_buffers_of_several_types_follow_the_mean(tmp_path: Path, strategy: str) -> None:
    def work(worker: Session) -> list[Tensor]:
        model = nn.Linear(9, 3)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            model.register_buffer(f"of_{str(dtype)[6:]}", torch.zeros(2, dtype=dtype))
        optimizer = paceline.distributed(sgd(model), model=model, strategy=strategy)
        for buffer in model.buffers():
            buffer += 1 + 2 * worker.rank
        step(model, optimizer, worker.rank, 0)
        return [*model.buffers()]

    for found in run_job(tmp_path, work, workers=2):
        assert [buffer.tolist() for buffer in found] == [[2.0, 2.0]] * 4


@pytest.mark.parametrize("strategy", ["bsp", "all-reduce", "local-sgd:1"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_buffers_that_have_no_mean_here_stay_with_each_worker(
    tmp_path: Path, strategy: str, dtype: torch.dtype
) -> None:
    def work(worker: Session) -> float:
        model = normalised()
        model.register_buffer("own", torch.full((2,), worker.rank).to(dtype))
        optimizer = paceline.distributed(sgd(model), model=model, strategy=strategy)
        before = model.own.clone()
        model.own.copy_(torch.full((2,), worker.rank))
        step(model, optimizer, worker.rank, 0)
        assert before.dtype == dtype
        return complex(model.own[0].to(torch.complex64).item()).real

    assert run_job(tmp_path, work, workers=2) == [0.0, 1.0]
