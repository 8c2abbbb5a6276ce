"""The formulas, against numbers that the papers print or that were computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.core.partition import shares_over_hosts
from paceline.tools.plan.estimate import (
    Memory,
    alone_bytes,
    balanced_stages,
    bubble_share,
    colocated_bytes,
    peak_in_flight,
    ring_bytes,
    ring_s,
    server_memory,
    server_shares,
    worker_memory,
)
from paceline.tools.plan.machine import NetworkLink
from paceline.tools.plan.model import (
    NUM_MOMENTS,
    OptimizerName,
    PlannedLayer,
    Precision,
    TrainingRecipe,
    Transformer,
    plain_model,
)
from paceline.tools.plan.strategy import Joint, PlannedStrategy

GB = 1e9
SHAPE = Transformer(num_layers=2, hidden=8, num_heads=2, vocabulary=10, sequence=4)


def state(memory: Memory) -> float:
    """Bytes of weights, gradients and optimizer, whatever the batch."""
    return memory.weights + memory.gradients + memory.optimizer


def worker(strategy: PlannedStrategy, num_parameters: float, recipe: TrainingRecipe) -> Memory:
    layers = plain_model("a model", num_parameters, 1, 1).layers
    return worker_memory(layers, 0.0, strategy, recipe, samples=1.0, in_flight=1)


@pytest.mark.parametrize(
    ("joint", "gigabytes"), [("all-reduce", 120.0), ("zero-1", 31.4), ("zero-2", 16.6), ("fsdp", 1.9)]
)
def test_zero_with_7_5_billion_parameters_on_64_devices(joint: Joint, gigabytes: float) -> None:
    memory = worker(PlannedStrategy(data=64, joint=joint), 7.5e9, TrainingRecipe("mixed", "adam"))
    assert state(memory) / GB == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    ("precision", "optimizer", "size"),
    [("mixed", "adam", 16), ("mixed", "sgd", 8), ("fp32", "adam", 16), ("fp32", "momentum", 12), ("fp32", "sgd", 8)],
)
def test_bytes_of_a_parameter(precision: Precision, optimizer: OptimizerName, size: int) -> None:
    assert TrainingRecipe(precision, optimizer).state_bytes == size


@pytest.mark.parametrize(("servers", "factor"), [(0, 1.5), (1, 4 / 3), (2, 1.2), (3, 12 / 11), (4, 1.0), (9, 1.0)])
def test_byteps_with_four_workers(servers: int, factor: float) -> None:
    assert colocated_bytes(4, servers, 1.0) == pytest.approx(factor)


@pytest.mark.parametrize(("servers", "factor"), [(1, 4.0), (2, 2.0), (3, 4 / 3), (4, 1.0), (8, 1.0)])
def test_servers_alone_with_four_workers(servers: int, factor: float) -> None:
    assert alone_bytes(4, servers, 1.0) == pytest.approx(factor)


@settings(max_examples=40)
@given(workers=st.integers(1, 40), servers=st.integers(0, 40))
def test_byteps_shares_are_the_whole_and_every_machine_sends_as_much(workers: int, servers: int) -> None:
    alone, beside = (0.0, 1 / workers) if servers == 0 else server_shares(workers, servers)
    assert servers * alone + workers * beside == pytest.approx(1.0)
    sent = colocated_bytes(workers, servers, 1.0)
    n, k = workers, min(servers, workers)
    if n * n + k * n - 2 * k:
        expected = 2 * n * (n - 1) / (n * n + k * n - 2 * k) if servers < workers else 1.0
        assert sent == pytest.approx(expected)
    if 0 < servers < workers:
        assert workers * alone == pytest.approx(sent)  # a server alone sends its share to every worker


@settings(max_examples=60)
@given(
    num_hosts=st.integers(1, 8),
    per_host=st.integers(1, 3),
    servers=st.lists(st.integers(0, 12), min_size=1, max_size=12),
)
def test_shares_over_hosts_have_all_lines_done_together(num_hosts: int, per_host: int, servers: list[int]) -> None:
    """Hosts from `num_hosts` on have no workers. A line carries what it sends, or what it gets, whichever is more."""
    workers = [host for host in range(num_hosts) for _ in range(per_host)]
    shares = shares_over_hosts(workers, servers)
    assert sum(shares) == pytest.approx(1.0)
    assert min(shares) >= 0
    kept = {host: sum(share for share, at in zip(shares, servers, strict=True) if at == host) for host in servers}
    both = [1 + (num_hosts - 2) * kept[host] for host in kept if host < num_hosts]
    alone = [num_hosts * kept[host] for host in kept if host >= num_hosts]
    assert not both or max(both) == pytest.approx(min(both))
    assert not alone or max(alone) == pytest.approx(min(alone))
    if both and alone and len(alone) < num_hosts:
        assert both[0] == pytest.approx(alone[0])


@given(workers=st.integers(1, 20), servers=st.integers(1, 20))
def test_shares_over_hosts_are_those_of_byteps(workers: int, servers: int) -> None:
    alone, beside = server_shares(workers, servers)
    hosts = list(range(workers))
    shares = shares_over_hosts(hosts, [*range(workers, workers + servers), *hosts])
    assert shares == pytest.approx((alone,) * servers + (beside,) * workers)


def test_a_ring_moves_its_bytes_in_as_many_messages() -> None:
    link = NetworkLink("a link", bytes_per_s=100.0, latency_s=0.5)
    assert ring_bytes(4, 100.0) == 150.0
    assert ring_s(4, 100.0, link) == pytest.approx(1.5 + 6 * 0.5)
    assert ring_s(1, 100.0, link) == 0.0


@pytest.mark.parametrize(
    ("stages", "micro_batches", "share"),
    [(2, 1, 0.5), (2, 2, 1 / 3), (2, 4, 0.2), (2, 8, 1 / 9), (8, 32, 7 / 39), (1, 4, 0.0)],
)
def test_gpipe_bubbles(stages: int, micro_batches: int, share: float) -> None:
    assert bubble_share(stages, micro_batches) == pytest.approx(share)


def test_micro_batches_in_flight() -> None:
    filled = PlannedStrategy(pipeline=4, num_micro_batches=8, schedule="gpipe")
    early = PlannedStrategy(pipeline=4, num_micro_batches=8, schedule="1f1b")
    assert [peak_in_flight(filled, stage) for stage in range(4)] == [8, 8, 8, 8]
    assert [peak_in_flight(early, stage) for stage in range(4)] == [4, 3, 2, 1]


def test_a_transformer_has_the_parameters_of_its_shape() -> None:
    model = SHAPE.model("a model", number_bytes=2)
    assert model.num_parameters == 2 * (12 * 64 + 13 * 8) + 10 * 8 + 4 * 8 + 2 * 8
    assert len(model.layers) == 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_block_keeps_what_korthikanti_counts(ranks: int) -> None:
    """Reducing Activation Recomputation in Large Transformer Models: s b h (10 + 24 / t + 5 a s / (h t))."""
    s, h, a = 4, 8, 2
    block = SHAPE.model("a model", number_bytes=2).layers[1]
    assert block.kept_by(ranks) == pytest.approx(s * h * (10 + 24 / ranks + 5 * a * s / (h * ranks)))
    fused = SHAPE.without_scores().model("a model", number_bytes=2).layers[1]
    assert fused.kept_by(ranks) == pytest.approx(s * h * (10 + 24 / ranks))


def test_operations_are_two_a_parameter_and_token() -> None:
    """And attention's own, which are few while a text is short beside the width."""
    model = Transformer(12, 4096, 32, 1000, 16).model("a model", number_bytes=2)
    blocks = sum(layer.flops for layer in model.layers if layer.name.startswith("block"))
    matrices = 12 * 12 * 4096**2
    assert blocks == pytest.approx(2 * matrices * 16, rel=0.01)


