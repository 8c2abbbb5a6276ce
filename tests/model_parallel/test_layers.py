"""Where layers are cut, and what a script may ask for: checked without any other process."""

from __future__ import annotations

import math
from itertools import combinations
from pathlib import Path

import pytest
import torch
from tests.jobs import run_job
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError
from paceline.job.mesh import MeshPosition, MeshShape
from paceline.job.strategy import Distribution
from paceline.model_parallel.layers import (
    ModelLayer,
    balanced,
    drop,
    given,
    layers_of,
    materialise,
    measured,
    only_read,
    placed,
    require_apart,
    shared_buffers,
    tree_of,
)
from paceline.model_parallel.parallelize import ParallelizeOptions


def row(*names: str) -> list[ModelLayer]:
    return [ModelLayer(name, nn.Linear(1, 1) if name.startswith("w") else nn.Tanh()) for name in names]


def test_ranks_stand_where_the_plan_says() -> None:
    grid = MeshShape(pipeline=2, replicas=3, tensor=2)
    assert [grid.rank(grid.position(rank)) for rank in range(12)] == list(range(12))
    assert [grid.position(rank) for rank in (0, 1, 2, 6)] == [
        MeshPosition(0, 0, 0),
        MeshPosition(0, 0, 1),
        MeshPosition(0, 1, 0),
        MeshPosition(1, 0, 0),
    ]
    assert [grid.replica_ranks(index) for index in range(3)] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    names = {grid.part_name(grid.position(rank)) for rank in range(12)}
    assert names == {"stage0.tensor0", "stage0.tensor1", "stage1.tensor0", "stage1.tensor1"}
    assert [
        MeshShape(1, 2, 1).part_name(MeshPosition(0, 1, 0)),
        MeshShape(1, 1, 2).part_name(MeshPosition(0, 0, 1)),
    ] == ["", "tensor1"]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_the_dearest_stage_is_as_cheap_as_any_cut_can_make_it(num_stages: int) -> None:
    generator = torch.Generator().manual_seed(num_stages)
    layers = row("w0", "t1", "w2", "w3", "t4", "t5", "w6", "w7")
    for _ in range(20):
        costs = torch.rand(len(layers), generator=generator).tolist()
        ends = balanced(layers, costs, num_stages)

        def dearest(edges: tuple[int, ...], costs: list[float] = costs) -> float:
            return max(sum(costs[a:b]) for a, b in zip((0, *edges), (*edges, len(costs)), strict=True))

        starts = [index for index, layer in enumerate(layers) if layer.num_parameters][1:]
        best = min(dearest(cut) for cut in combinations(starts, num_stages - 1))
        assert dearest(tuple(ends[:-1])) == pytest.approx(best)
        assert ends[-1] == len(layers)


