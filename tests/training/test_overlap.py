"""Communication behind computation changes when things travel, and not one bit of what comes out."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import CARRIERS, DEADLINE_S, run_job
from tests.training.recipes import (
    Recipe,
    adam,
    loss_of,
    micro_batch,
    mlp,
    one_batch,
    parameters,
    seeded,
    sgd,
    train_alone,
)
from tests.training.views import aligned
from torch import Tensor, nn
from torch.nn import functional

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError
from paceline.training.parameter_server import DistributedOptimizer, bucket_ranges


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the little models of these tests have several buckets."""
    monkeypatch.setattr("paceline.training.parameter_server.BUCKET_BYTES", 64)


def distribute(recipe: Recipe, *, with_model: bool = True, **settings: Any) -> tuple[nn.Module, DistributedOptimizer]:
    model = recipe.model()
    settings = {"overlap": True, "model": model if with_model else None, **settings}
    return model, paceline.distributed(recipe.optimizer(model), **settings)


def train(worker: Session, recipe: Recipe, **settings: Any) -> Tensor:
    model, optimizer = distribute(recipe, **settings)
    after_step = recipe.schedule(optimizer)
    assert len(optimizer._buckets) > 1
    for step in range(recipe.num_steps):
        optimizer.zero_grad()
        recipe.backward(model, worker.rank, step)
        optimizer.step()
        after_step(step)
    optimizer.wait_for_values()
    return parameters(model)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_bits_are_those_of_one_process(
    tmp_path: Path, carrier: str, with_model: bool, optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    recipe = Recipe(optimizer=optimizer)
    expected = train_alone(recipe, 2)[0]
    for found in run_job(
        tmp_path, lambda ps: train(ps, recipe, with_model=with_model), workers=2, servers=2, carrier=carrier
    ):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("consistency", ["ssp:2", "essp:2", "asynchronous", "backup:1"])
def test_every_policy_trains(tmp_path: Path, consistency: str) -> None:
    def work(ps: Session) -> float:
        torch.manual_seed(ps.rank)
        recipe = Recipe(num_steps=60)
        start = recipe.model()
        before = loss_of(start, micro_batch(0, 0)).item()
        model, optimizer = distribute(recipe, consistency=consistency)
        for step in range(recipe.num_steps):
            optimizer.zero_grad()
            loss_of(model, micro_batch(ps.rank, step % 5)).backward()
            optimizer.step()
        optimizer.wait_for_values()
        return loss_of(model, micro_batch(0, 0)).item() / before

    assert all(ratio < 0.9 for ratio in run_job(tmp_path, work, workers=2, carrier="shm"))


class _Watch(torch.autograd.Function):
    """Calls when backward comes here."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return gradient, None


class _Between(nn.Module):
    """Calls something between two layers, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.in_forward: Callable[[], None] = lambda: None
        self.in_backward: Callable[[], None] = lambda: None

    def forward(self, hidden: Tensor) -> Tensor:
        self.in_forward()
        return _Watch.apply(hidden, self.in_backward)


def test_gradients_leave_before_backward_ends_and_values_are_waited_for_where_they_are_used(tmp_path: Path) -> None:
    def work(ps: Session) -> tuple[set[str], set[str]]:
        model = seeded(lambda: nn.Sequential(nn.Linear(9, 17), _Between(), nn.Linear(17, 3)))
        between = model[1]
        assert isinstance(between, _Between)
        optimizer = paceline.distributed(sgd(model), overlap=True, model=model)
        sent: set[str] = set()
        awaited: set[str] = set()
        between.in_backward = lambda: sent.update(b.table.name for b in optimizer._buckets if b._sent)
        between.in_forward = lambda: awaited.update(b.table.name for b in optimizer._buckets if b._requested)
        for step in range(2):
            optimizer.zero_grad()
            one_batch(model, ps.rank, step)
            optimizer.step()
        return sent, awaited

    for sent, awaited in run_job(tmp_path, work, workers=2, carrier="tcp"):
        assert sent == {"model.2"}, "the second layer's gradients (its bias joined its weight) are sent by then"
        assert awaited == {"model.2"}


class _Borrowing(nn.Module):
    """Uses the parameters of its children without running these, as attention does with its projection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(9, 17), nn.Linear(17, 3)

    def forward(self, batch: Tensor) -> Tensor:
        hidden = functional.linear(batch, self.first.weight, self.first.bias)
        return functional.linear(hidden.tanh(), self.second.weight, self.second.bias)


@pytest.mark.parametrize("carrier", CARRIERS)
def test_parameters_that_others_than_their_module_use_are_up_to_date(tmp_path: Path, carrier: str) -> None:
    recipe = Recipe(model=lambda: seeded(lambda: nn.Sequential(_Borrowing(), nn.Tanh())))
    expected = train_alone(recipe, 2)[0]
    for found in run_job(tmp_path, lambda ps: train(ps, recipe), workers=2, carrier=carrier):
        assert torch.equal(found, expected)


def test_a_bucket_waits_for_all_its_gradients_in_every_step(tmp_path: Path) -> None:
    def layers() -> nn.Module:  # the first two weights share a bucket
        return seeded(lambda: nn.Sequential(nn.Linear(9, 1, bias=False), nn.Linear(9, 3), nn.Linear(3, 99)))

    def backward(model: nn.Module, rank: int, step: int) -> None:
        assert isinstance(model, nn.Sequential)
        batch = micro_batch(rank, step)
        if step % 2 == 0:  # backward comes to the first weight only
            model[0](batch).square().mean().backward()
        else:  # it comes to the second one first
            model[1](batch + model[0](batch)).square().mean().backward()

    recipe = Recipe(model=layers, backward=backward)
    expected = train_alone(recipe, 2)[0]
    for found in run_job(tmp_path, lambda ps: train(ps, recipe), workers=2):
        assert torch.equal(found, expected)


def test_gradients_that_are_accumulated_are_sent_once(tmp_path: Path) -> None:
    def backward(model: nn.Module, rank: int, step: int) -> None:
        for part in range(3):
            loss_of(model, micro_batch(rank, 3 * step + part)).backward()

    def work(ps: Session) -> Tensor:
        recipe = Recipe(backward=backward)
        model, optimizer = distribute(recipe)
        for step in range(recipe.num_steps):
            optimizer.zero_grad()
            with optimizer.accumulate():
                with optimizer.accumulate():
                    loss_of(model, micro_batch(ps.rank, 3 * step)).backward()
                loss_of(model, micro_batch(ps.rank, 3 * step + 1)).backward()
            loss_of(model, micro_batch(ps.rank, 3 * step + 2)).backward()
            optimizer.step()
        optimizer.wait_for_values()
        return parameters(model)

    expected = train_alone(Recipe(backward=backward), 2)[0]
    for found in run_job(tmp_path, work, workers=2, carrier="shm"):
        assert torch.equal(found, expected)


def zero_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)


def fill_past_autograd(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.fill_(7.0)
    optimizer.zero_grad()


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("write", [zero_in_place, fill_past_autograd])
def test_gradients_may_be_written_to_while_their_push_is_under_way(
    tmp_path: Path, carrier: str, write: Callable[[nn.Module, torch.optim.Optimizer], None]
) -> None:
    recipe = Recipe(optimizer=sgd, num_steps=4)
    written = [threading.Event() for _ in range(recipe.num_steps)]

    def work(ps: Session) -> Tensor:
        model, optimizer = distribute(recipe, views=False)  # views would have `step` wait
        for step in range(recipe.num_steps):
            one_batch(model, ps.rank, step)
            if ps.rank == 1:  # no push is applied before
                assert written[step].wait(DEADLINE_S)
            optimizer.step()
            write(model, optimizer)
            written[step].set()
        optimizer.wait_for_values()
        return parameters(model)

    expected = train_alone(recipe, 2)[0]
    for found in run_job(tmp_path, work, workers=2, servers=2, carrier=carrier):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize(("make", "with_model"), [(mlp, True), (aligned, True), (mlp, False)])
def test_between_step_and_forward_all_parameters_are_of_one_clock(
    tmp_path: Path, carrier: str, make: Callable[[], nn.Module], with_model: bool
) -> None:
    def work(ps: Session) -> list[Tensor]:
        model, optimizer = distribute(Recipe(model=make), with_model=with_model)
        seen = [parameters(model)]
        for step in range(3):
            optimizer.zero_grad()
            one_batch(model, ps.rank, step)
            optimizer.step()
            seen.append(parameters(model))
        return seen

    states = [train_alone(Recipe(model=make, num_steps=number), 2)[0] for number in range(4)]
    is_viewing = carrier == "shm"  # of either model, at least the first weight
    late = 0 if is_viewing or not with_model else 1
    for seen in run_job(tmp_path, work, workers=2, carrier=carrier):
        for step, found in enumerate(seen):
            assert torch.equal(found, states[max(0, step - late)]), step


def test_all_values_arrive_in_the_step_where_a_parameter_is_not_of_the_model(tmp_path: Path) -> None:
    def work(ps: Session) -> bool:
        model, scale = mlp(), nn.Parameter(torch.ones(1))
        plain = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        optimizer = paceline.distributed(plain, overlap=True, model=model)
        (loss_of(model, micro_batch(ps.rank, 0)) * scale.sum()).backward()
        optimizer.step()
        return any(bucket._requested for bucket in optimizer._buckets)

    assert run_job(tmp_path, work, carrier="tcp") == [False]


def test_before_the_first_forward_parameters_are_those_of_worker_0(tmp_path: Path) -> None:
    def work(ps: Session) -> Tensor:
        model = mlp()
        with torch.no_grad():
            model[0].weight.fill_(ps.rank)
        paceline.distributed(sgd(model), overlap=True, model=model)
        return model[0].weight.detach().clone()

    assert all(not found.any() for found in run_job(tmp_path, work, workers=2))


def backward_twice(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    one_batch(model, 0, 0)
    one_batch(model, 0, 1)


def clip_after_backward(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    one_batch(model, 0, 0)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    optimizer.step()


def replace_after_backward(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    one_batch(model, 0, 0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad * 0.5
    optimizer.step()


def drop_after_backward(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    one_batch(model, 0, 0)
    model[2].bias.grad = None
    optimizer.step()


def clip_past_autograd(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    one_batch(model, 0, 0)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.data.clamp_(-1e-3, 1e-3)
    optimizer.step()


def weigh_after_backward(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    one_batch(model, 0, 0)
    optimizer.step(samples=5)


def change_the_rate_after_backward(model: nn.Module, optimizer: DistributedOptimizer) -> None:
    one_batch(model, 0, 0)
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (backward_twice, "backward ran again after the gradients of 'model.* had been sent"),
        (clip_after_backward, "the gradient of '[02].(weight|bias)' has changed since the gradients of 'model.*"),
        (replace_after_backward, "the gradient of '[02].(weight|bias)' has changed"),
        (drop_after_backward, "the gradient of '2.bias' has changed"),
        (clip_past_autograd, "the gradient of '[02].(weight|bias)' has changed"),
        (
            weigh_after_backward,
            r"the number of samples has changed .* ran: have paceline.shard\(loader\) .*, or leave out",
        ),
        (change_the_rate_after_backward, "hyperparameters have changed"),
    ],
)
def test_what_comes_too_late_is_refused(
    tmp_path: Path, act: Callable[[nn.Module, DistributedOptimizer], None], message: str
) -> None:
    def work(ps: Session) -> None:
        model, optimizer = distribute(Recipe())
        with pytest.raises(UsageError, match=message):
            act(model, optimizer)
        ps.close(politely=False)

    run_job(tmp_path, work)


def test_a_part_that_does_not_run_is_left_alone(tmp_path: Path) -> None:
    def work(ps: Session) -> tuple[Tensor, Tensor]:
        model = seeded(lambda: nn.ModuleList([nn.Linear(9, 3), nn.Linear(9, 3)]))
        before = parameters(model)
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), overlap=True, model=model)
        for step in range(4):
            optimizer.zero_grad()
            model[0](micro_batch(ps.rank, step)).square().mean().backward()
            optimizer.step()
        optimizer.wait_for_values()
        return parameters(model), before

    for after, before in run_job(tmp_path, work, workers=2, carrier="tcp"):
        assert torch.equal(after[30:], before[30:])
        assert not torch.equal(after[:30], before[:30])


def test_evaluation_saving_and_leaving_see_the_newest_values(tmp_path: Path) -> None:
    def work(ps: Session) -> list[Tensor]:
        model, optimizer = distribute(Recipe())
        seen: list[Tensor] = []
        for step in range(3):
            optimizer.zero_grad()
            one_batch(model, ps.rank, step)
            optimizer.step()
            with optimizer.snapshot():
                seen.append(parameters(model))
        saved = model.state_dict()
        seen.append(torch.cat([tensor.reshape(-1) for tensor in saved.values()]))
        ps.close()
        seen.append(parameters(model))
        return seen

    steps = [train_alone(Recipe(num_steps=number), 2)[0] for number in (1, 2, 3)]
    for found in run_job(tmp_path, work, workers=2, carrier="tcp"):
        for values, expected in zip(found, [*steps, steps[-1], steps[-1]], strict=True):
            assert torch.equal(values, expected)


def test_the_state_is_that_of_a_plain_optimizer(tmp_path: Path) -> None:
    def work(ps: Session) -> dict[str, Any]:
        recipe = Recipe(num_steps=5)
        model, optimizer = distribute(recipe)
        for step in range(recipe.num_steps):
            optimizer.zero_grad()
            one_batch(model, ps.rank, step)
            optimizer.step()
        ps.barrier()
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        ps.barrier()
        again = optimizer.state_dict()
        assert all(
            torch.equal(values, again["state"][index][name])
            for index, named in state["state"].items()
            for name, values in named.items()
        )
        return state

    model = mlp()
    for state in run_job(tmp_path, work, workers=2, servers=2, carrier="shm"):
        plain = torch.optim.Adam(model.parameters(), lr=0.01)
        plain.load_state_dict(state)
        expected = train_alone(Recipe(num_steps=5), 2)[1].state_dict()["state"]
        for index, named in expected.items():
            for name, values in named.items():
                assert torch.equal(plain.state_dict()["state"][index][name], values), (index, name)


def test_after_close_a_model_runs_backward_as_a_plain_one(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        model, optimizer = distribute(Recipe())
        one_batch(model, ps.rank, 0)
        optimizer.step()
        optimizer.zero_grad()
        ps.close()
        one_batch(model, ps.rank, 1)
        assert all(parameter.grad is not None for parameter in model.parameters())

    run_job(tmp_path, work, workers=1, carrier="shm")


@pytest.mark.parametrize("sizes", [[1], [3, 1, 5, 2], [16, 16], [1, 1, 1], [20, 1]])
def test_runs_cover_everything_once_and_are_large_enough(sizes: list[int]) -> None:
    runs = bucket_ranges([torch.zeros(size) for size in sizes], 16)
    assert [index for run in runs for index in run] == list(range(len(sizes)))
    assert len(runs) == 1 or all(4 * sum(sizes[index] for index in run) >= 16 for run in runs)


def test_parameters_change_with_the_step_of_their_own_optimizer(tmp_path: Path) -> None:
    """One backward for two models sends the gradients of both: the first step finishes the clock of those, too."""

    def work(_: Session) -> Tensor:
        made = [distribute(Recipe(aligned, sgd), name=name) for name in ("first", "second")]
        inputs = torch.ones(4, 9)
        for _step in range(3):
            for _model, optimizer in made:
                optimizer.zero_grad()
            (made[0][0](inputs) - made[1][0](inputs) + 1).square().mean().backward()
            before = parameters(made[1][0])
            made[0][1].step()
            paceline.barrier()  # every push of that clock is applied
            assert torch.equal(parameters(made[1][0]), before)
            made[1][1].step()
        with made[1][1].snapshot():
            return parameters(made[1][0])

    found = run_job(tmp_path, work, workers=2, carrier="shm")
    assert torch.equal(*found)
