"""Rules for workers out of step, against what they say in plain Python: quorum, grace window, delayed momentum."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from msgspec.structs import replace
from tests.update.tables import SEGMENTS, apply, flat_values, pushes, shards_of, start_values, store, table

from paceline.core.partition import Range
from paceline.errors import UsageError
from paceline.training.state import gather_optimizer, split_optimizer
from paceline.update.named_rules import SGD, Add, DelayedNesterov, Merging, resolve
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Quorum, RuleSpec
from paceline.update.shard import Merger, Shard
from paceline.update.summing import Contribution
from paceline.update.table import Segment, TableSpec, decode_table, differences, encode_table

ONE = (Segment("w", (1,)),)


@dataclass
class Clock:
    """Time that passes when the test says so."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def merging(rule: RuleSpec, clock: Clock, *, quorum: int, num_workers: int = 4, grace_s: float = 0.0) -> Shard:
    waiting = Merging(rule, quorum=quorum, num_workers=num_workers, grace_s=grace_s)
    spec = replace(table(waiting, ONE), consistency="asynchronous", scale="samples")
    spec.validate()
    return Shard(spec, Range(0, 0, 1), rule=resolve(spec.rule, frozenset()), now=clock)


def arrive(shard: Shard, value: float, worker: int, count: float = 1.0) -> None:
    gradient = torch.tensor([value])
    shard.apply([Contribution(gradient, count, worker=worker)])
    gradient.fill_(-1e9)  # the memory of a push is used again


@dataclass
class PlainServer:
    """What `Merging` says, as slowly as it can be said."""

    quorum: Quorum
    waiting: list[tuple[float, int]] = field(default_factory=list)  # (when it came, from which worker)
    merges: list[list[int]] = field(default_factory=list)

    def look(self, now: float) -> None:
        due_at = float("inf")
        if len(self.waiting) >= self.quorum.num_pushes:
            due_at = self.waiting[self.quorum.num_pushes - 1][0] + self.quorum.grace_s
        if now >= due_at or len({worker for _, worker in self.waiting}) >= self.quorum.num_workers:
            self.merges.append([worker for _, worker in self.waiting])
            self.waiting = []

    def push(self, now: float, worker: int) -> None:
        self.look(now)
        self.waiting.append((now, worker))
        self.look(now)


@pytest.mark.parametrize("seed", range(20))
def test_every_push_is_in_one_merge_and_that_is_the_right_one(seed: int) -> None:
    draw = random.Random(seed)
    num_workers = draw.randint(1, 5)
    quorum = Quorum(draw.randint(1, num_workers), draw.choice([0.0, 1.0, 3.0]), num_workers)
    clock, plain = Clock(), PlainServer(quorum)
    merger, found = Merger(quorum, clock), list[list[int]]()
    arrived = Counter[int]()
    for _ in range(60):
        clock.now_s += draw.choice([0.0, 0.25, 1.0, 2.0])
        due = [merger.pop_due()]
        if draw.random() < 0.3:  # a read
            plain.look(clock.now_s)
        else:
            worker = draw.randrange(num_workers)
            arrived[worker] += 1
            merger.keep([Contribution(torch.ones(1), worker=worker)])
            due.append(merger.pop_due())
            plain.push(clock.now_s, worker)
        found += [[each.worker for each in merge] for merge in due if merge]
        assert found == plain.merges
    found.append([each.worker for each in merger.pop_all()])
    assert Counter(worker for merge in found for worker in merge) == arrived


def test_pushes_wait_for_the_quorum_and_then_for_the_grace_window() -> None:
    clock = Clock()
    shard = merging(SGD(lr=0.5), clock, quorum=2, grace_s=10.0)
    arrive(shard, 2.0, worker=0)
    clock.now_s = 100.0
    shard.settle()
    assert shard.values.item() == 0.0
    arrive(shard, 4.0, worker=1)
    clock.now_s = 109.0
    arrive(shard, 9.0, worker=2, count=2.0)
    assert shard.values.item() == 0.0
    clock.now_s = 110.0
    shard.settle()
    assert shard.values.item() == -0.5 * (2 + 4 + 2 * 9) / 4
    assert shard.version == 1
    arrive(shard, 1.0, worker=3)
    shard.settle()
    assert shard.version == 1


def test_what_comes_after_the_window_goes_with_the_next_merge() -> None:
    clock = Clock()
    shard = merging(Add(), clock, quorum=1, grace_s=1.0)
    arrive(shard, 1.0, worker=0)
    clock.now_s = 5.0
    arrive(shard, 10.0, worker=1)  # without a read in between
    assert (shard.values.item(), shard.version) == (1.0, 1)
    clock.now_s = 6.0
    shard.settle()
    assert (shard.values.item(), shard.version) == (11.0, 2)


def test_no_worker_is_waited_for_once_all_have_come() -> None:
    clock = Clock()
    shard = merging(Add(), clock, quorum=1, num_workers=3, grace_s=1e6)
    for worker in (0, 1, 1):
        arrive(shard, 3.0, worker)
    assert shard.version == 0  # one worker has come twice, another not at all
    arrive(shard, 3.0, worker=2)
    assert (shard.values.item(), shard.version) == (3.0, 1)


