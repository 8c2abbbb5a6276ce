"""Workers that keep slices of a model, as the launcher says; each compares with one process that has every batch."""

from __future__ import annotations

import copy
import math
import os
import signal
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PeerError, UsageError
from paceline.model_parallel.arrangement import whole
from paceline.training.fsdp_optimizer import ShardedOptimizer
from paceline.worker.waits import About, OpenWait, Waits

ps = paceline.init()
RANK, SIZE = paceline.rank(), paceline.size()
torch.set_default_dtype(torch.float64)


def small(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, momentum=None), nn.Tanh(), nn.Linear(5, 2))


def distributed(model: nn.Module, name: str, **settings: object) -> ShardedOptimizer:
    made = paceline.distributed(torch.optim.Adam(model.parameters(), lr=0.05), model=model, name=name, **settings)  # pyright: ignore[reportArgumentType]
    assert isinstance(made, ShardedOptimizer)
    return made


def whole_values(optimizer: ShardedOptimizer, model: nn.Module) -> dict[str, Tensor]:
    with optimizer.snapshot():
        state = model.state_dict()
        assert not any(isinstance(tensor, DTensor) for tensor in (*state.values(), *model.parameters()))
        return {name: state[name].clone() for name, _ in model.named_parameters()}


def learning_is_that_of_one_process() -> None:
    """Three batches for two workers, one of them short: samples weigh the same wherever they are.

    The schedule takes a step a batch: that of worker 0 counts, which has one in every step.
    """
    samples = TensorDataset(torch.randn(11, 3), torch.randn(11, 2))
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    alone = copy.deepcopy(model)
    if RANK:
        nn.init.zeros_(model[0].weight)  # what counts is what worker 0 has
    optimizer = distributed(model, "learning")
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    slices = sum(parameter.to_local().numel() for parameter in model.parameters())  # pyright: ignore[reportAttributeAccessIssue]
    assert slices <= 0.6 * sum(map(Tensor.numel, model.parameters()))
    seen: list[tuple[Tensor, Tensor]] = []
    loader = paceline.shard(DataLoader(samples, batch_size=4))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    for _ in range(2):
        for inputs, targets in loader:
            seen.append((inputs, targets))
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()
    plain = torch.optim.Adam(alone.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(plain, 1, 0.7)
    for step in range(4):
        has = step < len(seen) if SIZE == 1 or RANK == 0 else step in (0, 2)
        at = step if RANK == 0 else step // 2
        own = seen[at] if has else (torch.zeros(0, 3), torch.zeros(0, 2))
        counts = [int(count) for count in paceline.all_gather(torch.tensor(len(own[0])))]
        room = torch.zeros(max(counts), 5)
        room[: len(own[0])] = torch.cat(own, 1)
        rows = torch.cat([part[:count] for part, count in zip(paceline.all_gather(room), counts, strict=True)])
        plain.zero_grad()
        mse_loss(alone(rows[:, :3]), rows[:, 3:]).backward()
        plain.step()
        schedule.step()
    found = whole_values(optimizer, model)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-9)
    state_is_that_of_a_plain_optimizer(optimizer, plain)


def clipped_by_norm(optimizer: torch.optim.Optimizer, model: nn.Sequential) -> None:
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert 0.1 < float(norm) < 10
    optimizer.step()


def clipped_by_value(optimizer: torch.optim.Optimizer, model: nn.Sequential) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.02)
    optimizer.step()