@settings(max_examples=40)
@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=9), data=st.data())
def test_stages_are_cut_in_the_best_way(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    layers = [PlannedLayer(f"layer {index}", 1, flops=cost) for index, cost in enumerate(costs)]
    stages = balanced_stages(layers, num_stages)
    assert [layer for stage in stages for layer in stage] == layers
    assert len(stages) == num_stages
    assert all(stages)
    assert max(sum(layer.flops for layer in stage) for stage in stages) == dearest(costs, num_stages)


def dearest(costs: list[int], num_stages: int) -> int:
    """The same by trying every cut."""
    if num_stages == 1:
        return sum(costs)
    ends = range(1, len(costs) - num_stages + 2)
    return min(max(sum(costs[:end]), dearest(costs[end:], num_stages - 1)) for end in ends)


@settings(max_examples=40)
@given(
    count=st.floats(1e3, 1e12),
    replicas=st.integers(2, 512),
    precision=st.sampled_from(["mixed", "fp32"]),
    optimizer=st.sampled_from(sorted(NUM_MOMENTS)),
)
def test_memory_falls_with_every_stage_of_zero(
    count: float, replicas: int, precision: Precision, optimizer: OptimizerName
) -> None:
    recipe = TrainingRecipe(precision, optimizer)
    joints: tuple[Joint, ...] = ("all-reduce", "zero-1", "zero-2", "fsdp")
    states = [state(worker(PlannedStrategy(data=replicas, joint=joint), count, recipe)) for joint in joints]
    assert states == sorted(states, reverse=True)
    assert states[0] == pytest.approx(count * recipe.state_bytes)
    assert states[-1] == pytest.approx(states[0] / replicas)


@settings(max_examples=20)
@given(servers=st.integers(1, 9), workers=st.integers(1, 9))
def test_servers_hold_the_state_once_between_them(servers: int, workers: int) -> None:
    strategy = PlannedStrategy(data=workers, joint="parameter-server", num_servers=servers)
    each = server_memory(1e6, strategy, TrainingRecipe("fp32", "momentum"), 1 / servers)
    assert servers * each.weights == pytest.approx(4e6)
    assert servers * each.optimizer == pytest.approx(4e6)
    assert servers * each.gradients == pytest.approx(workers * 4e6)
    assert sum(each.by_part().values()) == each.total
