"""All-reduce data parallelism: what several workers learn is what one process with the whole batch learns."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import adam, loss_of, mlp, parameters, seeded, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.errors import PeerError, UsageError
from paceline.observe.runs import read_run
from paceline.training.strategy import Distributed
from paceline.update.table import Scale

BATCH_SIZE = 4
TOLERANCES = {torch.float64: {"rtol": 1e-10, "atol": 1e-14}, torch.float32: {"rtol": 1e-5, "atol": 1e-6}}


def samples(num_samples: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(num_samples, 9, generator=torch.Generator().manual_seed(7), dtype=dtype)


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **options: object) -> Distributed:
    return paceline.distributed(optimizer, strategy=paceline.strategies.all_reduce(**options), model=model)


def train_on_shard(data: Tensor, make: Callable[[nn.Module], torch.optim.Optimizer], num_epochs: int) -> Tensor:
    model = mlp().to(data.dtype)
    optimizer = attach(model, make(model))
    for _ in range(num_epochs):
        for (batch,) in paceline.shard(DataLoader(TensorDataset(data), batch_size=BATCH_SIZE)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return parameters(model)


def train_on_all(
    data: Tensor, make: Callable[[nn.Module], torch.optim.Optimizer], num_epochs: int, num_workers: int
) -> Tensor:
    model = mlp().to(data.dtype)
    optimizer = make(model)
    for _ in range(num_epochs):
        for batch in data.split(BATCH_SIZE * num_workers):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
    return parameters(model)


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize(("num_workers", "dtype"), [(2, torch.float64), (4, torch.float64), (2, torch.float32)])
def test_workers_learn_what_one_process_learns(
    tmp_path: Path, make: Callable[[nn.Module], torch.optim.Optimizer], num_workers: int, dtype: torch.dtype
) -> None:
    # An uneven last round: of the last batches one is short, and some workers have none.
    data = samples(5 * BATCH_SIZE * num_workers + BATCH_SIZE + 1, dtype)
    expected = train_on_all(data, make, 2, num_workers)
    found = run_job(tmp_path, lambda _: train_on_shard(data, make, 2), workers=num_workers)
    for other in found[1:]:
        assert torch.equal(found[0], other)
    torch.testing.assert_close(found[0], expected, **TOLERANCES[dtype])


def test_a_worker_without_a_batch_takes_the_step_that_the_others_have_clipped(tmp_path: Path) -> None:
    data = samples(3 * BATCH_SIZE)  # the second round has a batch for the first worker only

    def train(batches: Iterable[Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        for batch in batches:
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
        return parameters(model)

    def work(_: Session) -> Tensor:
        model = mlp().double()
        loader = paceline.shard(DataLoader(TensorDataset(data), batch_size=BATCH_SIZE))
        return train((batch for (batch,) in loader), model, attach(model, sgd(model)))

    reference = mlp().double()
    expected = train(data.split(2 * BATCH_SIZE), reference, sgd(reference))
    first, second = run_job(tmp_path, work, workers=2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, **TOLERANCES[torch.float64])


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_fused_steps_go_on_in_other_layouts_where_a_worker_has_no_batch(
    tmp_path: Path, make: Callable[..., torch.optim.Optimizer]
) -> None:
    """They take each gradient for laid out like its parameter, as autograd leaves it."""
    data = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    options = {"lr": 0.1, "fused": True, **({"momentum": 0.9} if make is torch.optim.SGD else {})}

    def convolution() -> nn.Module:
        model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(36, 1)))
        return model.double().to(memory_format=torch.channels_last)

    def train(batches: Iterable[Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return parameters(model)

    def work(_: Session) -> Tensor:
        model = convolution()
        loader = paceline.shard(DataLoader(TensorDataset(data), batch_size=BATCH_SIZE))
        return train((batch for (batch,) in loader), model, attach(model, make(model.parameters(), **options)))

    alone = convolution()
    expected = train(data.split(2 * BATCH_SIZE), alone, make(alone.parameters(), **options))
    for found in run_job(tmp_path, work, workers=2):
        torch.testing.assert_close(found, expected, **TOLERANCES[torch.float64])


@pytest.mark.parametrize("to_none", [True, False])
def test_a_worker_without_a_batch_keeps_no_gradients_but_the_zeros_that_the_others_step(
    tmp_path: Path, to_none: bool
) -> None:
    """Gradients are dropped behind the step; those of a parameter that is frozen later are zeros where asked for."""
    data = samples(3 * BATCH_SIZE)

    def train(batches: Iterable[Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for batch in batches:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=to_none)
        next(model.parameters()).requires_grad_(False)

    def work(_: Session) -> Tensor:
        model = mlp().double()
        optimizer = attach(model, sgd(model))
        loader = paceline.shard(DataLoader(TensorDataset(data), batch_size=BATCH_SIZE))
        for _ in range(3):
            train((batch for (batch,) in loader), model, optimizer)
        return parameters(model)

    alone = mlp().double()
    optimizer = sgd(alone)
    for _ in range(3):
        train(data.split(2 * BATCH_SIZE), alone, optimizer)
    for found in run_job(tmp_path, work, workers=2):
        torch.testing.assert_close(found, parameters(alone), **TOLERANCES[torch.float64])


def test_the_face_is_that_of_every_optimizer(tmp_path: Path) -> None:
    """Schedulers, clipping of the combined gradient, accumulation, state and evaluation, as in one process."""
    data = samples(32)
    reference = mlp().double()
    plain = adam(reference)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 2, 0.5)
    for step in range(4):
        plain.zero_grad()
        loss_of(reference, data[8 * step : 8 * step + 8]).backward()
        nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
        plain.step()
        schedule.step()

    def work(worker: Session) -> dict[str, object]:
        model = mlp().double()
        if worker.rank:
            nn.init.zeros_(model[0].weight)  # what worker 0 has counts
        optimizer = attach(model, adam(model), bucket_mb=0.0005)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        names = [name for name, _ in model.named_parameters()]
        for step in range(4):
            mine = data[8 * step + 4 * worker.rank : 8 * step + 4 * worker.rank + 4]
            optimizer.zero_grad()
            with optimizer.accumulate():
                (loss_of(model, mine[:2]) / 2).backward()
            (loss_of(model, mine[2:]) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            schedule.step()
        torch.testing.assert_close(parameters(model), parameters(reference), rtol=1e-10, atol=1e-14)
        with optimizer.snapshot():
            assert not model(mine).requires_grad
        assert [name for name, _ in model.named_parameters()] == names
        assert "Distributed Adam, all-reduce" in repr(optimizer)
        state = optimizer.state_dict()
        with torch.no_grad():
            model[0].weight.add_(worker.rank)
        optimizer.load_state_dict(state)
        torch.testing.assert_close(parameters(model), parameters(reference), rtol=1e-10, atol=1e-14)
        assert worker.node.clock == 4
        return state

    first, second = run_job(tmp_path, work, workers=2)
    torch.testing.assert_close(first["state"], plain.state_dict()["state"], rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


class Branches(nn.Module):
    """Every worker uses the trunk; which branch it takes is its own affair, and one branch is never taken."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.branches = nn.ModuleList([nn.Linear(3, 1) for _ in range(3)])

    def forward(self, batch: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.trunk(batch))


