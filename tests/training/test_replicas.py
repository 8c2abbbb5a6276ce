"""Replicas under all-reduce are equal to the bit whatever a script does to one of them, or it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import adam, loss_of, mlp, parameters, seeded, sgd
from tests.training.test_all_reduce import samples
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.errors import PeerError, UsageError
from paceline.training.collective_optimizer import AgreedHyperparameters, digest_of_values
from paceline.training.strategy import Distributed

CLOSE = {"rtol": 1e-10, "atol": 1e-14}


def attach(model: nn.Module, optimizer: torch.optim.Optimizer, **settings: object) -> Distributed:
    return paceline.distributed(optimizer, strategy="all-reduce", model=model, **settings)  # pyright: ignore[reportArgumentType]


def step(optimizer: torch.optim.Optimizer, model: nn.Module, batch: Tensor) -> None:
    optimizer.zero_grad()
    loss_of(model, batch).backward()
    optimizer.step()


def refused(tmp_path: Path, work: Callable[[Session], object], message: str) -> None:
    """Check that all of two workers are told; one may hear of the other's end first."""

    def try_it(worker: Session) -> None:
        with pytest.raises((UsageError, PeerError)) as error:
            work(worker)
        found.append(str(error.value))

    found: list[str] = []
    run_job(tmp_path, try_it, workers=2)
    assert len(found) == 2
    assert any(message in one for one in found), found


@pytest.mark.parametrize("strategy", ["all-reduce", "bsp", {"0.*": "all-reduce", "*": "bsp"}], ids=str)
def test_a_schedule_of_batches_that_do_not_divide_is_that_of_the_worker_which_has_them(
    tmp_path: Path, strategy: str
) -> None:
    data = samples(5 * 4)

    def work(worker: Session) -> Tensor:
        model = mlp().double()
        optimizer = paceline.distributed(adam(model), strategy=strategy, model=model)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        for _ in range(3):
            for (batch,) in paceline.shard(DataLoader(TensorDataset(data), batch_size=4)):
                step(optimizer, model, batch)
                schedule.step()
        assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0]  # a worker's own numbers stay its own
        with optimizer.snapshot():
            return parameters(model)

    model = mlp().double()
    plain = adam(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(plain, 9)
    for _ in range(3):
        for batch in data.split(8):
            step(plain, model, batch)
            schedule.step()
    first, second = run_job(tmp_path, work, workers=2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, parameters(model), **CLOSE)


def test_a_rate_may_be_a_tensor_and_may_change_after_backward(tmp_path: Path) -> None:
    def work(worker: Session) -> Tensor:
        model = mlp().double()
        optimizer = attach(model, torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5), foreach=False))
        for turn in range(2):
            optimizer.zero_grad()
            loss_of(model, samples(8)[4 * worker.rank :][:4]).backward()
            optimizer.param_groups[0]["lr"].fill_(0.01 * (turn + 1) + worker.rank)
            optimizer.step()
        assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.02 + worker.rank)
        return parameters(model)

    model = mlp().double()
    for turn, plain in enumerate([adam(model)] * 2):
        plain.param_groups[0]["lr"] = 0.01 * (turn + 1)
        step(plain, model, samples(8))
    for found in run_job(tmp_path, work, workers=2):
        torch.testing.assert_close(found, parameters(model), rtol=1e-6, atol=1e-8)  # the rate is in single precision


@pytest.mark.parametrize("accumulated", [False, True])
def test_parameters_may_be_frozen_and_thawed_while_they_are_trained(tmp_path: Path, accumulated: bool) -> None:
    data = samples(8 * 8)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, part: Callable[[Tensor], Tensor]) -> Tensor:
        model[0].requires_grad_(False)
        optimizer = attach(model, optimizer) if part is not whole else optimizer
        for turn, batch in enumerate(data.split(8)):
            model[0].requires_grad_(turn not in (0, 1, 4))
            model[2].bias.requires_grad_(turn not in (3, 4))
            optimizer.zero_grad()
            first, second = part(batch).chunk(2)
            if accumulated and part is not whole:
                with optimizer.accumulate():
                    loss_of(model, first).div(2).backward()
            else:
                loss_of(model, first).div(2).backward()
            loss_of(model, second).div(2).backward()
            optimizer.step()
        return parameters(model)

    def whole(batch: Tensor) -> Tensor:
        return batch

    def work(worker: Session) -> Tensor:
        model = mlp().double()
        return train(model, sgd(model), lambda batch: batch[2 * worker.rank + torch.tensor([0, 1, 4, 5])])

    model = mlp().double()
    expected = train(model, sgd(model), whole)
    first, second = run_job(tmp_path, work, workers=2)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, expected, **CLOSE)


