"""What an update will make of a part of a shard is known before the rest of the gradients is there, to the bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from paceline.core.partition import Range
from paceline.errors import ProtocolBug
from paceline.update.named_rules import SGD, Adam, Add, resolve
from paceline.update.rules import Quorum, RuleSpec
from paceline.update.shard import Shard
from paceline.update.summing import Contribution
from paceline.update.table import Segment, TableSpec

SIZES = (37, 300, 5, 700)
NUMEL = sum(SIZES)
CUTS = (0, 16, 128, 340, 344, 1000, NUMEL)  # some in the middle of segments, some around whole ones
ADAFACTOR = RuleSpec("torch.optim.Adafactor", ({},))
RULES = {
    "add": Add(),
    "sgd": SGD(lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": Adam(lr=0.01),
    "fused": RuleSpec("torch.optim.Adam", ({**Adam(lr=0.01).groups[0], "fused": True},)),
}


def make_shard(rule: RuleSpec, dtype: str = "float32") -> Shard:
    segments = tuple(Segment(str(number), (size,)) for number, size in enumerate(SIZES))
    spec = TableSpec("w", segments, dtype, rule, "bsp", "samples", "zero")
    span = Range(0, 3, NUMEL)  # as of a server whose range begins inside of a segment
    shard = Shard(spec, span, rule=resolve(rule, frozenset()))
    shard.store(torch.linspace(-1, 1, span.length, dtype=getattr(torch, dtype)))
    return shard


def contributions(shard: Shard, step: int) -> list[Contribution]:
    rng = torch.Generator().manual_seed(step)
    gradients = [torch.randn(shard.span.length, generator=rng).to(shard.values.dtype) for _ in range(3)]
    gradients[1][::97] = torch.nan
    absent = (frozenset({1}), frozenset(), frozenset({1, 2}))
    counts = (1.0, 2.0, 5.0)
    return [
        Contribution(gradient, count, gone, expected=9.0)
        for gradient, count, gone in zip(gradients, counts, absent, strict=True)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", RULES)
def test_a_part_is_what_the_update_makes_of_it_and_nothing_changes_before(rule: str, dtype: str) -> None:
    shard = make_shard(RULES[rule], dtype)
    assert shard.can_preview
    for step in range(3):
        pushed = contributions(shard, step)
        before = {name: value.clone() for name, value in shard.state().items()}
        cuts = [min(cut, shard.span.length) for cut in CUTS]
        parts = [shard.preview(*cut, pushed) for cut in pairwise(cuts)]
        after = shard.state()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert shard.version == step
        shard.apply(pushed)
        assert torch.equal(torch.cat(parts), shard.values)


def test_rules_that_need_whole_tensors_or_wait_for_a_quorum_know_nothing_before() -> None:
    spec = TableSpec("w", (Segment("w", (4,)),), "float32", ADAFACTOR, "bsp", "mean", "zero")
    whole = Shard(spec, Range(0, 0, 4), rule=resolve(ADAFACTOR, frozenset()))
    assert not whole.can_preview
    with pytest.raises(ProtocolBug, match="updates whole tensors at once"):
        whole.preview(0, 4, [Contribution(torch.ones(4))])
    waiting = RuleSpec("add", ({},), quorum=Quorum(2, 0.0, 4))
    spec = TableSpec("w", (Segment("w", (4,)),), "float32", waiting, "asynchronous", "mean", "zero")
    assert not Shard(spec, Range(0, 0, 4), rule=resolve(waiting, frozenset())).can_preview
