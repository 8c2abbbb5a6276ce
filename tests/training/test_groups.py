"""A policy per group of parameters: each does what it does alone, in one step and one clock."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
import torch
from tests.jobs import run_job
from tests.training.recipes import Recipe, accumulate, adam, loss_of, micro_batch, mlp, parameters, seeded, sgd
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.core.consistency import bsp
from paceline.errors import UsageError
from paceline.job.mesh import MeshShape
from paceline.model_parallel.arrangement import ModelPart
from paceline.training.groups import GroupedOptimizer, Groups
from paceline.training.parameter_server import ParameterServer
from paceline.training.strategy import Settings, Strategy

if TYPE_CHECKING:
    from paceline.data.slicing import ClockSlices

BATCH_SIZE = 4
EXACT = {"rtol": 1e-10, "atol": 1e-14}
MIXED = {"2.weight": "all-reduce", "0.*": "bsp", "*": "all-reduce"}

Make = Callable[[nn.Module], torch.optim.Optimizer]


def two_rates(model: nn.Module) -> torch.optim.Optimizer:
    """Groups that do not follow the patterns, and numbers that differ."""
    weights, biases = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases, "lr": 0.1}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True)


def samples(num_samples: int) -> Tensor:
    return torch.randn(num_samples, 9, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def train_on_all(data: Tensor, make: Make, batch_size: int) -> tuple[Tensor, torch.optim.Optimizer]:
    model = mlp().double()
    optimizer = make(model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for batch in data.split(batch_size):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        schedule.step()
    return parameters(model), optimizer


@pytest.mark.parametrize(("make", "overlap"), [(two_rates, False), (two_rates, True), (adam, False)])
def test_lockstep_groups_learn_what_one_process_learns(tmp_path: Path, make: Make, overlap: bool) -> None:
    """Under all-reduce and bsp: also where the last batches are short, and one worker has none."""
    num_workers = 3
    data = samples(4 * BATCH_SIZE * num_workers + BATCH_SIZE + 1)
    expected, plain = train_on_all(data, make, BATCH_SIZE * num_workers)

    def work(worker: Session) -> tuple[Tensor, dict[str, object]]:
        model = mlp().double()
        wrapped = make(model)
        optimizer = paceline.distributed(wrapped, strategy=MIXED, model=model, overlap=overlap)
        assert optimizer.param_groups is not wrapped.param_groups
        assert [group["params"] for group in optimizer.param_groups] == [g["params"] for g in wrapped.param_groups]
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        num_own = 0
        for (batch,) in paceline.shard(DataLoader(TensorDataset(data), batch_size=BATCH_SIZE)):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            schedule.step()
            num_own += 1
        assert (num_own, worker.node.clock) == (5 if worker.rank < 2 else 4, 5)
        optimizer.wait_for_values()
        state = optimizer.state_dict()
        worker.barrier()
        return parameters(model), state

    for found, state in run_job(tmp_path, work, workers=num_workers, servers=2):
        torch.testing.assert_close(found, expected, **EXACT)
        torch.testing.assert_close(state["state"], plain.state_dict()["state"], **EXACT)


def test_optimizers_of_two_policies_do_not_wait_for_each_other_where_one_worker_has_no_batch(tmp_path: Path) -> None:
    data = samples(5 * BATCH_SIZE)

    def work(worker: Session) -> int:
        models = {"bsp": mlp().double(), "all-reduce": mlp().double()}
        optimizers = {
            name: paceline.distributed(adam(model), strategy=name, model=model, name=name)
            for name, model in models.items()
        }
        for (batch,) in paceline.shard(DataLoader(TensorDataset(data), batch_size=BATCH_SIZE)):
            for name, model in models.items():
                optimizers[name].zero_grad()
                loss_of(model, batch).backward()
                optimizers[name].step()
        return worker.node.clock

    assert run_job(tmp_path, work, workers=2) == [6, 6]


class Shares(nn.Module):
    """Four vectors whose gradients are the input, so that what comes out does not depend on when it is applied."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("dense", "trunk", "embedding", "head"):
            setattr(self, name, nn.Linear(3, 1, bias=False))
            nn.init.zeros_(getattr(self, name).weight)

    def forward(self, batch: Tensor) -> Tensor:
        return sum(layer(batch).sum() for layer in self.children())