@pytest.mark.parametrize("order", [1, -1])
def test_parameters_may_be_left_out_if_the_strategy_knows(tmp_path: Path, order: int) -> None:
    """Also the first one of the optimizer, in a step for which a worker has no batch."""

    def work(worker: Session) -> list[Tensor | None]:
        model = seeded(Branches).double()
        given = list(model.parameters())[::order]
        optimizer = attach(model, torch.optim.SGD(given, lr=0.1, weight_decay=0.1), unused=True)
        before = parameters(model.branches[2]).clone()
        data = TensorDataset(torch.ones(10, 3, dtype=torch.float64))  # five batches: worker 1 has one less
        for (batch,) in paceline.shard(DataLoader(data, batch_size=2)):
            optimizer.zero_grad()
            model(batch, worker.rank).sum().backward()
            optimizer.step()
        assert worker.node.clock == 3
        assert torch.equal(parameters(model.branches[2]), before)  # no gradient, so no decay either
        assert all(parameter.grad is None for parameter in model.branches[2].parameters())
        return [parameter.detach() for parameter in model.parameters()]

    first, second = run_job(tmp_path, work, workers=2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_what_cannot_be_combined_is_refused_on_every_worker(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = seeded(Branches)
        sgd_of = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError, match="give model="):
            paceline.distributed(sgd_of, strategy="all-reduce")
        with pytest.raises(UsageError, match=r"both .* and consistency='ssp:3'"):
            paceline.distributed(sgd_of, strategy="all-reduce", consistency="ssp:3", model=model)
        with pytest.raises(UsageError, match="'ring' is not known"):
            paceline.distributed(sgd_of, strategy="ring", model=model)
        with pytest.raises(UsageError, match="parameters that the model has not"):
            attach(model.trunk, sgd_of)
        sparse = nn.Embedding(3, 2, sparse=True)
        with pytest.raises(UsageError, match="makes sparse gradients"):
            attach(sparse, torch.optim.SGD(sparse.parameters(), lr=0.1))
        optimizer = attach(model, sgd_of)
        with pytest.raises(UsageError, match=r"has distributed 'model' already: give each optimizer a name"):
            paceline.distributed(sgd_of, strategy="all-reduce", model=model, name="model")
        with pytest.raises(UsageError, match="no backward has combined"):
            optimizer.step()
        model(torch.ones(2, 3), 0).sum().backward()
        with pytest.raises(UsageError, match=r"no gradient came to branches.1.weight.*unused=True"):
            optimizer.step()

    run_job(tmp_path, work, workers=2)


def test_gradients_that_are_not_finite_step_no_worker(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[Tensor, int]:
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
        for step in range(3):
            optimizer.zero_grad()
            bad = step == 1 and worker.rank == 1
            model(torch.tensor([[1.0, float("nan") if bad else 1.0]])).sum().backward()
            optimizer.step()
        return model.weight.detach(), optimizer.num_refused

    for weight, num_refused in run_job(tmp_path, work, workers=2):
        assert (weight.tolist(), num_refused) == ([[-1.0, -1.0]], 1)
    refusals = read_run(tmp_path).refusals
    assert [(refusal.server, refusal.worker) for refusal in sorted(refusals, key=lambda r: r.worker)] == [
        (-1, 0),
        (-1, 1),
    ]


@pytest.mark.parametrize(("scale", "expected"), [("samples", 7.75), ("mean", 5.5), ("sum", 11.0)])
def test_samples_weigh_in_a_mean_over_samples_alone(tmp_path: Path, scale: Scale, expected: float) -> None:
    def work(worker: Session) -> float:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(model.weight)
        plain = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = paceline.distributed(plain, strategy="all-reduce", model=model, scale=scale)
        optimizer.weigh(3 if worker.rank else 1)
        model(torch.full((1, 1), 10.0 if worker.rank else 1.0, dtype=torch.float64)).backward()
        optimizer.step()
        return -model.weight.item()

    assert run_job(tmp_path, work, workers=2) == pytest.approx([expected, expected])


def test_samples_weigh_and_buffers_are_averaged(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[Tensor, Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(1, affine=False, momentum=1.0), nn.Linear(1, 1, bias=False)).double()
        nn.init.zeros_(model[1].weight)
        optimizer = attach(model, torch.optim.SGD(model.parameters(), lr=1.0))
        optimizer.weigh(1 if worker.rank == 0 else 3)
        mine = torch.tensor([[0.0], [2.0]], dtype=torch.float64) + 10 * worker.rank
        (model(mine)[1].sum() * worker.rank).backward()  # the gradient is 0 for worker 0, 1 for worker 1
        optimizer.step(samples=1 if worker.rank == 0 else 3)
        mean = model[0].running_mean.clone()
        model(mine).sum().backward()
        with pytest.raises(UsageError, match=r"call optimizer.weigh\(5\) before"):
            optimizer.step(samples=5)
        return model[1].weight.detach(), mean

    for weight, mean in run_job(tmp_path, work, workers=2):
        torch.testing.assert_close(weight, torch.full((1, 1), -0.75, dtype=torch.float64), rtol=1e-4, atol=0)
        assert mean.item() == 6.0  # of 1 and 11


def test_a_job_beside_row_tables_and_traces_says_what_it_took(tmp_path: Path) -> None:
    """Embeddings stay on the servers under a policy of their own; each step is a clock with its time."""

    def work(worker: Session) -> int:
        rows = paceline.Embedding(10, 2, name="rows", consistency="ssp:2", update=paceline.update.SGD(lr=0.1))
        model = nn.Sequential(rows, nn.Linear(2, 1))
        dense = list(model[1].parameters())
        optimizer = attach(model, torch.optim.SGD(dense, lr=0.1))
        for step in range(3):
            optimizer.zero_grad()
            model(torch.tensor([step, worker.rank])).sum().backward()
            paceline.report(loss=float(step))
            optimizer.step()
        return worker.node.clock

    assert run_job(tmp_path, work, workers=2) == [3, 3]
    steps = [step for step in read_run(tmp_path).steps if step.worker == 0]
    assert [(step.clock, step.loss) for step in steps] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert all(0 <= step.wait_s <= step.comm_s <= step.step_s for step in steps)
    assert steps[1].comm_s > 0


def test_gradients_leave_while_backward_still_runs(tmp_path: Path) -> None:
    def work(worker: Session) -> list[int]:
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        optimizer = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), bucket_mb=0.0001)
        left: list[int] = []

        def look(_: Tensor) -> None:
            under_way = optimizer._replica._round
            left.append(0 if under_way is None else len(under_way.under_way))

        model[0].weight.register_hook(look)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
        return left

    # When backward comes to the first layer, the buckets of the last ones have been sent. In the first step torch has
    # yet to see in which order gradients come, and makes one bucket of them all.
    assert all(left[1] >= 2 for left in run_job(tmp_path, work, workers=2))


def test_a_step_after_the_session_says_that_it_is_closed(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = nn.Linear(2, 1)
        optimizer = attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        worker.close()
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(PeerError, match=r"step of 'model': this worker has left the job, as its session is closed"):
            optimizer.step()

    run_job(tmp_path, work, workers=2)


def test_the_connections_of_an_optimizer_that_was_dropped_end_with_the_session(tmp_path: Path) -> None:
    def work(worker: Session) -> weakref.ref[object]:
        model = seeded(Branches)
        optimizer = attach(model, torch.optim.SGD(model.parameters(), lr=0.1), unused=True)
        process_group = weakref.ref(optimizer._replica._group.process_group)
        del optimizer, model
        gc.collect()
        assert process_group() is not None  # else torch would wait for its threads with the interpreter's lock held
        return process_group

    process_groups = run_job(tmp_path, work, workers=2)
    gc.collect()
    assert [process_group() for process_group in process_groups] == [None, None]
