"""A gradient with NaN or infinity does no harm: it is dropped, zeroed, or ends the worker, as was asked for."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import job, run_job
from tests.training.recipes import Recipe, accumulate, mlp, one_batch, parameters, sgd
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.core.tables import closed_before, completed_without
from paceline.errors import UsageError
from paceline.observe.runs import read_run
from paceline.observe.trace import NO_SERVER, Trace
from paceline.worker.metrics import StepMetrics
from paceline.worker.pushes import PushOutcome, finished_push

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


def test_a_script_that_catches_halt_goes_on_with_its_next_batch(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[Tensor, int]:
        model, halts = mlp(), 0
        optimizer = paceline.distributed(sgd(model), nonfinite="halt")
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            one_batch(model, 0, step)
            if BAD_STEP - 2 <= step <= BAD_STEP:  # more often than there are buffers
                model[0].weight.grad[2, 3] = torch.nan
            try:
                optimizer.step()
            except UsageError:
                halts += 1
        return parameters(model), halts

    [(found, halts)] = run_job(tmp_path, work, workers=1, carrier="shm")
    model = mlp()
    optimizer = sgd(model)
    for step in (0, 4, 5):
        optimizer.zero_grad()
        one_batch(model, 0, step)
        optimizer.step()
    assert halts == 3
    assert torch.equal(found, parameters(model))


FIRST = (
    r"paceline: worker {rank}, clock 3: a push of '{table}' was refused: 1 of 224 elements of the gradient for table "
    r"'{table}' are NaN or infinite, in parameter '0.weight'; it was not sent. See whether the loss is finite"
)


@pytest.mark.parametrize("settings", [{}, {"consistency": "ssp:1"}, {"consistency": "asynchronous"}, {"overlap": True}])
def test_the_first_refusal_is_told_with_its_parameter_and_all_are_in_the_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]
) -> None:
    def work(worker: Session) -> None:
        model = mlp()
        optimizer = paceline.distributed(sgd(model), model=model, **settings)
        for step in range(13):
            optimizer.zero_grad()
            one_batch(model, worker.rank, step)
            if worker.rank == 1 and step >= BAD_STEP and not settings.get("overlap"):
                model[0].weight.grad[2, 3] = torch.nan
            optimizer.step()

    if settings.get("overlap"):  # gradients leave in backward: a hook spoils them before
        work = spoiling_in_backward
    run_job(tmp_path, work, workers=2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "refused" in line]
    table = "model.0" if settings.get("overlap") else "model"
    assert lines[0].startswith(FIRST.format(rank=1, table=table))
    assert lines[1:] == [
        f"paceline: worker 1, clock 12: 10 of 13 pushes of '{table}' were refused by now",
        f"paceline: worker 1: 10 of 13 pushes of '{table}' were refused and had no effect, from clock 3 to clock 12",
    ]
    found = [refusal for refusal in read_run(tmp_path).refusals if refusal.server == NO_SERVER]
    assert [(refusal.worker, refusal.table) for refusal in found] == [(1, table)] * 10


def spoiling_in_backward(worker: Session) -> None:
    model = mlp()
    optimizer = paceline.distributed(sgd(model), model=model, overlap=True)
    step = 0

    def spoil_one(gradient: Tensor) -> Tensor:
        bad = gradient.clone()
        if worker.rank == 1 and step >= BAD_STEP:
            bad[2, 3] = torch.nan
        return bad

    model[0].weight.register_hook(spoil_one)
    for step in range(13):
        optimizer.zero_grad()
        one_batch(model, worker.rank, step)
        optimizer.step()


@pytest.mark.parametrize(
    "strategy", ["all-reduce", paceline.strategies.local_sgd(steps=2), paceline.strategies.downpour()]
)
def test_steps_that_are_left_out_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str], strategy: Any) -> None:
    def work(worker: Session) -> None:
        model = mlp()
        optimizer = paceline.distributed(sgd(model), model=model, strategy=strategy)
        for step in range(BAD_STEP + 2):
            optimizer.zero_grad()
            bad = float("nan") if worker.rank == 0 and step >= BAD_STEP else 1.0
            (model(torch.ones(1, 9) * (step + 1)).sum() * bad).backward()
            optimizer.step()

    run_job(tmp_path, work, workers=2)
    lines = [line for line in capsys.readouterr().err.splitlines() if "refused" in line]
    assert len(lines) == 2, lines
    assert lines[0].startswith("paceline: worker 0, clock 3: a step of 'model' was refused: ")
    assert "parameter '0.weight' and " in lines[0]
    assert lines[1].startswith("paceline: worker 0: 2 steps of 'model' were refused and had no effect, from clock 3")


def test_a_quorum_that_goes_on_without_a_worker_is_not_told() -> None:
    told: list[str] = []
    metrics = StepMetrics(Trace(None), 2, tell=told.append)
    for reason in (completed_without(2, "w", 5), closed_before("w", 5, 7)):
        metrics.watch_push("w", "backup:1", 5, finished_push(PushOutcome(applied=False, reason=reason)))
    assert told == []
    metrics.watch_push("w", "bsp", 5, finished_push(PushOutcome(applied=False, reason=reason)))
    assert told == [f"worker 2, clock 5: a push of 'w' was refused: {reason}"]


def test_a_scaler_that_never_finds_a_scale_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work(worker: Session) -> None:
        model = mlp()
        optimizer = paceline.distributed(sgd(model))
        scaler = torch.amp.GradScaler("cpu")
        for _ in range(10):
            scaler.scale(model(torch.full((1, 9), torch.nan)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    run_job(tmp_path, work, workers=1)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("paceline: worker 0, clock 9: the last 10 steps of 'model' were left out, as the GradScaler")


def test_pushes_to_tables_and_rows_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with paceline.connect() as ps:
        add = paceline.update.Add()
        w, users = ps.table("w", shape=(2,), update=add), ps.table("users", rows=2, update=add)
        assert not w.push([torch.nan, 1.0]).result().applied
        assert not users.push([7, 9], [[1.0, 1.0], [torch.inf, 1.0]]).result().applied
        ps.clock()
    told = capsys.readouterr().err.splitlines()
    assert [line.partition("; it was not sent")[0] for line in told] == [
        "paceline: worker 0, clock 0: a push of 'w' was refused: 1 of 2 elements of the gradient for table 'w' are NaN "
        "or infinite",
        "paceline: worker 0, clock 0: a push of 'users' was refused: 1 of 4 elements of a push to table 'users' are "
        "NaN or infinite, first in the row of id 9",
    ]