def test_each_group_does_what_its_policy_does_alone(tmp_path: Path) -> None:
    """Means of the workers' gradients in lockstep, their sums where each push is an update of its own."""
    num_workers, num_steps = 3, 4
    policies = {
        "dense.*": paceline.strategies.all_reduce(),
        "embedding.*": "ssp:3",
        "head.*": paceline.strategies.downpour(push_every=2, fetch_every=2),
        "*": "bsp",
    }

    def work(worker: Session) -> dict[str, float]:
        model = seeded(Shares).double()
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = paceline.distributed(sgd, strategy=policies, model=model)
        for step in range(num_steps):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(worker.rank + step), dtype=torch.float64)).backward()
            optimizer.step()
        assert worker.node.clock == num_steps
        text = repr(optimizer)
        assert all(f"{pattern}: Distributed SGD" in text for pattern in policies)
        worker.barrier()
        with optimizer.snapshot():
            assert not model(torch.ones(1, 3, dtype=torch.float64)).requires_grad
            return {name: layer.weight[0, 0].item() for name, layer in model.named_children()}

    total = sum(rank + step for rank in range(num_workers) for step in range(num_steps))
    mean, whole = -0.5 * total / num_workers, -0.5 * total
    expected = {"dense": mean, "trunk": mean, "embedding": whole, "head": whole}
    for found in run_job(tmp_path, work, workers=num_workers, servers=2):
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_head_under_local_sgd_is_merged_when_its_turn_comes(tmp_path: Path) -> None:
    def work(worker: Session) -> list[tuple[float, float]]:
        model = seeded(Shares).double()
        policies = {"head.*": "local-sgd:2", "*": "all-reduce"}
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.5), strategy=policies, model=model)
        seen: list[tuple[float, float]] = []
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.full((1, 3), float(worker.rank), dtype=torch.float64)).backward()
            optimizer.step()
            seen.append((model.head.weight[0, 0].item(), model.dense.weight[0, 0].item()))
        state = optimizer.state_dict()
        assert list(state["parts"]) == ["head.*"]
        worker.barrier()
        optimizer.load_state_dict(state)
        return seen

    first, second = run_job(tmp_path, work, workers=2)
    # Worker 0 has no gradient, worker 1 steps by 0.5; every second step both go on from the mean.
    assert [head for head, _ in first] == [0.0, -0.5, -0.5, -1.0]
    assert [head for head, _ in second] == [-0.5, -0.5, -1.0, -1.0]
    assert [dense for _, dense in first] == [dense for _, dense in second] == [-0.25, -0.5, -0.75, -1.0]


def test_a_weight_that_layers_share_is_combined_by_its_own_policy_alone(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[Tensor, Tensor]:
        alone = seeded(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))).double()
        alone[2].weight = alone[1].weight  # which torch finds under one of its names only
        model = copy.deepcopy(alone)
        policies = {"0.*": "all-reduce", "*": "local-sgd:2"}
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.5), strategy=policies, model=model)
        optimizer.zero_grad()
        for each in (model, alone):
            each(torch.full((1, 2), float(worker.rank), dtype=torch.float64)).sum().backward()
        optimizer.step()
        found, expected = model[1].weight.grad, alone[1].weight.grad
        assert found is not None
        assert expected is not None
        return found.clone(), expected

    for found, expected in run_job(tmp_path, work, workers=2):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_statistics_are_averaged_once_and_weights_hold_in_all_groups(tmp_path: Path) -> None:
    def work(worker: Session) -> tuple[float, list[float]]:
        model = nn.Sequential(nn.BatchNorm1d(1, momentum=1.0), nn.Linear(1, 1)).double()
        nn.init.zeros_(model[1].weight)
        nn.init.zeros_(model[1].bias)
        policies = {"0.*": "all-reduce", "1.weight": paceline.strategies.all_reduce(bucket_mb=1), "1.bias": "bsp"}
        optimizer = paceline.distributed(torch.optim.SGD(model.parameters(), lr=1.0), strategy=policies, model=model)
        assert isinstance(optimizer, GroupedOptimizer)
        assert set(worker.tables._opened) == {"model.1.bias", "model.1.bias.buffers"}
        weight = 1 if worker.rank == 0 else 3
        optimizer.weigh(weight)
        mine = torch.tensor([[0.0], [2.0]], dtype=torch.float64) + 10 * worker.rank
        with optimizer.accumulate():
            (model(mine)[1].sum() * worker.rank / 2).backward()
        (model(mine)[1].sum() * worker.rank / 2).backward()  # in all 0 for worker 0, and 1 for the bias of worker 1
        optimizer.step(samples=weight)
        assert optimizer.num_refused == 0
        return model[0].running_mean.item(), [-model[1].bias.item(), -model[1].weight.item()]

    for mean, steps in run_job(tmp_path, work, workers=2):
        assert mean == pytest.approx(6.0)  # of 1 and 11
        assert steps == pytest.approx([0.75, 0.75], rel=1e-4)