def clipped_by_hand(optimizer: torch.optim.Optimizer, model: nn.Sequential) -> None:
    """Layer by layer, after a look at the size of the gradient."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.abs().max().item() > 0.02:
            parameter.grad = parameter.grad / 3
    optimizer.step()


def frozen_later(optimizer: torch.optim.Optimizer, model: nn.Sequential) -> None:
    """With a gradient of zeros that stays, so that the momentum and the decay of the frozen parameter go on."""
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    model[2].weight.requires_grad_(False)


def unscaled_by_a_scaler(optimizer: torch.optim.Optimizer, model: nn.Sequential) -> None:
    del model
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def what_scripts_do_with_gradients_counts_where_a_worker_has_no_batch() -> None:
    """Three batches for two workers: in every second step worker 1 steps what worker 0 has made of the gradients."""
    torch.manual_seed(3)
    inputs, targets = torch.randn(11, 3), torch.randn(11, 2)
    for act in (clipped_by_norm, clipped_by_value, clipped_by_hand, frozen_later, unscaled_by_a_scaler):
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
        alone = copy.deepcopy(model)
        plain, sgd = (
            torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1) for one in (alone, model)
        )
        optimizer = paceline.distributed(sgd, model=model, name=act.__name__)
        for _ in range(2):
            for own, expected in paceline.shard(DataLoader(TensorDataset(inputs, targets), batch_size=4)):
                mse_loss(model(own), expected).backward()
                act(optimizer, model)
                optimizer.zero_grad(set_to_none=act is not frozen_later)
            for rows in (slice(0, 8), slice(8, 11)) if SIZE > 1 else (slice(0, 4), slice(4, 8), slice(8, 11)):
                mse_loss(alone(inputs[rows]), targets[rows]).backward()
                act(plain, alone)
                plain.zero_grad(set_to_none=act is not frozen_later)
        found = whole_values(optimizer, model)  # pyright: ignore[reportArgumentType]
        for name, parameter in alone.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-9, msg=act.__name__)


def a_worker_whose_batches_end_in_the_middle_of_a_step_keeps_its_gradients() -> None:
    """Two batches of worker 0 make a step, of which worker 1 has the first."""
    torch.manual_seed(4)
    inputs, targets = torch.randn(12, 3), torch.randn(12, 2)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    alone = copy.deepcopy(model)
    optimizer = distributed(model, "middle")
    loader = paceline.shard(DataLoader(TensorDataset(inputs, targets), batch_size=4))
    for number, (own, expected) in enumerate(loader):
        mse_loss(model(own), expected).backward()
        if number:
            optimizer.step()
    plain = torch.optim.Adam(alone.parameters(), lr=0.05)
    for rows in (slice(0, 8), slice(8, 12)):
        mse_loss(alone(inputs[rows]), targets[rows]).backward()
    plain.step()
    found = whole_values(optimizer, model)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-9)


def state_is_that_of_a_plain_optimizer(optimizer: ShardedOptimizer, plain: torch.optim.Optimizer) -> None:
    found, expected = optimizer.state_dict(), plain.state_dict()
    for index, values in expected["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(found["state"][index][key], value, rtol=1e-9, atol=1e-9)
    with_texts = {**found, "state": {str(index): values for index, values in found["state"].items()}}
    for given in (found, with_texts):
        optimizer.load_state_dict(given)
        again = optimizer.state_dict()
        assert torch.equal(again["state"][0]["exp_avg"], found["state"][0]["exp_avg"])
    local = optimizer.state[optimizer.param_groups[0]["params"][0]]["exp_avg"].to_local()
    assert local.numel() < found["state"][0]["exp_avg"].numel()


def buffers_are_averaged_and_one_worker_may_look_alone() -> None:
    model = small()
    optimizer = distributed(model, "buffers", scale="mean")
    model(torch.full((2, 3), float(RANK)) + torch.tensor([[0.0], [1.0]])).sum().backward()
    optimizer.step()
    means = paceline.all_gather(model.get_buffer("1.running_mean"))
    assert all(torch.equal(mean, means[0]) for mean in means)
    with optimizer.snapshot():
        if RANK == 0:
            for _ in range(3):
                assert model(torch.ones(4, 3)).shape == (4, 2)


def gradients_that_are_not_finite_are_refused_by_all() -> None:
    model = small()
    optimizer = distributed(model, "finite")
    before = whole_values(optimizer, model)
    model(torch.full((2, 3), float("nan") if RANK == SIZE - 1 else 1.0)).sum().backward()
    optimizer.step()
    assert optimizer.num_refused == 1
    after = whole_values(optimizer, model)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def mistakes_are_told() -> None:
    model = small()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="give model="):
        paceline.distributed(sgd, name="none")
    with pytest.raises(UsageError, match=r"lacks 1\.weight"):
        paceline.distributed(torch.optim.SGD(model[0].parameters(), lr=0.1), model=model, name="few")
    with pytest.raises(UsageError, match="has parameters that the model has not"):
        paceline.distributed(torch.optim.SGD([*model.parameters(), torch.ones(1)], lr=0.1), model=model, name="many")
    mixed = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).float())
    scaled = small()
    scaled.register_parameter("gain", nn.Parameter(torch.ones(())))
    with pytest.raises(UsageError, match=r"parameter 'gain' of Sequential has shape \(\)"):
        distributed(scaled, "scalar")
    with pytest.raises(UsageError, match=r"parameters of float\d\d and float\d\d; expected a model of one dtype"):
        paceline.distributed(torch.optim.SGD(mixed.parameters(), lr=0.1), model=mixed, name="mixed")
    hooked = small()
    hooked[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UsageError, match=r"parameter '0\.weight' has a hook on its gradient, which fsdp does not call"):
        distributed(hooked, "hooked")
    sparse = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 2))
    with pytest.raises(UsageError, match="the layer '0' makes sparse gradients"):
        distributed(sparse, "sparse")
    optimizer = distributed(model, "told")
    handle = model[0].weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UsageError, match=r"parameter '0\.weight' has a hook on its gradient, which fsdp does not call"):
        model(torch.ones(2, 3))
    handle.remove()
    with pytest.raises(UsageError, match="no backward has combined gradients"):
        optimizer.step()
    with pytest.raises(UsageError, match="at least one batch on every worker"):
        optimizer.step_without_batch()
    with pytest.raises(UsageError, match=r"one has become \(1, 2\) of \(2, 2\), as if made from this worker's slice"):
        optimizer._passes._require_whole(torch.ones(1, 2), torch.ones(2, 2))
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(UsageError, match=r"samples=7.*optimizer\.weigh\(7\)"):
        optimizer.step(samples=7)


class Shared(torch.optim.Optimizer):
    """Steps as far as the norm of the whole tensor says, as classes may that torch does not have."""

    def __init__(self, params: object, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def step(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad / parameter.grad.norm(), alpha=-group["lr"])


def gradients_are_clipped_by_their_largest_number_also_where_a_slice_is_empty() -> None:
    alone, model = (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)) for _ in range(2))
    model.load_state_dict(alone.state_dict())
    model.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)  # which stays with each worker
    optimizer = distributed(model, "largest")
    for limit in (0.1, 1000.0):
        for one, given in ((alone, torch.ones(1, 3)), (model, torch.ones(1, 3))):
            one.zero_grad()
            one(given).sum().backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), limit, math.inf)
        torch.testing.assert_close(optimizer.clip_gradients(limit, math.inf).to(expected), expected)
        for one, other in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(one.grad), other.grad)
    model.zero_grad()
    (model(torch.ones(1, 3)) * math.nan).sum().backward()
    with pytest.raises(RuntimeError, match="the gradients of 'largest' have the norm nan, so they are not clipped"):
        optimizer.clip_gradients(1.0, math.inf, error_if_nonfinite=True)


def optimizers_that_look_at_whole_tensors_are_refused() -> None:
    model = nn.Linear(4, 2, bias=False)
    for made in (torch.optim.Adafactor, torch.optim.Rprop, Shared):
        with pytest.raises(UsageError, match=f"{made.__name__} .*each worker has a slice of every parameter"):
            paceline.distributed(made(model.parameters(), lr=0.1), model=model, name=made.__name__)


def state_that_is_there_before_the_first_step_is_cut() -> None:
    model = nn.Linear(4, 2, bias=False)
    alone = copy.deepcopy(model)
    optimizers = [torch.optim.Adagrad(one.parameters(), initial_accumulator_value=0.5) for one in (model, alone)]
    optimizer = paceline.distributed(optimizers[0], model=model, name="early")
    assert optimizer.state_dict()["state"][0]["sum"].shape == (2, 4)
    optimizer.load_state_dict(optimizers[1].state_dict())
    for one, stepping in ((model, optimizer), (alone, optimizers[1])):
        one(torch.ones(1, 4)).square().sum().backward()
        stepping.step()
    torch.testing.assert_close(whole_values(optimizer, model)["weight"], alone.weight.detach(), rtol=1e-9, atol=1e-9)  # pyright: ignore[reportArgumentType]


def a_worker_that_runs_the_model_more_often_is_told() -> None:
    model = small()
    optimizer = distributed(model, "often")
    model(torch.ones(2, 3)).sum().backward()
    if RANK == 0:
        with pytest.raises(UsageError, match="expected a forward of every worker, got a step from worker 1"):
            model(torch.ones(2, 3))
    else:
        with pytest.raises(UsageError, match="expected a step of every worker, got a forward from worker 0"):
            optimizer.step()


def a_worker_that_alone_evaluates_is_told() -> None:
    model = small()
    optimizer = distributed(model, "evaluation")
    with torch.no_grad():
        model(torch.ones(2, 3))  # together
    with optimizer.snapshot():
        for _ in range(RANK):
            model(torch.ones(2, 3))
    expected = r"inside of `with optimizer.snapshot\(\):`, which all enter and where one may evaluate alone"
    if RANK == 0:
        with (
            pytest.raises(UsageError, match=f"a forward without gradients of every worker, got a forward.*{expected}"),
            torch.no_grad(),
        ):
            model(torch.ones(2, 3))
    else:
        with pytest.raises(UsageError, match=f"a forward of every worker, got a forward without.*{expected}"):
            model(torch.ones(2, 3))


def a_worker_that_alone_enters_a_snapshot_is_told() -> None:
    model = small()
    optimizer = distributed(model, "alone")
    expected = r"Every worker has to call optimizer.snapshot\(\): leave no such call to `if paceline.rank\(\) == 0:`"
    if RANK == 0:
        with (
            pytest.raises(UsageError, match=f"expected a snapshot of every worker, got a forward.*{expected}"),
            optimizer.snapshot(),
        ):
            pass
    else:
        with pytest.raises(UsageError, match=f"expected a forward of every worker, got a snapshot.*{expected}"):
            model(torch.ones(2, 3))


class Scaled(nn.Module):
    """A parameter of its own, and layers that are gathered one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(4))
        self.layers_ = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        passed = inputs * self.scales
        for layer in self.layers_:
            passed = layer(passed).tanh()
        return passed


