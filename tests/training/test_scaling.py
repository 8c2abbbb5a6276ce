"""Under a GradScaler the steps of the workers stay together, whichever of them overflows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import Recipe, accumulate, loss_of, micro_batch, mlp, parameters, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError

BAD = {2: 1, 5: 0}  # the worker whose loss overflows, by step
NUM_STEPS = 8
SCALE = 1000.0  # no power of 2: what is not unscaled the same way differs in some bits


def scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=3)


def scaled_loss(model: nn.Module, rank: int, step: int, scaled: torch.amp.GradScaler) -> Tensor:
    factor = torch.inf if BAD.get(step) == rank else 1.0
    return scaled.scale(loss_of(model, micro_batch(rank, step))) * factor


def train(
    ps: Session, *, unscaled: bool = False, make: Callable[[nn.Module], torch.optim.Optimizer] = sgd, **settings: Any
) -> tuple[Tensor, int, float, int]:
    model, scaled = mlp(), scaler()
    optimizer = paceline.distributed(make(model), model=model, **settings)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        scaled_loss(model, ps.rank, step, scaled).backward()
        if unscaled:
            scaled.unscale_(optimizer)
        scaled.step(optimizer)
        scaled.update()
    return parameters(model), ps.node.clock, scaled.get_scale(), optimizer.num_refused


def train_alone(num_workers: int) -> Tensor:
    """Train on what no scaler refuses: workers that overflow in a step have no part in its mean."""
    model = mlp()
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        ranks = [rank for rank in range(num_workers) if BAD.get(step) != rank]

        def backward(one: nn.Module, index: int, step: int, ranks: list[int] = ranks) -> None:
            loss_of(one, micro_batch(ranks[index], step)).backward()

        if ranks:
            accumulate(model, Recipe(backward=backward), len(ranks), step)
            optimizer.step()
    return parameters(model)


def test_one_worker_does_bit_for_bit_what_torch_does_alone(tmp_path: Path) -> None:
    model, scaled = mlp(), scaler()
    optimizer = sgd(model)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        scaled_loss(model, 0, step, scaled).backward()
        scaled.step(optimizer)
        scaled.update()
    found, clock, scale, num_refused = run_job(tmp_path, train)[0]
    assert torch.equal(found, parameters(model))
    assert (clock, scale, num_refused) == (NUM_STEPS, scaled.get_scale(), 1)


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("settings", [{}, {"nonfinite": "ignore"}, {"nonfinite": "halt"}, {"nonfinite": "zero"}])
def test_a_worker_that_overflows_leaves_the_clock_to_the_others(
    tmp_path: Path, unscaled: bool, settings: dict[str, Any]
) -> None:
    results = run_job(tmp_path, lambda ps: train(ps, unscaled=unscaled, **settings), workers=2)
    for found, clock, _, num_refused in results:
        torch.testing.assert_close(found, train_alone(2))
        assert (clock, num_refused) == (NUM_STEPS, 1)
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.parametrize("policy", ["ssp:2", "asynchronous", "backup:1"])
def test_workers_finish_the_same_clocks_under_every_policy(tmp_path: Path, policy: str) -> None:
    for found, clock, _, num_refused in run_job(tmp_path, lambda ps: train(ps, consistency=policy), workers=2):
        assert found.isfinite().all()
        assert clock >= NUM_STEPS
        assert num_refused >= 1


@pytest.mark.parametrize(
    "strategy",
    [paceline.strategies.downpour(push_every=2), paceline.strategies.diloco(2), {"0.*": "ssp:1", "*": "bsp"}],
)
def test_no_strategy_takes_a_step_that_overflows(tmp_path: Path, strategy: Any) -> None:
    for found, clock, _, num_refused in run_job(tmp_path, lambda ps: train(ps, strategy=strategy), workers=2):
        assert found.isfinite().all()
        assert clock == NUM_STEPS
        assert num_refused >= 1


def test_under_all_reduce_all_workers_skip_the_same_steps_and_have_the_same_scale(tmp_path: Path) -> None:
    results = run_job(tmp_path, lambda ps: train(ps, strategy=paceline.strategies.all_reduce()), workers=2)
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
    assert results[0][3] == len(BAD)


@pytest.mark.parametrize("num_batches", [4, 5])
def test_under_all_reduce_a_worker_without_a_batch_tells_that_its_scaler_misses_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_batches: int
) -> None:
    def work(ps: Session) -> None:
        model, scaled = mlp(), scaler()
        optimizer = paceline.distributed(sgd(model), model=model, strategy="all-reduce")
        for _ in range(2):
            for batch in paceline.shard(DataLoader(micro_batch(0, 0)[:num_batches])):
                optimizer.zero_grad()
                scaled.scale(loss_of(model, batch)).backward()
                scaled.step(optimizer)
                scaled.update()

    run_job(tmp_path, work, workers=2)
    told = capsys.readouterr().err
    assert told.count("so its GradScaler does not count that step") == num_batches % 2  # once, not in each epoch


@pytest.mark.parametrize("unscaled", [False, True])
def test_groups_beside_all_reduce_are_refused(tmp_path: Path, unscaled: bool) -> None:
    def work(ps: Session) -> None:
        with pytest.raises(UsageError, match="a GradScaler does not go with groups"):
            train(ps, strategy={"0.*": "bsp", "*": "all-reduce"}, unscaled=unscaled)
        ps.close(politely=False)

    run_job(tmp_path, work)


def test_rows_are_unscaled_and_left_out_with_the_rest(tmp_path: Path) -> None:
    def work(ps: Session) -> Tensor:
        rows = paceline.Embedding(None, 4, update=paceline.update.SGD(lr=1.0), init=0.0)
        model, scaled = nn.Linear(4, 1, bias=False), scaler()
        nn.init.ones_(model.weight)
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.0), model=model)
        for factor in (1.0, torch.inf, 1.0):
            optimizer.zero_grad()
            (scaled.scale(model(rows(torch.tensor([7]))).sum()) * factor).backward()
            scaled.step(optimizer)
            scaled.update()
        found = rows(torch.tensor([7])).detach()
        loss = scaled.scale(model(rows(torch.tensor([7]))).sum())
        loss.backward()
        scaled.unscale_(optimizer)
        with pytest.raises(UsageError, match="does not know the gradients of paceline"):
            scaled.step(optimizer)
        return found

    assert torch.allclose(run_job(tmp_path, work)[0], torch.full((1, 4), -2.0))


@pytest.mark.parametrize("unscaled", [False, True])
def test_overlap_is_refused(tmp_path: Path, unscaled: bool) -> None:
    def work(ps: Session) -> None:
        with pytest.raises(UsageError, match="a GradScaler does not go with overlap=True"):
            train(ps, overlap=True, unscaled=unscaled)
        ps.close(politely=False)

    run_job(tmp_path, work)
