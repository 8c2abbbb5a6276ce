"""State and numbers from a wire reach no operation of torch that takes their shapes or its own switches on trust."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save
from tests.attacks.rogue import LAST, bytes_of, dense, rogue_in, row_table
from tests.attacks.target import Target, target
from tests.nodes.client import ONES
from tests.update.tables import shards_of, store, table

from paceline.core.messages import Applied, PushRefused
from paceline.core.partition import Range
from paceline.errors import UsageError
from paceline.update import named_rules as update
from paceline.update.rules import Hyper, Number, RuleSpec
from paceline.update.shard import Contribution, Shard
from paceline.update.table import Segment
from paceline.update.torch_rule import SWITCHES, TorchRule, from_optimizer
from paceline.wire.requests import Declare, DeclareRows, Initialise, LoadState, RequestDone, RequestFailed

CLASSES = sorted(
    name
    for name, cls in vars(torch.optim).items()
    if isinstance(cls, type)
    and issubclass(cls, torch.optim.Optimizer)
    and name not in ("LBFGS", "Optimizer", "SparseAdam")
)
SEGMENTS = (Segment("weight", (3, 2)), Segment("other", (2, 2)))
VALUES = torch.linspace(-1, 1, 4)
FOREACH: Hyper = {"foreach": True}


def trained(spec: RuleSpec, steps: int = 2) -> dict[str, torch.Tensor]:
    [shard] = shards_of(table(spec, SEGMENTS), 1)
    store([shard], torch.linspace(-1, 1, 10))
    for _ in range(steps):
        shard.apply([Contribution(torch.ones(10))])
    return {key: value.clone() for key, value in shard.state().items()}


@pytest.fixture(scope="module")
def victim() -> Iterator[Target]:
    with target() as started:
        yield started


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("more", [False, True])
def test_the_state_of_every_class_is_taken_back_and_no_other(name: str, more: bool) -> None:
    numbers: Hyper = {"momentum": 0.9, "amsgrad": True, "centered": True, "foreach": True} if more else FOREACH
    accepted = update.torch_optim(name).groups[0]
    spec = update.torch_optim(name, **{key: value for key, value in numbers.items() if key in accepted})
    saved = trained(spec)
    [shard] = shards_of(table(spec, SEGMENTS), 1)
    shard.load_state(saved)
    shard.apply([Contribution(torch.ones(10))])
    assert torch.equal(shard.values, trained(spec, 3)["values"])
    for key in saved.keys() - {"values"}:
        for wrong in (saved[key].new_ones(7, 1), saved[key].to(torch.complex64), saved[key].new_ones(0)):
            with pytest.raises(UsageError, match="shape"):
                shards_of(table(spec, SEGMENTS), 1)[0].load_state({**saved, key: wrong})
    with pytest.raises(UsageError, match="no state"):
        shard.load_state({**saved, "0.mine": torch.ones(3, 2)})


@pytest.mark.parametrize("name", ["Adam", "NAdam"])
@pytest.mark.parametrize("steps", [torch.inf, -1.0, torch.nan])
def test_a_number_of_steps_is_one(name: str, steps: float) -> None:
    spec = update.torch_optim(name)
    [shard] = shards_of(table(spec, SEGMENTS), 1)
    with pytest.raises(UsageError, match="a number of steps"):
        shard.load_state({**trained(spec), "0.step": torch.tensor(steps)})


def test_a_state_that_lacks_what_the_class_needs_is_refused() -> None:
    spec = update.torch_optim("NAdam")
    saved = {key: value for key, value in trained(spec).items() if key != "0.exp_avg"}
    with pytest.raises(UsageError, match=r"lacks \['exp_avg'\]"):
        shards_of(table(spec, SEGMENTS), 1)[0].load_state(saved)


class Averaging:
    """A rule of the user's own, which looks at each element alone."""

    granularity = "element"

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def update(self, values: list, gradients: list, hyper: list, groups: list) -> None:
        """Do nothing."""

    def state(self) -> dict[str, torch.Tensor]:
        return self.kept

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.kept = dict(state)