def the_common_face_takes_slices_in_single_precision() -> None:
    whole = Scaled().float()
    alone = copy.deepcopy(whole)
    model = paceline.parallelize(whole, loss=mse_loss)
    optimizers = (torch.optim.AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(alone.parameters(), lr=0.01))
    optimizer = paceline.distributed(optimizers[0], model=model, name="face")
    inputs, targets = torch.randn(2 * SIZE, 4).float(), torch.randn(2 * SIZE, 4).float()
    own = slice(2 * RANK, 2 * RANK + 2)
    for _ in range(3):
        optimizer.zero_grad()
        optimizers[1].zero_grad()
        model.forward_backward(inputs[own], targets[own])
        mse_loss(alone(inputs), targets).backward()
        assert model.clip_gradients(0.1) == pytest.approx(
            nn.utils.clip_grad_norm_(alone.parameters(), 0.1).item(), 1e-5
        )
        optimizer.step()
        optimizers[1].step()
    state = model.whole_state_dict()
    assert state is not None
    assert list(state) == list(alone.state_dict())
    for name, expected in alone.state_dict().items():
        torch.testing.assert_close(state[name], expected, rtol=1e-5, atol=1e-5)


def a_wait_is_for_all_other_workers() -> None:
    """What a worker reports while it waits names all that it waits for, so that a deadlock is seen as one."""
    model, during, found = small(), Waits.during, set[tuple[int, ...]]()
    optimizer = distributed(model, "waits")

    def noted(waits: Waits, what: str, about: About, *rest: Any) -> AbstractContextManager[OpenWait]:
        found.add(about.workers)
        return during(waits, what, about, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Waits, "during", noted)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        optimizer.state_dict()
        whole_values(optimizer, model)
    assert found == {tuple(range(SIZE))}


def a_worker_that_dies_is_named() -> None:
    model = small()
    distributed(model, "death")
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerError, match="forward and backward of 'death': worker 1 is gone"):
        model(torch.ones(2, 3)).sum().backward()


for check in (
    the_common_face_takes_slices_in_single_precision,
    learning_is_that_of_one_process,
    what_scripts_do_with_gradients_counts_where_a_worker_has_no_batch,
    a_worker_whose_batches_end_in_the_middle_of_a_step_keeps_its_gradients,
    buffers_are_averaged_and_one_worker_may_look_alone,
    gradients_that_are_not_finite_are_refused_by_all,
    mistakes_are_told,
    gradients_are_clipped_by_their_largest_number_also_where_a_slice_is_empty,
    optimizers_that_look_at_whole_tensors_are_refused,
    state_that_is_there_before_the_first_step_is_cut,
    a_worker_that_runs_the_model_more_often_is_told,
    a_worker_that_alone_evaluates_is_told,
    a_worker_that_alone_enters_a_snapshot_is_told,
    a_wait_is_for_all_other_workers,
    a_worker_that_dies_is_named,
):
    torch.manual_seed(0)
    check()
    print("passed", check.__name__, flush=True)