class Taking(nn.Module):
    """A layer that takes so many seconds of a clock."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds

    def forward(self, values: Tensor) -> Tensor:
        self.clock[0] += self.seconds
        return values


def test_costs_are_measured_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    model = nn.Sequential(nn.Linear(4, 4), Taking(clock, 2.0), nn.BatchNorm1d(4), nn.Dropout(), Taking(clock, 3.0))
    inputs = torch.randn(64, 4)
    before, state = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()
    assert measured(layers_of(model), inputs) == [0.0, 2.0, 0.0, 0.0, 3.0]
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(one.grad is None for one in model.parameters())


def test_placements_are_read_and_refused() -> None:
    layers = row("features.w0", "features.t1", "flatten", "w2", "w3")
    assert placed(layers, {"features": 0, "w2": 1}, 2) == [3, 5]
    assert placed(layers, {"features": 0, "features.t1": 1, "w3": 2}, 3) == [1, 4, 5]
    assert given(layers, [1, 3], 3) == [1, 3, 5]
    for placement, num_stages, message in (
        ({"feature": 0, "w2": 1}, 2, "names feature, but the layers are features.w0"),
        ({"features": 1, "w2": 0}, 2, "in the order of the layers"),
        ({"features": 0, "w2": 2}, 2, "expected stages 0 to 1"),
    ):
        with pytest.raises(UsageError, match=message):
            placed(layers, placement, num_stages)
    for starts in ([], [0], [5], [2, 2], [3, 1]):
        with pytest.raises(UsageError, match="rising numbers from 1 to 4"):
            given(layers, starts, 3 if len(starts) != 1 else 2)


def test_a_part_has_the_names_and_the_memory_of_its_layers_only() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 1)))
    layers = layers_of(model)
    assert [layer.name for layer in layers] == ["0.0", "0.1", "1", "2.0"]
    require_apart(layers, [2, 4])
    drop(layers[:2], layers[2:])
    tree = tree_of(layers[2:])
    assert list(tree.state_dict()) == ["1.weight", "1.bias", "2.0.weight", "2.0.bias"]
    assert tree.get_submodule("2.0") is layers[3].module
    assert model[0][0].weight.is_meta
    assert not model[1].weight.is_meta
    materialise(model)
    assert not model[0][0].weight.is_meta


def test_hooks_of_a_chain_are_called_or_refused() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    model = nn.Sequential(inner, nn.Linear(2, 1))
    assert [layer.name for layer in layers_of(model)] == ["0.0", "0.1", "1"]
    inner.register_forward_hook(lambda *_: None)
    assert [layer.name for layer in layers_of(model)] == ["0", "1"]
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match="a Sequential with hooks cannot be split"):
        layers_of(model)


def test_layers_that_share_a_parameter_stay_in_one_stage() -> None:
    layers = row("w0", "w1", "t2", "w3", "w4")
    layers[3].module.weight = layers[1].module.weight
    assert balanced(layers, [1.0] * 5, 3) == [1, 4, 5]
    require_apart(layers, [1, 4, 5])
    with pytest.raises(UsageError, match="only 3 have parameters to learn that no layer before them shares"):
        balanced(layers, [1.0] * 5, 4)


@pytest.mark.parametrize(
    "buffer", [torch.tensor([1.0, torch.nan]), torch.eye(2).to_sparse(), torch.tensor([True]), torch.tensor(1)]
)
def test_shared_buffers_of_any_kind_may_be_read_and_not_changed(buffer: torch.Tensor) -> None:
    layers = row("w0", "w1")
    for layer in layers:
        layer.module.register_buffer("both", buffer)
    (shared,) = shared_buffers(layers, [1, 2], 1)
    with only_read([shared]):
        shared.values.sum()
    told = " and ".join(f"'{layers[stage].name}.both' of stage {stage}" for stage in (1, 0))
    with pytest.raises(UsageError, match=told), only_read([shared]):
        shared.values.zero_()


def test_what_a_script_asks_wins_over_the_launcher() -> None:
    launched = Distribution.parse("all-reduce+tensor:2")
    assert ParallelizeOptions().over(launched) == launched
    assert str(ParallelizeOptions(pipeline=2, data="ssp:3").over(launched)) == "ssp:3+pipeline:2+tensor:2"
    assert str(ParallelizeOptions(tensor=1).over(launched)) == "all-reduce"
    with pytest.raises(UsageError, match="data is 'pipeline:2', expected how replicas become one model"):
        ParallelizeOptions(data="pipeline:2").over(launched)


def test_a_whole_model_is_used_through_the_same_face(tmp_path: Path) -> None:
    inputs, targets = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64)

    def work(worker: Session) -> float:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        whole = paceline.parallelize(model, loss=mse_loss, data="all-reduce", recompute=worker.rank == 0)
        assert list(whole.state_dict()) == list(model.state_dict())
        assert whole.whole_state_dict() is not None
        optimizer = paceline.distributed(torch.optim.SGD(whole.parameters(), lr=0.1), model=whole)
        for batch in paceline.shard(list(range(4))):
            optimizer.zero_grad()
            loss = whole.forward_backward(inputs[batch : batch + 2], targets[batch : batch + 2])
            assert whole.clip_gradients(100.0) > 0
            for wrong in (-1.0, 0, math.nan):
                with pytest.raises(UsageError, match=f"max_norm is {wrong:g}, expected a norm above 0"):
                    whole.clip_gradients(wrong)
            optimizer.step()
        whole.eval()
        assert not model.training
        with optimizer.snapshot():
            assert whole(inputs).shape == (6, 1)
        return loss

    assert all(loss > 0 for loss in run_job(tmp_path, work, workers=2))


def test_buffers_of_a_loss_are_none_of_the_model(tmp_path: Path) -> None:
    def work(_worker: Session) -> float:
        model, loss = nn.Linear(2, 3), nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0]))
        whole = paceline.parallelize(model, loss=loss).double()
        assert [*whole.state_dict()] == [*(whole.whole_state_dict() or {})] == ["weight", "bias"]
        assert not [*whole.buffers()]
        return whole.forward_backward(torch.ones(2, 2, dtype=torch.float64), torch.tensor([0, 2]))

    assert run_job(tmp_path, work)[0] > 0


def test_workers_that_are_threads_cannot_hold_a_model_between_them(tmp_path: Path) -> None:
    def work(worker: Session) -> None:
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
        if worker.rank == 0:
            paceline.shard([1, 2])
            with pytest.raises(UsageError, match="the data is cut already with 1 stages of 1"):
                paceline.parallelize(model, loss=mse_loss, pipeline=2)
        else:
            with pytest.raises(UsageError, match="--transport shm"):
                paceline.parallelize(model, loss=mse_loss, pipeline=2)

    run_job(tmp_path, work, workers=2)
