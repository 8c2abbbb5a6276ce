"""Tensor parallelism: a split model computes what the whole one does, with as few sums as there can be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.model_parallel.models import Block, Gpt
from tests.model_parallel.ranks import run_ranks
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.model_parallel.tensor_plan import Plan, found_plan, plan_for, require_row, require_splittable

SCRIPT = Path(__file__).with_name("scripts") / "tensor_ranks.py"
CHECKS = (
    "bias_is_added_once",
    "chain",
    "dropout",
    "gpt",
    "half_precision",
    "names_are_no_proof",
    "number_of_sums",
    "recomputation",
    "rows_without_columns",
    "sharded",
    "subclasses_and_hooks",
    "torch_layers",
)


def test_four_ranks_and_two_pairs_of_ranks_compute_what_the_whole_model_does(tmp_path: Path) -> None:
    for told in run_ranks(SCRIPT, tmp_path, 4):
        assert told.splitlines() == [f"passed check_{name}" for name in CHECKS]


def test_what_is_known_of_shapes_is_found() -> None:
    assert plan_for(Gpt(tied=False), None, 2) == {
        "words": "vocabulary",
        "blocks.0.attention.qkv": "column:3",
        "blocks.0.attention.out": "row",
        "blocks.0.mlp.0": "column",
        "blocks.0.mlp.3": "row",
        **{f"blocks.1.attention.{name}": "column" for name in ("query", "key", "value")},
        "blocks.1.attention.out": "row",
        "blocks.1.mlp.0": "column",
        "blocks.1.mlp.3": "row",
        "head": "vocabulary",
    }
    assert "words" not in plan_for(Gpt(tied=False), None, 3)  # a vocabulary that does not divide stays together
    layer = nn.TransformerEncoderLayer(8, 4, 16)
    assert plan_for(layer, None, 2) == {"self_attn": "attention", "linear1": "column", "linear2": "row"}


def test_a_model_may_bring_its_plan_and_the_script_has_the_last_word() -> None:
    model = Block(stacked=True)
    model.tensor_plan = lambda: {"mlp.0": "column", "mlp.3": "row"}  # pyright: ignore[reportAttributeAccessIssue]
    assert plan_for(model, None, 2) == {"mlp.0": "column", "mlp.3": "row"}
    given = {"*.qkv": "column:3", "*.out": "row"}
    assert plan_for(model, given, 2) == {"attention.qkv": "column:3", "attention.out": "row"}


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def own_forward(layer: nn.Linear) -> None:
    layer.forward = lambda inputs: inputs


PAIR = {"0": "column", "2": "row"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda layer: layer.register_forward_hook(lambda *_: None), "'0' has hooks"),
        (lambda layer: layer.register_full_backward_hook(lambda *_: None), "'0' has hooks"),
        (lambda layer: layer.weight.register_hook(lambda _: None), "'0' has a hook on its weight"),
        (lambda layer: layer.register_buffer("scale", torch.ones(1)), "'0' has more than a Linear: scale"),
        (own_forward, "'0' has a forward of its own"),
        (nn.utils.parametrizations.weight_norm, "'0' is a ParametrizedLinear, a subclass of Linear"),
        (lambda layer: setattr(layer, "__class__", Scaled), "'0' is a Scaled, a subclass of Linear"),
    ],
)
def test_layers_that_compute_more_than_their_class_stay_whole(
    change: Callable[[nn.Linear], object], message: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    assert found_plan(model, 2) == PAIR
    change(model[0])
    assert found_plan(model, 2) == {}
    with pytest.raises(UsageError, match=f"no layers known to be split.*stay whole: {message}"):
        plan_for(model, None, 2)
    with pytest.raises(UsageError, match=f"split by 'column', but {message}"):
        plan_for(model, PAIR, 2)


def test_activations_with_hooks_and_chains_with_a_forward_of_their_own_are_not_trusted() -> None:
    hooked = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    hooked[1].register_forward_hook(lambda *_: None)
    own = type("Own", (nn.Sequential,), {"forward": lambda self, x: x})(nn.Linear(4, 4), nn.Linear(4, 4))
    assert found_plan(hooked, 2) == found_plan(own, 2) == {}


def test_a_row_of_layers_has_only_activations_between_columns_and_rows() -> None:
    row = [("a", nn.Linear(4, 4)), ("b", nn.GELU()), ("c", nn.Linear(4, 4)), ("d", nn.Softmax(-1))]
    assert require_row(row, {"a": "column", "c": "row", "d.inner": "column"}) == {"a", "c"}
    for planned, message in (
        ({"c": "column"}, "'c' is split by its features, but 'd', a Softmax"),
        ({"c": "row"}, "'c' is split by its features, but 'c', a Linear"),
        ({"a": "column"}, "but 'c', a Linear"),
    ):
        with pytest.raises(UsageError, match=message):
            require_row(row, planned)
    with pytest.raises(UsageError, match="'c' is split by columns, but no layer behind it"):
        require_row(row[:3], {"c": "column"})


ODD = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
SHARED = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4), nn.Linear(4, 4))
SHARED[1].weight = SHARED[0].weight
BY_WIDTH = nn.Module()
BY_WIDTH.head_width = 4  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
BY_WIDTH.qkv, BY_WIDTH.out = nn.Linear(12, 36), nn.Linear(12, 12)


@pytest.mark.parametrize(
    ("model", "plan", "size", "message"),
    [
        (nn.Conv1d(2, 2, 1), None, 2, "Conv1d has no layers known to be split"),
        (ODD, None, 4, "layer '0' cannot be split over 4 parts: it has 6 output features"),
        (
            ODD,
            {"0": "vocabulary", "1": "vocabulary"},
            2,
            "'1' is to be split by 'vocabulary'.*no layer has such a name",
        ),
        (ODD, {"0": "columns"}, 2, "split by 'columns', expected column, row"),
        (ODD, {"0": "row:2"}, 2, "split by 'row:2', expected"),
        (ODD, {"0": "attention"}, 2, "which is for MultiheadAttention: '0' is a Linear"),
        (ODD, {"0": "column"}, 2, "'0' is to be split by 'column', but none by 'row'"),
        (ODD, {"0": "column:4", "2": "row"}, 2, "6 output features in 4 parts"),
        (Block(stacked=True), None, 8, "layer 'attention.qkv' cannot be split over 8 parts: it has num_heads=4"),
        (BY_WIDTH, {"qkv": "column:3", "out": "row"}, 2, "layer 'qkv' cannot be split.*3 heads of 4 features"),
        (nn.TransformerEncoderLayer(6, 3, 8), None, 2, "'self_attn' cannot be split over 2 parts: it has 3 heads"),
        (SHARED, {"0": "vocabulary"}, 2, "'1.weight' is '0.weight', which is to be split, but '1' is not"),
        (SHARED, {"0": "vocabulary", "1": "row", "2": "column"}, 2, "'1.weight' is '0.weight'.*another way"),
        (nn.Sequential(nn.MultiheadAttention(4, 2, kdim=2)), {"0": "attention"}, 2, "it has kdim"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(model: nn.Module, plan: Plan | None, size: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        require_splittable(model, plan_for(model, plan, size), size)