def test_the_state_of_an_own_rule_has_the_shape_of_its_piece() -> None:
    spec = table(update.rule("own:Averaging"), SEGMENTS)
    shard = Shard(spec, Range(0, 0, 10), rule=Averaging())
    shard.load_state({"values": torch.zeros(10), "0.mean": torch.zeros(3, 2), "1.count": torch.tensor(3)})
    with pytest.raises(UsageError, match=r"expected \(3, 2\), or \(\)"):
        shard.load_state({"values": torch.zeros(10), "0.mean": torch.zeros(1)})
    assert shard.state().keys() == {"values", "0.mean", "1.count"}


def test_a_state_of_one_element_and_a_fused_step_write_to_nothing(victim: Target) -> None:
    """What overwrote the heap of a server: fused operations of torch take the shape of the state on trust."""
    rule = update.torch_optim("Adam", foreach=True)
    states = ("exp_avg", "exp_avg_sq")
    tiny = {"values": VALUES, "0.step": torch.tensor(1.0), **{f"0.{name}": torch.ones(1) for name in states}}
    fused = tuple({**group, "foreach": None, "fused": True} for group in rule.groups)
    with rogue_in(victim.servers, 1) as rogue:
        rogue.say(Declare(1, dense("big", 4, rule=rule)))
        rogue.say(Initialise(2, "big"), bytes_of(VALUES))
        rogue.say(LoadState(3, "big"), save(tiny))
        rogue.say(rogue.frame(0, "big", hyper=fused), ONES)
        rogue.say(rogue.frame(1, "big"), ONES)
        declared, initialised, failed, refused, applied = rogue.hear()
    assert [declared, initialised] == [RequestDone(1), RequestDone(2)]
    assert isinstance(failed, RequestFailed)
    assert "State '0.exp_avg' has shape (1,)" in failed.reason or "State '0.exp_avg_sq' has" in failed.reason
    assert isinstance(refused, PushRefused)
    assert "other than declared ['foreach', 'fused']" in refused.reason
    assert applied == Applied(rogue.push(1, "big").id)


def with_numbers(name: str, **numbers: Number) -> RuleSpec:
    rule = update.torch_optim(name)
    return replace(rule, groups=({**rule.groups[0], **numbers},))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (with_numbers("SGD", frobnicate=1), r"no hyperparameter \['frobnicate'\]"),
        (with_numbers("NAdam", params=1), r"no hyperparameter \['params'\]"),
        (with_numbers("Adam", capturable=True), "cannot be switched"),
        (with_numbers("NAdam", differentiable=True), "cannot be switched"),
        (with_numbers("Adam", fused=2**62), "cannot be switched"),
        (with_numbers("Adam", fused=True, foreach=True), "fused and foreach at once"),
        (with_numbers("SGD", nesterov=1, momentum=0.9), "nesterov is 1, expected True or False"),
        (with_numbers("SGD", weight_decay=True), "weight_decay is True, expected a number"),
        (with_numbers("Adam", betas=(0.9, 1.0)), "Invalid beta parameter at index 1: 1.0"),
        (with_numbers("Adam", betas=(0.9, 0.99, 0.9)), r"betas is \(0.9, 0.99, 0.9\), expected 2 numbers"),
        (with_numbers("Muon", ns_steps=2.5), "ns_steps is 2.5, expected a whole number"),
        (RuleSpec("delayed_nesterov", ({"lr": 0.1, "momentum": 0.9, "every": 0},)), "every is 0, expected a whole"),
        (RuleSpec("add", ({"lr": 0.1},)), r"no hyperparameter \['lr'\]"),
        (RuleSpec("delayed_nesterov", ({"lr": 0.1, "momentum": 0.9, "every": 2, "fused": True},)), "no hyperparameter"),
    ],
)
def test_a_rule_is_declared_with_its_own_numbers_alone(rule: RuleSpec, reason: str, victim: Target) -> None:
    with rogue_in(victim.servers, 1) as rogue:
        rogue.say(Declare(LAST + 1, dense("numbers", 4, rule=rule)))
        rogue.say(DeclareRows(LAST + 2, row_table("numbered rows", rule)))
        for failed in rogue.hear():
            assert isinstance(failed, RequestFailed)
            assert re.search(f"{reason}|has no|no form of", failed.reason), failed.reason


