"""What a strategy needs and takes: against hand-computed numbers, and properties that hold for all."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.tools.plan.estimate import Estimate, PlannedTask, estimate, with_micro_batches
from paceline.tools.plan.machine import Device, Machines, NetworkLink, parse_device, parse_link
from paceline.tools.plan.model import Model, PlannedLayer, TrainingRecipe, Transformer, plain_model
from paceline.tools.plan.search import explain, recommend, survey
from paceline.tools.plan.strategy import PlannedStrategy, parse_strategy

SHAPE = Transformer(num_layers=6, hidden=64, num_heads=4, vocabulary=100, sequence=16)
TASK = PlannedTask(model=SHAPE.model("small", number_bytes=4), batch=16, recipe=TrainingRecipe("fp32", "adam"))
LINK = NetworkLink("a link", bytes_per_s=1e6, latency_s=0.0)
HUNDRED_MB = PlannedTask(model=plain_model("a table", 25e6, 1, 1), batch=4, recipe=TrainingRecipe("fp32", "momentum"))


def machines(
    num_devices: int, link: NetworkLink = LINK, device: Device | None = None, per_machine: int = 0
) -> Machines:
    return Machines(
        device=device or parse_device("cpu:10GB:1G"),
        num_devices=num_devices,
        devices_per_machine=per_machine or num_devices,
        link=link,
        network=parse_link("10gbit", "--network"),
        server_device=parse_device("cpu:100GB"),
        utilisation=1.0,
    )


def found(text: str, num_devices: int = 4, task: PlannedTask = TASK, micro_batches: int | None = None) -> Estimate:
    return estimate(task, parse_strategy(text, num_devices), machines(num_devices), micro_batches)


@pytest.mark.parametrize(
    ("link", "workers", "server_mb", "worker_mb"),
    [("shm", 2, 233.3, 83.3), ("shm", 4, 320.0, 70.0), ("10gbit", 2, 500.0, 300.0)],
)
def test_a_parameter_server_needs_what_was_measured(
    link: str, workers: int, server_mb: float, worker_mb: float
) -> None:
    """The table of docs/performance.md: 100 MB with momentum SGD."""
    strategy = PlannedStrategy(data=workers, joint="parameter-server", num_servers=1)
    told = estimate(HUNDRED_MB, strategy, machines(workers, parse_link(link, "--link")))
    assert {role.name: pytest.approx(role.memory.total / 1e6, abs=0.1) for role in told.roles} == {
        "server": server_mb,
        "worker": worker_mb,
    }


def test_compute_is_three_forward_passes_at_the_rate_of_the_device() -> None:
    """And a little more, for looking embeddings up is memory traffic."""
    for text, passes in (("single", 3), ("single+recompute", 4)):
        assert found(text).step.compute == pytest.approx(passes * TASK.model.flops * 16 / 1e9, rel=1e-3)


def test_bytes_of_a_step() -> None:
    size = 4 * TASK.model.num_parameters
    assert found("single").sent.total == 0
    assert found("all-reduce").sent.total == pytest.approx(1.5 * size)
    assert found("zero-1").sent.total == pytest.approx(1.5 * size)
    assert found("zero-2").sent.total == pytest.approx(1.5 * size)
    assert found("fsdp").sent.total == pytest.approx(1.5 * 1.5 * size)
    assert found("parameter-server:2").sent.total == pytest.approx(2 * size)
    assert found("colocated-server:2").sent.total == pytest.approx(1.2 * size)
    assert found("colocated-server:2").step.communicate == pytest.approx(1.2 * size / 1e6)


@pytest.mark.parametrize(("device", "times"), [("cpu:10GB:1G:1GB", 2 * (10 + 2 / 2) + 8 + 6 / 2), ("a100-80", 0.0)])
def test_fsdp_copies_layers_on_hosts(device: str, times: float) -> None:
    size = 4 * HUNDRED_MB.model.num_parameters
    one = estimate(HUNDRED_MB, parse_strategy("fsdp", 2), machines(2, device=parse_device(device)))
    assert one.step.communicate == pytest.approx(1.5 * size / 1e6 + times * size / 1e9)


def test_tensor_parallelism_reduces_four_times_a_block() -> None:
    """And twice for the words, whose matrix is the head's: a ring among 4 of all 16 samples at once."""
    output = 16 * 16 * 64 * 4
    assert found("tensor:4").sent.tensor == pytest.approx((6 * 4 + 2) * 1.5 * output)
    assert found("tensor:4+recompute").sent.tensor == pytest.approx((6 * 6 + 3) * 1.5 * output)