def test_a_saved_state_lacks_no_push_and_a_loaded_one_has_none_of_before() -> None:
    clock = Clock()
    shard = merging(SGD(lr=1.0, momentum=0.5), clock, quorum=3)
    arrive(shard, 1.0, worker=0)
    shard.settle(all_kept=True)
    state = {name: value.clone() for name, value in shard.state().items()}
    assert shard.values.item() == -1.0
    arrive(shard, 100.0, worker=0)
    shard.load_state(state)
    shard.settle(all_kept=True)
    assert shard.values.item() == -1.0
    for worker in range(3):
        arrive(shard, 1.0, worker)
    assert shard.values.item() == -1.0 - 1.5


def test_a_declared_quorum_without_use_is_told() -> None:
    rule = Merging(SGD(lr=1.0), quorum=2, num_workers=2)
    for policy in ("bsp", "ssp:3"):  # which promise that what was pushed some clocks ago is in what is read
        with pytest.raises(UsageError, match=f"{policy} waits for clocks: take asynchronous"):
            replace(table(rule), consistency=policy).validate()
    with pytest.raises(UsageError, match="only tables of a shape"):
        RowTableSpec("rows", 2, "float32", rule, "asynchronous", "sum", "reject").validate()
    spec = replace(table(rule), consistency="asynchronous")
    assert decode_table(encode_table(spec)) == spec
    other = replace(spec, rule=SGD(lr=1.0))
    assert differences(spec, other) == [
        "the quorum is Quorum(num_pushes=2, grace_s=0.0, num_workers=2) here and None there."
    ]
    for numbers in ({"quorum": 0}, {"quorum": 3}, {"quorum": 1, "grace_s": -1.0}):
        with pytest.raises(UsageError, match="expected"):
            Merging(SGD(lr=1.0), num_workers=2, **numbers)


# -- delayed Nesterov ------------------------------------------------------------------------------------------------


def delayed(every: int, momentum: float = 0.9, dtype: str = "float64") -> TableSpec:
    rule = DelayedNesterov(0.7, momentum, every=every)
    return replace(table(replace(rule, groups=rule.groups * 2), SEGMENTS), dtype=dtype)


def test_delayed_momentum_is_what_plain_python_says() -> None:
    spec = replace(table(DelayedNesterov(0.7, 0.9, every=3), ONE), dtype="float64")
    shard = Shard(spec, Range(0, 0, 1), rule=resolve(spec.rule, frozenset()))
    value, buffer, kept = 0.0, 0.0, list[float]()
    for arrival in range(10):
        gradient = float(arrival * arrival % 7 - 2)
        shard.apply([Contribution(torch.tensor([gradient], dtype=torch.float64))])
        kept.append(gradient)
        value -= 0.7 * gradient / 3
        if len(kept) == 3:
            buffer = 0.9 * buffer + sum(kept) / 3
            value -= 0.7 * 0.9 * buffer
            kept = []
        assert shard.values.item() == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("num_servers", [1, 3])
def test_so_many_updates_are_one_step_with_their_mean(num_servers: int) -> None:
    spec = delayed(every=4)
    shards = shards_of(spec, num_servers)
    start = start_values(spec)
    store(shards, start)
    parameter = torch.nn.Parameter(start.clone())
    plain = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    found = [
        torch.randn(spec.numel, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(12)
    ]
    for first in range(0, 12, 4):
        for gradient in found[first : first + 4]:
            for shard in shards:
                shard.apply([Contribution(gradient[shard.span.start : shard.span.stop])])
        parameter.grad = torch.stack(found[first : first + 4]).mean(0)
        plain.step()
        torch.testing.assert_close(flat_values(shards), parameter.detach(), rtol=1e-12, atol=1e-12)


def test_delayed_momentum_goes_on_from_a_saved_state_on_other_servers() -> None:
    spec = delayed(every=3, dtype="float32")
    whole, cut = shards_of(spec, 1), shards_of(spec, 3)
    for shards in (whole, cut):
        store(shards, start_values(spec))
        for step in range(4):
            apply(shards, pushes(spec, step, num_workers=1))
    assert torch.equal(flat_values(whole), flat_values(cut))
    state = gather_optimizer(spec, [(shard.span, shard.state()) for shard in cut])
    values = flat_values(cut)
    other = shards_of(spec, 2)
    for shard in other:
        loaded = split_optimizer(spec, state, shard.span)
        shard.load_state({**loaded, "values": values[shard.span.start : shard.span.stop]})
    for step in range(4, 9):
        for shards in (whole, other):
            apply(shards, pushes(spec, step, num_workers=1))
    assert torch.equal(flat_values(whole), flat_values(other))


def test_numbers_that_delay_nothing_are_refused() -> None:
    for numbers in ({"lr": 0.0, "every": 2}, {"lr": 1.0, "momentum": 1.0, "every": 2}, {"lr": 1.0, "every": 0}):
        with pytest.raises(UsageError, match="expected"):
            DelayedNesterov(**numbers)
