"""Every rule of torch.optim, on cut tables: bit for bit what the plain optimizer does with the whole parameters."""

import pytest
import torch
from msgspec.structs import replace
from tests.update.tables import SEGMENTS, Plain, apply, flat_values, pushes, shards_of, start_values, store, with_rule

from paceline.training.state import gather_optimizer, split_optimizer
from paceline.update.named_rules import SGD, Adagrad, Adam, AdamW, granularity
from paceline.update.rules import RuleSpec
from paceline.update.shard import Shard
from paceline.update.table import Segment, TableSpec
from paceline.update.torch_rule import from_optimizer, hyper_of

ELEMENTWISE = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
    ("SGD", {"lr": 0.1, "weight_decay": 0.01, "fused": True}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "fused": True}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95)}),
    ("NAdam", {"lr": 0.01}),
    ("RAdam", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.5}),
    ("Adadelta", {"lr": 1.0}),
    ("Adamax", {"lr": 0.01, "foreach": True}),
    ("RMSprop", {"lr": 0.01, "centered": True, "momentum": 0.5}),
    ("ASGD", {"lr": 0.1, "t0": 5.0}),
    ("Rprop", {"lr": 0.1}),
]
MATRICES = (Segment("a", (16, 8)), Segment("b", (8, 24), 1), Segment("c", (4, 4)), Segment("f", (3, 3)))
TENSORWISE = [("Adafactor", {"lr": 0.01}), ("Muon", {"lr": 0.01})]


class Pair:
    """A table on some servers and its plain twin, started alike."""

    def __init__(self, name: str, numbers: dict, segments: tuple[Segment, ...], dtype: str, num_servers: int) -> None:
        template = with_rule(RuleSpec("add", ({}, {})), segments, dtype)
        start = start_values(template)
        self.plain = Plain(template, start)
        groups = self.plain.groups(lr=numbers["lr"], with_decay=name != "Rprop")
        self.optimizer = getattr(torch.optim, name)(groups, **numbers)
        self.spec: TableSpec = replace(template, rule=from_optimizer(self.optimizer))
        self.spec.validate()
        self.shards = shards_of(self.spec, num_servers)
        store(self.shards, start)

    def train(self, steps: range) -> None:
        """Train both; the first group gets another lr at step 10, told once."""
        for step in steps:
            hyper = ()
            if step == 10:
                self.optimizer.param_groups[0]["lr"] *= 0.3
                hyper = from_optimizer(self.optimizer).groups
            made = pushes(self.spec, step)
            before = [push.gradient.clone() for push in made]
            apply(self.shards, made, hyper)
            for push, gradient in zip(made, before, strict=True):
                torch.testing.assert_close(push.gradient, gradient, rtol=0, atol=0, equal_nan=True)
            self.plain.step(self.optimizer, made)

    def assert_equal(self) -> None:
        assert torch.equal(flat_values(self.shards), self.plain.flat())
        assert self.plain.flat().isfinite().all()

    def parts(self, shards: list[Shard]) -> list:
        return [(shard.span, shard.state()) for shard in shards]


def _title(value: object) -> str:
    return value if isinstance(value, str) else "-".join(map(str, value)) if isinstance(value, dict) else repr(value)


@pytest.mark.parametrize(("dtype", "num_servers"), [("float32", 1), ("float32", 2), ("float32", 3), ("float64", 3)])
@pytest.mark.parametrize(("name", "numbers"), ELEMENTWISE, ids=_title)
def test_equals_the_plain_optimizer(name: str, numbers: dict, dtype: str, num_servers: int) -> None:
    pair = Pair(name, numbers, SEGMENTS, dtype, num_servers)
    pair.train(range(20))
    pair.assert_equal()
    assert [shard.version for shard in pair.shards] == [20] * num_servers


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize(("name", "numbers"), TENSORWISE, ids=_title)
def test_rules_that_need_whole_tensors_equal_too(name: str, numbers: dict, num_servers: int) -> None:
    pair = Pair(name, numbers, MATRICES, "float32", num_servers)
    assert granularity(pair.spec.rule) == "tensor"
    pair.train(range(11))  # one step with the other lr; Muon is slow on a CPU
    pair.assert_equal()


