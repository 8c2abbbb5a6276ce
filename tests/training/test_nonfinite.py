"""A gradient with NaN or infinity harms nobody: it is dropped, zeroed, or ends the worker, as was asked for."""

from pathlib import Path

import pytest
import torch
from tests.jobs import job, run_job
from tests.training.recipes import Recipe, accumulate, mlp, one_batch, parameters, sgd
from torch import Tensor, nn

import paceline
from paceline.errors import UsageError
from paceline.session import Session

POLICIES = ["bsp", "ssp:2", "essp:2", "asynchronous"]
NUM_STEPS = 6
BAD_STEP = 3


def spoil(model: nn.Module, rank: int, step: int) -> None:
    """An ordinary step, except that one element of worker 1's gradient is NaN in one of them."""
    one_batch(model, rank, step)
    if rank == 1 and step == BAD_STEP:
        model[0].weight.grad[2, 3] = torch.nan


def train(worker: Session, **settings: str) -> tuple[Tensor, int]:
    model = mlp()
    optimizer = paceline.distributed(sgd(model), **settings)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        spoil(model, worker.rank, step)
        optimizer.step()
    with optimizer.snapshot():
        return parameters(model), optimizer.num_refused


@pytest.mark.parametrize("consistency", POLICIES)
@pytest.mark.parametrize("nonfinite", ["reject", "zero"])
def test_parameters_stay_finite_and_refusals_are_counted(tmp_path: Path, consistency: str, nonfinite: str) -> None:
    found = run_job(
        tmp_path, lambda worker: train(worker, consistency=consistency, nonfinite=nonfinite), workers=3, servers=2
    )
    assert all(bool(values.isfinite().all()) for values, _ in found)
    assert [refused for _, refused in found] == [0, 1 if nonfinite == "reject" else 0, 0]


def test_under_bsp_the_others_go_on_with_the_mean_of_what_there_is(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        others = Recipe(backward=lambda m, r, s: one_batch(m, 2 * r, s))  # workers 0 and 2
        accumulate(model, others if step == BAD_STEP else Recipe(), 2 if step == BAD_STEP else 3, step)
        optimizer.step()
    for found, _ in run_job(tmp_path, train, workers=3, servers=2):
        assert torch.equal(found, parameters(model))


def test_zero_leaves_only_the_bad_elements_out(tmp_path: Path) -> None:
    def work(worker: Session) -> Tensor:
        weight = nn.Parameter(torch.zeros(3))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0), nonfinite="zero")
        weight.grad = torch.tensor([1.0, torch.inf, torch.nan]) if worker.rank else torch.ones(3)
        optimizer.step()
        return weight.detach()

    assert all(torch.equal(found, torch.tensor([-1.0, -0.5, -0.5])) for found in run_job(tmp_path, work, workers=2))


def test_halt_ends_the_worker_and_leaves_the_others_finite(tmp_path: Path) -> None:
    kept: dict[int, Tensor] = {}

    def work(worker: Session) -> None:
        kept[worker.rank] = train(worker, nonfinite="halt")[0]

    message = r"worker 1, clock 3: 1 of 224 elements of the gradient for table 'model' are NaN or infinite"
    with job(tmp_path, workers=3, servers=2) as started, pytest.raises(UsageError, match=message):
        started.run(work)
    assert sorted(kept) == [0, 2]
    assert all(bool(values.isfinite().all()) for values in kept.values())
