"""A worker's copy of a table: its own updates show once, whether the values contain them yet or not."""

import pytest
import torch
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.core.partition import Range
from paceline.errors import PeerError
from paceline.update.named_rules import SGD, Adam, Add
from paceline.update.rules import Hyper, RuleSpec
from paceline.update.table import Segment, TableSpec
from paceline.worker.cache import TableCache, can_replay

SPANS = (Range(0, 0, 2), Range(1, 2, 4))


def cache(rule: RuleSpec) -> TableCache:
    spec = TableSpec("w", (Segment("a", (3,)), Segment("b", ())), "float32", rule, "ssp:3", "sum", "reject")
    return TableCache(spec, SPANS, reads_own_writes=True)


def read(copy: TableCache) -> list[float]:
    out = torch.empty(4)
    copy.read_into(out)
    return out.tolist()


def values(*numbers: float) -> memoryview:
    return memoryview(torch.tensor(numbers, dtype=torch.float32).numpy()).cast("B")


def gradient() -> Tensor:
    return torch.tensor([1.0, 2.0, 3.0, 4.0])


def test_each_server_s_part_shows_an_own_update_once() -> None:
    copy = cache(Add())
    copy.note_own(0, gradient(), (), ())
    assert read(copy) == [1, 2, 3, 4]
    copy.install(0, values(1, 2), settled=0, includes=(0,))
    assert read(copy) == [1, 2, 3, 4]
    copy.install(1, values(10, 20), settled=0, includes=())
    assert read(copy) == [1, 2, 13, 24]
    copy.install(1, values(13, 24), settled=1, includes=())
    assert read(copy) == [1, 2, 13, 24]


def test_a_refused_update_shows_no_more() -> None:
    copy = cache(Add())
    copy.note_own(0, gradient(), (), ())
    copy.note_own(1, gradient(), (), ())
    copy.forget_own(0)
    assert read(copy) == [1, 2, 3, 4]


def test_an_own_gradient_acts_at_the_rate_it_was_pushed_with_and_not_on_absent_parameters() -> None:
    copy = cache(SGD(lr=0.5))
    copy.note_own(0, gradient(), (), ())
    copy.note_own(1, gradient(), (1,), ({"lr": 1.0},))
    assert read(copy) == [-1.5, -3.0, -4.5, -2.0]


@pytest.mark.parametrize("more", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"maximize": True}])
def test_what_a_worker_cannot_compute_is_not_shown(more: Hyper) -> None:
    copy = cache(SGD(lr=0.5))
    copy.note_own(0, gradient(), (), ({"lr": 0.5, **more},))  # a schedule that raises the momentum, for example
    assert read(copy) == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("rule", "consistency", "can"),
    [
        (Add(), "ssp:3", True),
        (SGD(lr=0.1), "asynchronous", True),
        (SGD(lr=0.1, momentum=0.9), "ssp:3", False),
        (Adam(), "ssp:3", False),
        (Add(), "bsp", False),
    ],
)
def test_own_updates_are_replayed_where_their_effect_is_plain(rule: RuleSpec, consistency: str, can: bool) -> None:
    assert can_replay(cache(rule).spec, Consistency.parse(consistency)) is can


@pytest.mark.parametrize("sent", [(), (1.0,), (1.0, 2.0, 3.0)])
def test_values_of_another_size_than_the_part_are_not_taken_in(sent: tuple[float, ...]) -> None:
    copy = cache(Add())
    copy.install(1, values(5.0, 6.0), 0, ())
    with pytest.raises(PeerError, match=f"server 1 sent {4 * len(sent)} bytes as its part of table 'w', expected 8"):
        copy.install(1, values(*sent), 0, ())
    assert read(copy)[2:] == [5.0, 6.0]