# A rule, numbers of a push in place of its own, and what is said of them.
OUT_OF_RANGE: list[tuple[RuleSpec, dict[str, Any], str]] = [
    (update.torch_optim("SGD", momentum=0.9, fused=True), {"nesterov": 0}, "nesterov is 0, expected True or False"),
    (update.torch_optim("SGD", momentum=0.9), {"weight_decay": True}, "weight_decay is True, expected a number"),
    (update.torch_optim("Adam"), {"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
    (update.torch_optim("Adam"), {"betas": (-1.0, 0.9)}, "Invalid beta parameter"),
    (update.torch_optim("RAdam"), {"betas": (0.9, 2.0)}, "Invalid beta parameter"),
    (update.Adagrad(lr=0.1), {"lr_decay": -1.0}, "Invalid lr_decay value: -1.0"),
    (update.torch_optim("RMSprop"), {"momentum": 0.9}, "momentum was off when 'out of range 6' was declared"),
    (update.DelayedNesterov(lr=0.1, every=2), {"every": 0}, "every is 0, expected a whole number"),
]


def test_a_push_with_numbers_that_a_step_cannot_take_is_refused_and_harms_nothing(victim: Target) -> None:
    """Torch checks ranges when an optimizer is made, and trusts in them at a step: the table would break for all."""
    with rogue_in(victim.servers, 1) as rogue:
        for index, (rule, numbers, _) in enumerate(OUT_OF_RANGE):
            table, seq = f"out of range {index}", 1_000 + 2 * index
            rogue.say(Declare(LAST + 10 + 2 * index, dense(table, 4, rule=rule)))
            rogue.say(Initialise(LAST + 11 + 2 * index, table), bytes_of(VALUES))
            rogue.say(rogue.frame(seq, table, hyper=({**rule.groups[0], **numbers},)), ONES)
            rogue.say(rogue.frame(seq + 1, table, hyper=({**rule.groups[0], "lr": 0.5},)), ONES)
        heard = rogue.hear()
    pushed = [answer for answer in heard if isinstance(answer, PushRefused | Applied)]
    assert [type(answer) for answer in pushed] == [PushRefused, Applied] * len(OUT_OF_RANGE)
    for refused, (_, _, reason) in zip(pushed[::2], OUT_OF_RANGE, strict=True):
        assert isinstance(refused, PushRefused)
        assert reason in refused.reason


def test_zero_and_one_stand_for_false_and_true_as_in_torch() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    sgd = torch.optim.SGD([weight], lr=0.1, momentum=True, nesterov=1)  # pyright: ignore[reportArgumentType]
    numbers = from_optimizer(sgd).groups[0]
    assert (numbers["momentum"], numbers["nesterov"]) == (1, True)
    assert [type(numbers[key]) for key in ("momentum", "nesterov", "fused")] == [int, bool, type(None)]


@pytest.mark.parametrize("switches", [dict.fromkeys(SWITCHES, 1), dict.fromkeys(SWITCHES, 2**62), {"foreach": "yes"}])
def test_torch_sees_no_switch_that_was_sent(switches: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever gets past every check before: torch steps with switches that this process has set itself."""
    seen: list[Any] = []
    step = torch.optim.Adam.step

    def looking(optimizer: torch.optim.Adam) -> None:
        seen.extend(optimizer.param_groups[0][key] for key in SWITCHES)
        step(optimizer)

    monkeypatch.setattr(torch.optim.Adam, "step", looking)
    rule, hyper = TorchRule("torch.optim.Adam"), {**update.torch_optim("Adam").groups[0], **switches}
    for _ in range(2):
        rule.update([torch.zeros(2)], [torch.ones(2)], [hyper], [0])
    assert all(type(one) is bool for one in seen)
    assert seen == [False, True, False, False] * 2


def test_a_fused_table_stays_fused(victim: Target) -> None:
    """Fused steps are a kernel of ours, over state that it makes itself; which one a table has is settled once."""
    rule = update.torch_optim("Adam", fused=True)
    with rogue_in(victim.servers, 1) as rogue:
        rogue.say(Declare(1, dense("fused", 4, rule=rule)))
        rogue.say(Initialise(2, "fused"), bytes_of(VALUES))
        rogue.say(rogue.frame(0, "fused", hyper=update.torch_optim("Adam").groups), ONES)
        rogue.say(rogue.frame(1, "fused", hyper=rule.groups), ONES)
        assert [type(answer) for answer in rogue.hear()] == [RequestDone, RequestDone, PushRefused, Applied]