@pytest.mark.parametrize(
    ("policies", "alone"),
    [
        ({"0.*": paceline.strategies.all_reduce(bucket_mb=1), "*": "all-reduce"}, False),
        ({"0.*": "bsp", "*": "all-reduce"}, True),
        ({"0.*": "ssp:3", "*": "all-reduce"}, True),
        ({"0.*": "bsp", "*": "asynchronous"}, True),
    ],
)
def test_groups_are_clipped_by_one_norm_where_all_have_combined_gradients_and_else_by_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policies: dict[str, Strategy | str], alone: bool
) -> None:
    """A norm with gradients of one worker in it would part the replicas."""
    most, num_steps = 0.01, 3
    lockstep = [index for index, policy in enumerate(policies.values()) if policy not in ("ssp:3", "asynchronous")]

    def work(worker: Session) -> list[Tensor]:
        model = mlp().double()
        optimizer = paceline.distributed(sgd(model), strategy=policies, model=model)
        for step in range(num_steps):
            optimizer.zero_grad()
            loss_of(model, micro_batch(worker.rank, step, torch.float64)).backward()
            assert optimizer.clip_gradients(most) > most
            optimizer.step()
        with optimizer.snapshot():
            return [parameters(model[2 * index]) for index in lockstep]

    found, other = run_job(tmp_path, work, workers=2)
    torch.testing.assert_close(found, other, rtol=0, atol=0)
    assert capsys.readouterr().err.count("each group of parameters is clipped by its own norm") == 2 * alone
    if len(lockstep) == 1:  # the other group learns from values that differ from run to run
        return
    model = mlp().double()
    optimizer = sgd(model)
    for step in range(num_steps):
        accumulate(model, Recipe(backward=one_double_batch), 2, step)
        for clipped in (model[0], model[2]) if alone else (model,):
            nn.utils.clip_grad_norm_(clipped.parameters(), most)
        optimizer.step()
    torch.testing.assert_close(found, [parameters(model[0]), parameters(model[2])], **EXACT)


def one_double_batch(model: nn.Module, rank: int, step: int) -> None:
    loss_of(model, micro_batch(rank, step, torch.float64)).backward()


def test_a_state_goes_from_one_process_to_groups_and_back(tmp_path: Path) -> None:
    data = samples(24)
    _, plain = train_on_all(data, adam, 8)
    state = plain.state_dict()

    def work(worker: Session) -> dict[str, object]:
        model = mlp().double()
        optimizer = paceline.distributed(adam(model), strategy=MIXED, model=model)
        with pytest.raises(UsageError, match=r"parameter groups of \[1\] parameters, .* of 'model' has \[4\]"):
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
        with pytest.raises(UsageError, match=r"has 'state' and 'param_groups', this has \['state'\]"):
            optimizer.load_state_dict({"state": {}})
        with pytest.raises(UsageError, match=r"'model' has all its parameters from the start"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        with pytest.raises(UsageError, match=r"slices=\.\.\.\) does not go with"):
            optimizer.accumulate_slices(cast("ClockSlices", None))  # not looked at: a part is under all-reduce
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.005
        found = optimizer.state_dict()
        worker.barrier()
        return found

    for found in run_job(tmp_path, work, workers=2):
        assert "parts" not in found
        torch.testing.assert_close(found["state"], state["state"], rtol=0, atol=0)
        adam(mlp().double()).load_state_dict(found)


def test_patterns_that_do_not_fit_the_model_are_refused(tmp_path: Path) -> None:
    def refused(model: nn.Module, strategy: object, **settings: object) -> str:
        with pytest.raises(UsageError) as caught:
            paceline.distributed(adam(model), strategy=strategy, model=model, **settings)
        return str(caught.value)

    def work(worker: Session) -> None:
        model = mlp()
        assert refused(model, {"0.*": "bsp"}) == (
            "strategy of 'model': no pattern matches '2.weight', '2.bias': add one, or \"*\" with a strategy for "
            "the rest as the last."
        )
        assert refused(model, {"0.*": "bsp", "1.*": "ssp:3", "0.bias": "ssp:3", "*": "bsp"}) == (
            "strategy of 'model': '1.*', '0.bias' matches no parameter that an earlier pattern has not taken; "
            "parameters are '0.weight', '0.bias', '2.weight', '2.bias'."
        )
        assert refused(model, {}) == 'strategy={} maps no pattern to a strategy: give {"*": "bsp"}, for example.'
        assert "'ring' is not known" in refused(model, {"*": "ring"})
        assert "both Groups(" in refused(model, {"*": "bsp"}, consistency="ssp:3")
        assert refused(model, {"0.*": paceline.strategies.downpour(warm_start_steps=2), "*": "bsp"}).startswith(
            "strategy: '0.*' has a warm start, in which worker 0 would wait"
        )
        assert refused(model, {"*": "fsdp"}).startswith("strategy: '*' was given fsdp, which shards a model as a whole")
        how = Settings(bsp(), "mean", 1, "reject", "model", part=ModelPart(MeshShape(2, 1, 1), 0, None))
        with pytest.raises(UsageError, match="patterns are for a model that each worker holds as a whole"):
            Groups((("*", ParameterServer()),)).distribute(adam(model), model, how, worker)

    run_job(tmp_path, work)