@pytest.mark.parametrize(("name", "numbers"), ELEMENTWISE + TENSORWISE, ids=_title)
def test_moves_to_other_servers_by_way_of_plain_torch_and_goes_on(name: str, numbers: dict) -> None:
    pair = Pair(name, numbers, MATRICES, "float32", 2)
    pair.train(range(6))
    state_dict = gather_optimizer(pair.spec, pair.parts(pair.shards))
    values = flat_values(pair.shards)
    assert tuple(hyper_of(group) for group in state_dict["param_groups"]) == pair.spec.rule.groups
    pair.shards = shards_of(pair.spec, 3)
    for shard in pair.shards:
        own = {"values": values[shard.span.start : shard.span.stop]}
        shard.load_state({**own, **split_optimizer(pair.spec, state_dict, shard.span)}, version=6)
    pair.train(range(6, 12))
    pair.assert_equal()
    assert [shard.version for shard in pair.shards] == [12] * 3


@pytest.mark.parametrize("num_left", [0, 1])
@pytest.mark.parametrize(("name", "numbers"), ELEMENTWISE, ids=_title)
def test_what_is_loaded_without_a_state_begins_anew(name: str, numbers: dict, num_left: int) -> None:
    pair = Pair(name, numbers, MATRICES, "float32", 2)
    pair.train(range(6))
    state_dict = gather_optimizer(pair.spec, pair.parts(pair.shards))
    state_dict["state"] = {number: state for number, state in state_dict["state"].items() if number < num_left}
    pair.optimizer.load_state_dict(state_dict)
    for shard in pair.shards:
        own = {"values": shard.values.clone()}
        shard.load_state({**own, **split_optimizer(pair.spec, state_dict, shard.span)}, version=6)
    pair.train(range(6, 12))
    pair.assert_equal()


@pytest.mark.parametrize(("name", "numbers"), ELEMENTWISE + TENSORWISE, ids=_title)
def test_goes_on_in_a_plain_optimizer(name: str, numbers: dict) -> None:
    pair = Pair(name, numbers, MATRICES, "float32", 3)
    pair.train(range(6))
    twin = Plain(pair.spec, flat_values(pair.shards))
    optimizer = type(pair.optimizer)(twin.groups(lr=0.5, with_decay=name != "Rprop"), **numbers)
    optimizer.load_state_dict(gather_optimizer(pair.spec, pair.parts(pair.shards)))
    for step in range(6, 10):
        twin.step(optimizer, pushes(pair.spec, step))
        apply(pair.shards, pushes(pair.spec, step))
    assert torch.equal(flat_values(pair.shards), twin.flat())


def test_cuts_inside_tensors_really_happen() -> None:
    pair = Pair("Adam", {"lr": 0.01}, SEGMENTS, "float32", 3)
    starts = {shard.span.start for shard in pair.shards}
    assert not starts <= {0, *pair.spec.offsets}


@pytest.mark.parametrize(
    ("rule", "plain"),
    [
        (
            SGD(0.1, 0.9, nesterov=True, weight_decay=0.01),
            lambda w: torch.optim.SGD(w, 0.1, 0.9, nesterov=True, weight_decay=0.01),
        ),
        (SGD(0.1), lambda w: torch.optim.SGD(w, 0.1)),
        (Adagrad(initial_accumulator_value=0.1), lambda w: torch.optim.Adagrad(w, initial_accumulator_value=0.1)),
        (Adam(), lambda w: torch.optim.Adam(w)),
        (AdamW(amsgrad=True), lambda w: torch.optim.AdamW(w, amsgrad=True)),
    ],
    ids=lambda value: value.name if isinstance(value, RuleSpec) else "",
)
def test_named_rules_are_those_of_torch_with_its_defaults(rule: RuleSpec, plain: object) -> None:
    assert rule == from_optimizer(plain([torch.nn.Parameter(torch.zeros(2))]))


def test_large_tables_are_summed_chunk_by_chunk_without_a_trace() -> None:
    segments = (Segment("w", (700, 1000)), Segment("g", (3,), 1), Segment("t", ()), Segment("f", (3,)))
    pair = Pair("SGD", {"lr": 0.1, "momentum": 0.9}, segments, "float32", 2)
    pair.train(range(3))
    pair.assert_equal()