def test_a_pipeline_takes_a_tick_for_every_micro_batch_and_every_other_stage() -> None:
    equal = Model("equal", tuple(PlannedLayer(f"layer {index}", 10, flops=1e6, output_bytes=4) for index in range(4)))
    task = PlannedTask(model=equal, batch=8, recipe=TrainingRecipe("fp32", "sgd"))
    one = found("pipeline:4", task=task, micro_batches=8)
    tick_s = 3e6 / 1e9 + 2 * 4 / 1e6
    assert one.step.total == pytest.approx((8 + 4 - 1) * tick_s)
    assert one.step.bubble / one.step.total == pytest.approx(one.bubble_share) == pytest.approx(3 / 11)
    assert one.sent.pipeline == 8 * 4 * 2


def test_a_pipeline_computes_as_a_step_in_micro_batches_was_measured() -> None:
    equal = Model("equal", tuple(PlannedLayer(f"layer {index}", 10, flops=1e6, output_bytes=4) for index in range(4)))
    task = PlannedTask(model=equal, batch=8, recipe=TrainingRecipe("fp32", "sgd"), compute_s=8.0)
    told = replace(task, accumulated_s=4.0)
    assert found("single", 1, task=told).step.compute == 8.0
    assert found("pipeline:4", task=task, micro_batches=8).step.compute == pytest.approx(8.0 / 4)
    assert found("pipeline:4", task=told, micro_batches=8).step.compute == pytest.approx(4.0 / 4)


def test_the_first_stage_computes_no_gradient_of_the_input() -> None:
    first = PlannedLayer("first", 10, flops=1e6, input_flops=1e6)
    model = Model("two", (first, replace(first, name="second", input_flops=0.0)))
    task = PlannedTask(model=model, batch=2, recipe=TrainingRecipe("fp32", "sgd"), compute_s=5.0)
    assert found("single", 1, task=task).step.compute == 5.0
    assert found("pipeline:2", 2, task=task, micro_batches=2).step.compute == pytest.approx(3.0)
    assert found("single+recompute", 1, task=task).step.compute == 7.0


