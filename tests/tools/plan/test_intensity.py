"""Arithmetic intensity: what bounds a layer, and the batch from which on a device is busy."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from paceline.errors import UsageError
from paceline.tools.plan.command import TrainingOptions, plan
from paceline.tools.plan.intensity import busy_batch, moved_bytes, pass_s
from paceline.tools.plan.machine import Machines, parse_device, parse_link
from paceline.tools.plan.model import KNOWN_MODELS, Model, PlannedLayer, TrainingRecipe

HALF = TrainingRecipe("mixed", "adam")
# A square matrix of 1000 x 1000 in half precision: 2 MB of weights; of a sample 2 million operations, and 4 KB moved.
MATRIX = PlannedLayer("matrix", 1e6, flops=2e6, kept_bytes=2000, output_bytes=2000)
# 100 operations for a byte.
MACHINES = Machines(
    parse_device("mine=24GB:1T:10GB"),
    1,
    1,
    parse_link("pcie4", ""),
    parse_link("10gbit", ""),
    parse_device("cpu:1GB"),
    1,
)


def test_a_small_batch_takes_as_long_as_its_weights_and_a_large_one_as_its_operations() -> None:
    assert moved_bytes(MATRIX, HALF) == (2e6, 4000)
    assert pass_s([MATRIX], 1, HALF, MACHINES) == pytest.approx((2e6 + 4000) / 10e9)
    assert pass_s([MATRIX], 10, HALF, MACHINES) == pytest.approx((2e6 + 10 * 4000) / 10e9)
    assert pass_s([MATRIX], 1000, HALF, MACHINES) == pytest.approx(1000 * 2e6 / 1e12)
    assert pass_s([MATRIX, MATRIX], 1000, HALF, MACHINES) == pytest.approx(2 * 1000 * 2e6 / 1e12)


def test_a_device_is_busy_from_where_operations_take_as_long_as_memory() -> None:
    least = busy_batch(Model("m", (MATRIX,)), HALF, MACHINES)
    assert least == 125  # 125 * 2e6 operations, and 2e6 + 125 * 4000 bytes that take as long: 100 for a byte
    at = pass_s([MATRIX], least, HALF, MACHINES)
    assert at == pytest.approx(least * 2e6 / 1e12)
    assert pass_s([MATRIX], least - 1, HALF, MACHINES) > (least - 1) * 2e6 / 1e12


def test_no_batch_keeps_a_device_busy_with_a_layer_that_only_moves() -> None:
    thin = Model("m", (replace(MATRIX, kept_bytes=1e6),))
    assert busy_batch(thin, HALF, MACHINES) is None
    assert busy_batch(Model("m", (replace(MATRIX, flops=0.0),)), HALF, MACHINES) is None


def test_a_table_that_is_looked_up_moves_what_it_puts_out() -> None:
    table = PlannedLayer("table", 1e9, output_bytes=500)
    assert moved_bytes(table, HALF) == (0.0, 500)


def test_half_precision_needs_a_larger_batch_and_a_wider_model_a_smaller_one() -> None:
    """A half moves half the bytes, but a device computes much faster in it than its memory does."""
    a100 = replace(MACHINES, device=parse_device("a100-80"))
    matrix = Model("m", (replace(MATRIX, num_parameters=1e8, flops=2e8, kept_bytes=4e4, output_bytes=4e4),))
    half, full = busy_batch(matrix, HALF, a100), busy_batch(matrix, TrainingRecipe("fp32", "adam"), a100)
    assert half is not None
    assert full is not None
    assert half > 5 * full
    bert, gpt = (KNOWN_MODELS[name].model(2, fused_attention=True) for name in ("bert-base", "gpt-3"))
    assert (busy_batch(gpt, HALF, a100) or 0) <= (busy_batch(bert, HALF, a100) or 10**9)


def test_the_plan_says_which_batch_keeps_a_device_busy(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("gpt", training=TrainingOptions(batch=1), json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["busy_batch"] >= 1
    assert ("keep" in found["told"]) == (found["busy_batch"] > 1)
    assert plan("gpt", training=TrainingOptions(batch=1, compute_s=0.1), json=True) == 0
    assert "keep" not in json.loads(capsys.readouterr().out)["told"]  # a measured step says all


@pytest.mark.parametrize("text", ["mine=24GB:30T:fast", "mine=24GB:30T:30", "cpu:24GB:1G:x"])
def test_a_memory_rate_without_a_unit_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="the bytes a second of the memory of --device"):
        parse_device(text)
