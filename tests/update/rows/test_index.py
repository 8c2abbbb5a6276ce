"""The index against a dict, by both kinds of operations in step."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.update.rows.trials import AVAILABLE, BOTH, EXTREMES, keys, longest_way, placed_at

from paceline.errors import ProtocolBug, UsageError
from paceline.update.rows import index as index_module
from paceline.update.rows.column import RowColumn, unnamed_file
from paceline.update.rows.index import NO_SEED, RowIndex, Seed
from paceline.update.rows.ops import row_ops

# At the end of the smallest index, and around it to the start; some with the same upper bits, some without.
HASHES = product((3, 4, 1 << 31), (0, 5), (1021, 1023, 0))
COLLIDING = tuple(placed_at(upper << 32 | lower << 10 | home) for upper, lower, home in HASHES)
KEYS = st.lists(st.sampled_from(COLLIDING + EXTREMES) | st.integers(-40, 40), max_size=40)


def new_index(name: str, seed: Seed | None = None) -> RowIndex:
    return RowIndex(row_ops(name), RowColumn(1, torch.int64), seed)


class IndexAgainstDict(RuleBasedStateMachine):
    """Indexes do what a dict does, and all of them the same."""

    @initialize()
    def begin(self) -> None:
        self.indexes = [new_index(name, NO_SEED) for name in AVAILABLE]
        self.model = dict[int, int]()

    @rule(numbers=KEYS)
    def add(self, numbers: list[int]) -> None:
        self.check_add(numbers)

    @rule(start=st.integers(0, 3))
    def add_many(self, start: int) -> None:
        self.check_add([start * 1000 + number for number in range(900)])

    def check_add(self, numbers: list[int]) -> None:
        new = [number for number in dict.fromkeys(numbers) if number not in self.model]
        results = [index.add(keys(*numbers)) for index in self.indexes]
        slots, added = (part.tolist() for part in results[0])
        assert all(slots == other.tolist() and added == where.tolist() for other, where in results)
        assert added == [numbers.index(number) for number in new]
        taken = set(self.model.values())
        self.model.update((number, slots[position]) for number, position in zip(new, added, strict=True))
        assert slots == [self.model[number] for number in numbers]
        assert len(taken | {self.model[number] for number in new}) == len(taken) + len(new)

    @rule(numbers=KEYS)
    def remove(self, numbers: list[int]) -> None:
        self.check_remove([number for number in dict.fromkeys(numbers) if number in self.model])

    @rule(share=st.integers(1, 5), first=st.integers(0, 4))
    def remove_many(self, share: int, first: int) -> None:
        self.check_remove(list(self.model)[first::share])

    def check_remove(self, gone: list[int]) -> None:
        slots = keys(*(self.model.pop(number) for number in gone))
        for index in self.indexes:
            index.remove(slots)

    @rule(numbers=KEYS)
    def find(self, numbers: list[int]) -> None:
        for index in self.indexes:
            assert index.find(keys(*numbers)).tolist() == [self.model.get(number, -1) for number in numbers]

    @invariant()
    def holds_the_same(self) -> None:
        for index in self.indexes:
            assert len(index) == len(self.model)
            live = index.live_slots()
            assert live.tolist() == sorted(self.model.values())
            assert live.numel() == 0 or live[-1] < index.num_slots
            ids = index.ids_of(live)
            assert [self.model[number] for number in ids.tolist()] == live.tolist()
            assert torch.equal(index.find(ids), live)

    def teardown(self) -> None:
        for index in self.indexes:
            index.close()


IndexAgainstDict.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestIndexAgainstDict = IndexAgainstDict.TestCase


FLOOD = [placed_at(upper << 32 | 5) for upper in range(1, 1501)]  # all belong to one place where there is no seed


@pytest.mark.parametrize("name", BOTH)
def test_ids_that_were_chosen_to_get_in_each_others_way_do_not(name: str) -> None:
    plain, drawn = new_index(name, NO_SEED), new_index(name)
    for index in (plain, drawn):
        slots, added = index.add(torch.tensor(FLOOD))
        assert slots.tolist() == added.tolist() == list(range(len(FLOOD)))
        index.remove(slots[::2].contiguous())
        assert index.find(torch.tensor(FLOOD)).tolist() == [-1 if slot % 2 == 0 else slot for slot in range(len(FLOOD))]
        index.add(torch.tensor(FLOOD))
    assert longest_way(plain) == len(FLOOD) - 1  # the attack works
    assert longest_way(drawn) < 300  # by chance about 40 of 2048 entries
    plain.close()
    drawn.close()


@pytest.mark.parametrize("name", BOTH)
def test_slots_and_orders_do_not_depend_on_the_seed(name: str) -> None:
    indexes = [new_index(name) for _ in range(4)]
    assert len({index._seed for index in indexes}) == 4
    for start, stop in ((0, 2000), (1000, 5000)):
        ids = torch.arange(start, stop) * 7919
        results = [index.add(ids) for index in indexes]
        assert all(torch.equal(slots, results[0][0]) for slots, _ in results)
        assert all(torch.equal(added, results[0][1]) for _, added in results)
        for index in indexes:
            index.remove(index.find(ids[::3].contiguous()))
    assert len({tuple(index.live_slots().tolist()) for index in indexes}) == 1
    for index in indexes:
        index.close()


@pytest.mark.parametrize("name", BOTH)
def test_memory_is_as_stated_while_rows_come(name: str) -> None:
    index = new_index(name)
    for start in range(0, 60_000, 3000):
        index.add(torch.arange(start, start + 3000) * 7)
        assert 8 + 8 * 4 / 3 <= index.memory_bytes / len(index) < 8 + 8 * 8 / 3
    assert index.find(torch.arange(60_000) * 7).tolist() == list(range(60_000))
    index.close()


@pytest.mark.parametrize("name", BOTH)
def test_known_ids_need_no_room(name: str) -> None:
    index = new_index(name)
    index.add(torch.arange(768))
    before = index.memory_bytes
    index.add(torch.arange(768).repeat(50))
    assert index.memory_bytes == before
    index.add(keys(768))
    assert index.memory_bytes == before + 8 * 1024 + 8
    index.close()


@pytest.mark.parametrize("name", BOTH)
def test_ids_may_lie_in_a_file(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    ids = RowColumn(1, torch.int64, unnamed_file(str(tmp_path_factory.mktemp("spill"))))
    index = RowIndex(row_ops(name), ids)
    for start in range(0, 20_000, 5000):
        index.add(torch.arange(start, start + 5000))
        ids.trim()
    assert index.find(torch.arange(20_000)).tolist() == list(range(20_000))
    index.close()


def test_removing_what_is_not_there_is_refused() -> None:
    index = new_index("")
    index.add(keys(1, 2))
    index.remove(keys(0))
    for wrong in (keys(0), keys(2), keys(-1), keys(1, 1)):
        with pytest.raises(ProtocolBug, match=r"index|erased"):
            index.remove(wrong)
    index.close()


def test_an_index_that_has_no_memory_to_grow_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    index = new_index("")
    slots, _ = index.add(torch.arange(600))
    index.remove(slots[100:200])
    with monkeypatch.context() as patched:
        patched.setattr(index_module, "num_entries", lambda _: 1 << 45)
        with pytest.raises(UsageError, match=f"needs {1 << 48} bytes of memory for its index"):
            index.add(torch.arange(1001))
    found = index.find(torch.arange(600))
    assert torch.equal(found.sort().values[100:], torch.cat([slots[:100], slots[200:]]))
    index.add(torch.arange(1001))
    assert len(index) == 1001
    index.close()


def test_more_rows_than_slots_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_ROWS", 1000)
    index = new_index("")
    index.add(torch.arange(600))
    with pytest.raises(UsageError, match="would have 1001 rows of one table, it can have 1000"):
        index.add(torch.arange(1001))
    assert len(index) == 600
    index.close()