def test_less_is_kept_under_1f1b_and_least_under_recomputation() -> None:
    filled = estimate(TASK, PlannedStrategy(pipeline=2, schedule="gpipe"), machines(2), 8)
    early = estimate(TASK, PlannedStrategy(pipeline=2), machines(2), 8)
    again = estimate(TASK, PlannedStrategy(pipeline=2, recompute=True), machines(2), 8)
    kept = [one.worker.memory.activations for one in (filled, early, again)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > 2 * kept[1]
    assert filled.step == early.step


def test_memory_that_gradients_fill_later_is_free_for_activations() -> None:
    """One process frees gradients before it computes; with buckets or servers they stay."""
    alone, together = found("single"), found("all-reduce", num_devices=1)
    assert alone.worker.memory.activations < together.worker.memory.activations
    assert together.worker.memory.activations - alone.worker.memory.activations <= alone.worker.memory.gradients


STRATEGIES = st.sampled_from(
    [
        "single",
        "single+recompute",
        "all-reduce",
        "parameter-server:2",
        "colocated-server:1",
        "colocated-server:0",
        "zero-1",
        "zero-2",
        "fsdp",
        "pipeline:4",
        "tensor:4",
        "pipeline:2+all-reduce",
        "pipeline:2+tensor:2+recompute",
        "tensor:2+fsdp",
        "pipeline:2+parameter-server:2",
    ]
)


@settings(max_examples=40, deadline=None)
@given(text=STRATEGIES, precision=st.sampled_from(["mixed", "fp32"]), batch=st.sampled_from([16, 32]))
def test_parts_are_the_whole_and_the_name_is_read_back(text: str, precision: str, batch: int) -> None:
    task = replace(TASK, recipe=TrainingRecipe(precision, "adam"), batch=batch)  # type: ignore[arg-type]
    one = found(text, task=task)
    assert one.step.total == one.step.compute + one.step.bubble + one.step.communicate
    for role in one.roles:
        assert role.memory.total == sum(role.memory.by_part().values())
        assert all(size >= 0 for size in role.memory.by_part().values())
    assert (
        replace(parse_strategy(str(one.strategy), 4), num_micro_batches=one.strategy.num_micro_batches) == one.strategy
    )


@pytest.mark.parametrize("kind", ["pipeline", "tensor"])
def test_memory_falls_with_every_cut(kind: str) -> None:
    totals = [found(f"{kind}:{count}", count).worker.memory.total for count in (1, 2, 4)]
    assert totals == sorted(totals, reverse=True)


def test_links_are_those_of_the_mesh() -> None:
    """Ranks of a layer are neighbours on a machine; replicas are on several."""
    there = machines(4, per_machine=2)
    assert there.link_over(2) is LINK
    assert there.link_over(4).name == "10gbit"
    assert there.num_machines == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline:16", "16 stages, and small has 8 layers"),
        ("tensor:8", "8 ranks do not divide the 4 heads"),
    ],
)
def test_models_that_cannot_be_cut_so(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        found(text, num_devices=int(text.partition(":")[2]))


def test_a_model_without_matrices_cannot_be_split() -> None:
    with pytest.raises(UsageError, match="no layer of a table is known"):
        found("tensor:4", task=HUNDRED_MB)


def test_batches_are_shared_evenly_or_not_at_all() -> None:
    assert with_micro_batches(PlannedStrategy(pipeline=4), 24, None).num_micro_batches == 12
    assert with_micro_batches(PlannedStrategy(data=4), 24, None).num_micro_batches == 1
    with pytest.raises(UsageError, match="cannot be shared evenly by 4 replicas"):
        with_micro_batches(PlannedStrategy(data=4), 10, None)
    with pytest.raises(UsageError, match="6 samples of a replica cannot be cut into 4"):
        with_micro_batches(PlannedStrategy(data=4), 24, 4)


def test_the_fastest_that_fits_is_recommended_with_its_reason() -> None:
    there = machines(4, parse_link("100gbit", "--link"))
    estimates = survey(TASK, there, num_servers=1, schedule="1f1b")
    best = recommend(estimates)
    assert best is not None
    assert best.step.total <= min(one.step.total for one in estimates if one.fits) * 1.02
    told = explain(TASK, there, estimates)
    assert told.startswith(f"Take {best.strategy}: a worker needs")
    assert "One device alone would take" in told


def test_more_devices_are_not_taken_when_they_only_wait() -> None:
    slow = machines(4, parse_link("1mbit", "--link"))
    estimates = survey(TASK, slow, num_servers=1, schedule="1f1b")
    assert "Take single" in explain(TASK, slow, estimates)
    assert "would only wait for each other" in explain(TASK, slow, estimates)


def test_a_model_that_fits_nowhere_says_how_much_it_takes() -> None:
    small = machines(2, device=parse_device("tiny=100KB"))
    estimates = survey(TASK, small, num_servers=1, schedule="1f1b")
    assert recommend(estimates) is None
    state = 16 * TASK.model.num_parameters
    assert f"it takes {-(-state // 1e5):.0f} such devices at least" in explain(TASK, small, estimates)


def test_what_does_not_fit_is_recomputed_and_what_is_simpler_is_named() -> None:
    single = found("single").worker.memory
    tight = parse_device(f"tight={0.9 * single.total:.0f}B")
    there = machines(1, device=tight)
    [one] = survey(TASK, there, num_servers=1, schedule="1f1b")
    assert one.strategy.recompute
    assert one.fits