def test_workers_that_train_other_parameters_than_each_other_are_told(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = mlp().double()
        optimizer = attach(model, sgd(model))
        model[2 * worker.rank].requires_grad_(False)
        step(optimizer, model, samples(4))

    refused(tmp_path, work, "workers train other parameters than each other")


def test_one_worker_alone_that_trains_others_is_told(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = mlp().double()
        optimizer = attach(model, sgd(model))
        model[0].requires_grad_(worker.rank == 0)
        step(optimizer, model, samples(4))

    refused(tmp_path, work, "forward of an all-reduced model after requires_grad has changed")


def test_none_that_is_trained_is_told(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = mlp().double()
        optimizer = attach(model, sgd(model))
        model.requires_grad_(False)
        with pytest.raises(UsageError, match=r"requires a gradient any more. Leave one unfrozen; where"):
            step(optimizer, model, samples(4))

    run_job(tmp_path, work, workers=2)


def test_a_loss_passes_through_a_model_whose_gradients_it_does_not_combine(tmp_path: Path) -> None:
    """As in adversarial training, with an optimizer for each model and batches that do not divide by the workers."""

    def work(_: Session) -> Tensor:
        made, judging = mlp().double(), seeded(lambda: nn.Linear(3, 1)).double()
        first, second = (paceline.distributed(sgd(one), model=one, strategy="all-reduce") for one in (made, judging))
        for (batch,) in paceline.shard(DataLoader(TensorDataset(samples(20)), batch_size=4)):
            second.zero_grad()
            (judging(batch[:, :3]) - judging(made(batch).detach())).square().mean().backward()
            second.step()
            with second.accumulate():
                first.zero_grad()
                judging(made(batch)).mean().backward()
            first.step()
        return torch.cat([parameters(made), parameters(judging)])

    one, other = run_job(tmp_path, work, workers=2)

    assert torch.equal(one, other)


def test_a_backward_that_combines_nothing_is_told_at_the_step(tmp_path: Path) -> None:
    """A second one of the same forward, one of a part of the model, and one that is accumulated last."""

    def twice(model: nn.Module, _: Distributed) -> None:
        loss = loss_of(model, samples(4))
        loss.backward(retain_graph=True)
        loss.backward()

    def part(model: nn.Module, _: Distributed) -> None:
        loss_of(model, samples(4)).backward()
        model[0](samples(4)).sum().backward()

    def last(model: nn.Module, optimizer: Distributed) -> None:
        loss_of(model, samples(4)).backward()
        with optimizer.accumulate():
            loss_of(model, samples(4)).backward()

    def work(worker: Session) -> None:
        for name, backward in (("twice", twice), ("part", part), ("last", last)):
            model = mlp().double()
            optimizer = paceline.distributed(sgd(model), strategy="all-reduce", model=model, name=name)
            backward(model, optimizer)
            with pytest.raises(UsageError, match=r"combined nothing has added to the gradient of 0\.weight"):
                optimizer.step()
            step(optimizer, model, samples(4))  # dropped, they are forgotten

    run_job(tmp_path, work, workers=2)


@pytest.mark.parametrize("scale", ["samples", "mean", "sum"])
def test_gradients_of_several_backwards_add_up_or_are_refused(tmp_path: Path, scale: str) -> None:
    data = samples(3 * 8)

    def work(worker: Session) -> tuple[Tensor, Tensor]:
        def accumulated(optimizer: Distributed, model: nn.Module, *, inside: bool) -> None:
            optimizer.zero_grad()
            for number, batch in enumerate(data.split(8)):
                mine = batch[4 * worker.rank :][:4]
                if inside and number < 2:
                    with optimizer.accumulate():
                        loss_of(model, mine).backward()
                else:
                    loss_of(model, mine).backward()
            optimizer.step()

        model, other = mlp().double(), mlp().double()
        accumulated(attach(model, sgd(model), scale=scale), model, inside=True)
        optimizer = paceline.distributed(sgd(other), strategy="all-reduce", model=other, scale=scale, name="other")  # pyright: ignore[reportArgumentType]
        if scale == "sum":
            with pytest.raises(UsageError, match=r"is the sum over all workers already.*accumulate"):
                accumulated(optimizer, other, inside=False)
            return parameters(model), parameters(model)
        accumulated(optimizer, other, inside=False)
        return parameters(model), parameters(other)

    model = mlp().double()
    plain = sgd(model)
    for batch in data.split(4):
        loss_of(model, batch).div(1 if scale == "sum" else 2).backward()
    plain.step()
    for inside, outside in run_job(tmp_path, work, workers=2):
        torch.testing.assert_close(inside, parameters(model), **CLOSE)
        torch.testing.assert_close(outside, parameters(model), **CLOSE)


def test_two_losses_of_one_batch_weigh_the_same(tmp_path: Path) -> None:
    data = samples(6)

    def work(worker: Session) -> Tensor:
        model = mlp().double()
        optimizer = attach(model, sgd(model))
        for (batch,) in paceline.shard(DataLoader(TensorDataset(data), batch_size=4)):  # 4 samples and 2
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            model(batch).square().mean().backward()
            optimizer.step()
        return parameters(model)

    model = mlp().double()
    plain = sgd(model)
    (loss_of(model, data) + model(data).square().mean()).backward()
    plain.step()
    for found in run_job(tmp_path, work, workers=2):
        torch.testing.assert_close(found, parameters(model), **CLOSE)


@pytest.mark.parametrize(("changed", "told"), [(1, 8), (50, 64), (70, 100)])
def test_replicas_that_are_not_equal_are_told_early_and_every_hundred_steps(
    tmp_path: Path, changed: int, told: int
) -> None:
    def work(worker: Session) -> int:
        model = nn.Linear(9, 3, bias=False).double()
        optimizer = attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
        for turn in range(101):
            if turn == changed and worker.rank == 1:
                with torch.no_grad():
                    model.weight[0, 0] = model.weight[0, 0] * (1 + 2.0**-52)
            if turn == told:
                with pytest.raises(UsageError, match=f"parameters are not those of worker {1 - worker.rank}"):
                    step(optimizer, model, samples(2))
                return turn
            step(optimizer, model, samples(2))
        return -1

    assert run_job(tmp_path, work, workers=2) == [told, told]


def test_batches_that_several_workers_do_not_have_in_a_step_of_several_are_told(tmp_path: Path) -> None:
    data = samples(5 * 4)

    def work(worker: Session) -> None:
        model = mlp().double()
        optimizer = attach(model, sgd(model))
        loader = paceline.shard(DataLoader(TensorDataset(data), batch_size=4))  # three batches and two
        for _ in range(2):
            for number, (batch,) in enumerate(loader):
                loss_of(model, batch).backward()
                if number % 2:
                    optimizer.step()

    refused(tmp_path, work, "All workers must make the same calls in the same order")


def test_numbers_are_those_of_the_class_and_a_digest_sees_every_bit() -> None:
    weight = nn.Parameter(torch.arange(7.0))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    numbers = AgreedHyperparameters(optimizer)
    before = optimizer.param_groups[0]["betas"]
    with numbers.held(numbers.encoded().replace(b"0.999", b"0.25")):
        assert optimizer.param_groups[0]["betas"] == (0.9, 0.25)
    assert optimizer.param_groups[0]["betas"] == before
    assert "initial_lr" not in numbers.now()[0]

    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.complex64):
        values = torch.arange(7.0).to(dtype)
        for index in range(values.nbytes):
            other = values.clone()
            other.view(torch.uint8)[index] += 1
            assert digest_of_values([other]) != digest_of_values([values])
    assert digest_of_values([values[1:]]) == digest_of_values([values[1:].clone()])
