"""Two groups of two workers, each with a model in slices: they learn what one process learns from all batches."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.errors import PeerError, UsageError
from paceline.model_parallel import sharded
from paceline.training.fsdp_optimizer import ShardedOptimizer
from paceline.training.hybrid import HybridOptimizer
from paceline.training.strategy import Distributed

paceline.init()
sharded._REUSED_BYTES = 16  # pyright: ignore - so that these layers take memory as large ones do
RANK, GROUP = paceline.rank(), paceline.rank() // 2
torch.set_default_dtype(torch.float64)
OPTIMIZERS = {"bsp": HybridOptimizer, "all-reduce": ShardedOptimizer}
torch.manual_seed(1)
INPUTS = torch.randn(26, 3)
TARGETS = INPUTS.sum(1, keepdim=True).expand(-1, 2)
SAMPLES = TensorDataset(INPUTS, TARGETS)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 1, bias=False), nn.Linear(1, 2))


def distributed(model: nn.Module, between: str, name: str, **settings: object) -> Distributed:
    made = torch.optim.AdamW(model.parameters(), lr=0.05)
    strategy = f"{between}+fsdp:2"
    return paceline.distributed(made, model=model, strategy=strategy, name=f"{name}-{between}", **settings)  # pyright: ignore[reportArgumentType]


def learn(optimizer: torch.optim.Optimizer, model: nn.Module, *, alone: bool = False, epochs: int = 2) -> None:
    """Seven batches for four workers: in the last step of an epoch worker 3 has none, and worker 2 a short one."""
    loader = DataLoader(SAMPLES, batch_size=16 if alone else 4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    for _ in range(epochs):
        for inputs, targets in loader if alone else paceline.shard(loader):
            optimizer.zero_grad()
            mse_loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()


def whole_values(optimizer: Distributed, model: nn.Module) -> dict[str, Tensor]:
    with optimizer.snapshot():
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def require_equal(found: dict[str, Tensor], expected: nn.Module) -> None:
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-9, atol=1e-9, msg=name)


def learning_is_that_of_one_process_and_goes_on_from_what_was_saved() -> None:
    for between, made in OPTIMIZERS.items():
        model, expected = mlp(), mlp()
        if RANK:
            nn.init.zeros_(model[0].weight)  # pyright: ignore[reportArgumentType] - what counts is what worker 0 has
        optimizer = distributed(model, between, "learning")
        assert isinstance(optimizer, made)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        learn(optimizer, model)
        plain = torch.optim.AdamW(expected.parameters(), lr=0.05)
        learn(plain, expected, alone=True)
        values = whole_values(optimizer, model)
        require_equal(values, expected)
        paceline.barrier()
        state = optimizer.state_dict()
        for index, kept in plain.state_dict()["state"].items():
            for key, value in kept.items():
                found = state["state"][index][key].double()
                torch.testing.assert_close(found, value, rtol=1e-9, atol=1e-9)

        resumed = mlp()
        resumed.load_state_dict(values)
        again = distributed(resumed, between, "resumed")
        again.load_state_dict(with_names(state, [name for name, _ in expected.named_parameters()]))
        for one, own, alone in ((again, resumed, False), (plain, expected, True)):
            for group in one.param_groups:
                group["lr"] = 0.03
            learn(one, own, alone=alone, epochs=1)
        require_equal(whole_values(again, resumed), expected)


def with_names(state: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Return a state as `torch.distributed.checkpoint` writes it."""
    groups = [{**group, "params": [names[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"state": {names[index]: values for index, values in state["state"].items()}, "param_groups": groups}


def groups_may_be_apart_and_read_the_same_in_the_end() -> None:
    model = mlp()
    optimizer = distributed(model, "ssp:1", "apart")
    with torch.no_grad():
        first = mse_loss(mlp()(INPUTS), TARGETS)
    learn(optimizer, model, epochs=5)
    paceline.barrier()
    with optimizer.snapshot():
        last = mse_loss(model(INPUTS), TARGETS)
    assert last < first - 0.1, (first, last)
    assert len({float(one) for one in paceline.all_gather(last)}) == 1


def a_group_without_a_batch_waits_for_the_next_step() -> None:
    """Two batches for four workers: the second step of an epoch has none for the second group."""
    inputs, targets = INPUTS[:20], TARGETS[:20]
    for between in OPTIMIZERS:
        model, alone = mlp(), mlp()
        optimizer = distributed(model, between, "waits")
        for own_inputs, own_targets in paceline.shard(DataLoader(TensorDataset(inputs, targets), batch_size=4)):
            optimizer.zero_grad()
            mse_loss(model(own_inputs), own_targets).backward()
            optimizer.step()
        plain = torch.optim.AdamW(alone.parameters(), lr=0.05)
        for rows in (slice(0, 16), slice(16, 20)):
            plain.zero_grad()
            mse_loss(alone(inputs[rows]), targets[rows]).backward()
            plain.step()
        require_equal(whole_values(optimizer, model), alone)


def buffers_are_averaged_over_all() -> None:
    for between in OPTIMIZERS:
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1, momentum=None))
        with torch.no_grad():
            model[0].weight.fill_(1.0)  # pyright: ignore[reportCallIssue, reportArgumentType]
        optimizer = distributed(model, between, "buffers", scale="mean")
        model(torch.tensor([[RANK - 1.0], [RANK + 1.0]])).sum().backward()
        optimizer.step()
        mean = whole_values(optimizer, model)["1.running_mean"]
        torch.testing.assert_close(mean, torch.tensor([1.5]), rtol=1e-9, atol=1e-9)


def what_is_not_finite_is_pushed_by_no_worker_of_a_group() -> None:
    for between in OPTIMIZERS:
        model = mlp()
        optimizer = distributed(model, between, "finite")
        before = whole_values(optimizer, model)
        inputs = torch.full((2, 3), float("nan") if RANK == 3 else 1.0)
        model(inputs).sum().backward()
        optimizer.step()
        paceline.barrier()
        after = whole_values(optimizer, model)
        refused = optimizer.num_refused
        assert refused == (1 if between == "all-reduce" or GROUP == 1 else 0), (between, refused)
        is_same = all(torch.equal(after[name], value) for name, value in before.items())
        assert is_same == (between == "all-reduce"), between


def clipping_is_of_the_mean_of_all_or_of_each_group() -> None:
    inputs, targets = INPUTS[:16] * 100, TARGETS[:16]
    own = slice(4 * RANK, 4 * RANK + 4)
    for between in OPTIMIZERS:
        model, alone = mlp(), mlp()
        optimizer = distributed(model, between, "clipped")
        mse_loss(model(inputs[own]), targets[own]).backward()
        rows = slice(0, 16) if between == "all-reduce" else slice(8 * GROUP, 8 * GROUP + 8)
        mse_loss(alone(inputs[rows]), targets[rows]).backward()
        expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        found = optimizer.clip_gradients(0.1)
        assert float(found.full_tensor() if isinstance(found, DTensor) else found) == pytest.approx(float(expected))
        optimizer.step()


def mistakes_are_told() -> None:
    model = mlp()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp = paceline.strategies.fsdp
    with pytest.raises(UsageError, match="4 replicas do not divide by that: take -n 3"):
        paceline.distributed(sgd, model=model, strategy=fsdp(3), name="three")
    with pytest.raises(UsageError, match="expected how groups of workers become one model"):
        paceline.distributed(sgd, model=model, strategy="diloco:5+fsdp:2", name="diloco")
    with pytest.raises(UsageError, match=r"told overlap=True, .* under fsdp:2 each has a slice"):
        paceline.distributed(sgd, model=model, strategy=fsdp(2), overlap=True, name="overlap")
    with pytest.raises(UsageError, match="given both"):
        paceline.distributed(sgd, model=model, strategy=fsdp(2, between="bsp"), consistency="ssp:1", name="both")
    with pytest.raises(UsageError, match="take fsdp for all"):
        paceline.distributed(sgd, model=model, strategy={"*": fsdp(2)}, name="patterns")
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    optimizer = paceline.distributed(sgd, model=model, strategy=fsdp(2), consistency="asynchronous", name="told")
    assert "fsdp:2 under asynchronous" in repr(optimizer)
    with pytest.raises(UsageError, match="no backward has combined gradients"):
        optimizer.step()


def a_worker_that_dies_is_named_by_its_group() -> None:
    model = mlp()
    distributed(model, "bsp", "death")
    if RANK == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK == 2:
        with pytest.raises(PeerError, match="worker 3 is gone"):
            model(torch.ones(2, 3)).sum().backward()


for check in (
    learning_is_that_of_one_process_and_goes_on_from_what_was_saved,
    groups_may_be_apart_and_read_the_same_in_the_end,
    a_group_without_a_batch_waits_for_the_next_step,
    buffers_are_averaged_over_all,
    what_is_not_finite_is_pushed_by_no_worker_of_a_group,
    clipping_is_of_the_mean_of_all_or_of_each_group,
    mistakes_are_told,
    a_worker_that_dies_is_named_by_its_group,
):
    check()
    print("passed", check.__name__, flush=True)
