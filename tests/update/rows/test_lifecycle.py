from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.update.rows.stores import held, ids_of, push, push_of, rows_of, store_of

from paceline.update.rows import lifecycle as candidates
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.lifecycle import HALVE_AFTER
from paceline.update.rows.ops import row_ops
from paceline.update.rows.spec import Lifecycle
from paceline.update.rows.store import RowStore

IDS = st.lists(st.integers(0, 12), max_size=6)


def living(life: Lifecycle) -> RowStore:
    return store_of(rows_of(life=life))


# -- admission --------------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.lists(st.lists(IDS, min_size=1, max_size=3), max_size=8))
def test_a_row_is_kept_from_its_nth_push_on(admit_after: int, clocks: list[list[list[int]]]) -> None:
    store = living(Lifecycle(admit_after=admit_after))
    seen, kept, num_dropped = Counter[int](), Counter[int](), 0
    for clock, pushes in enumerate(clocks):
        store.apply([push_of(ids) for ids in pushes], clock)
        for ids in pushes:
            seen.update(set(ids))
            kept.update(key for key in ids if seen[key] >= admit_after)
            num_dropped += sum(seen[key] < admit_after for key in ids)
    assert {key: int(row[0]) for key, row in held(store).items()} == dict(kept)
    found = store.statistics()
    assert (found.num_rows, found.num_admitted, found.num_dropped) == (len(kept), len(kept), num_dropped)
    assert found.num_candidates == len(seen) - len(kept)


def test_candidates_read_as_first_values_and_are_not_changed() -> None:
    store = living(Lifecycle(admit_after=2))
    assert push(store, [3]) == []
    assert store.read(ids_of(3), 0).tolist() == [[0.0, 0.0]]
    assert push(store, [4, 3]) == [3]
    assert store.read(ids_of(3), 0).tolist() == [[1.0, 1.0]]


def test_a_row_that_went_is_counted_anew() -> None:
    store = living(Lifecycle(admit_after=2, expire_after=1))
    for clock in (0, 1):
        push(store, [3], clock)
    assert store.advance(9).tolist() == [3]
    assert push(store, [3], 9) == []
    assert push(store, [3], 9) == [3]


def test_candidates_take_bounded_memory_and_are_never_counted_too_often() -> None:
    life = Lifecycle(admit_after=3, memory_bytes=1 << 24, spill="unused")
    limit = candidates.most_candidates(life)
    assert limit == 1 << 14
    waiting = candidates.Candidates(row_ops(), life)
    for start in range(0, 8 * limit, limit // 2):
        ids = torch.arange(start, start + limit // 2)
        again = torch.cat([ids, ids - 3 * limit])  # what was pushed so long ago is forgotten
        admitted = waiting.admit([push_of_ids(again)], absent)
        assert len(admitted.ripe) == 0
        waiting.count(admitted)
        assert len(waiting) <= 2 * limit
        assert waiting.memory_bytes <= candidates.most_candidate_bytes(life)
    waiting.close()


def absent(ids: torch.Tensor) -> torch.Tensor:
    return torch.full_like(ids, -1)


def push_of_ids(ids: torch.Tensor) -> RowContribution:
    return RowContribution(ids, torch.ones(len(ids), 2))


# -- expiry -----------------------------------------------------------------------------------------------------------


def test_rows_expire_that_were_neither_pushed_nor_pulled() -> None:
    store = living(Lifecycle(expire_after=2))
    push(store, [1, 2, 3], clock=0)
    push(store, [2], clock=1)
    store.read(ids_of(3, 3), clock=2)
    assert store.advance(2).tolist() == []
    assert store.advance(3).tolist() == [1]
    assert store.advance(4).tolist() == [2]
    assert store.read(ids_of(2), 4).tolist() == [[0.0, 0.0]]
    assert sorted(held(store)) == [3]
    assert store.statistics().num_expired == 2


def test_the_floor_keeps_the_most_recently_used() -> None:
    store = living(Lifecycle(expire_after=1, floor=2))
    for clock in range(5):
        push(store, [clock], clock)
    assert sorted(store.advance(20).tolist()) == [0, 1, 2]
    assert store.advance(30).tolist() == []
    push(store, [9], 31)
    assert store.advance(40).tolist() == [3]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 3), st.integers(0, 4), st.lists(st.tuples(IDS, IDS), max_size=10))
def test_expiry_is_exact(expire_after: int, floor: int, clocks: list[tuple[list[int], list[int]]]) -> None:
    store = living(Lifecycle(expire_after=expire_after, floor=floor))
    last: dict[int, int] = {}
    for clock, (pushed, pulled) in enumerate(clocks):
        due = sorted(key for key, used in last.items() if clock - used > expire_after)
        gone = store.advance(clock).tolist()
        assert len(gone) == max(0, min(len(due), len(last) - floor))
        assert set(gone) <= set(due)
        stay = [last[key] for key in due if key not in gone]
        assert all(last[key] <= min(stay, default=clock) for key in gone)
        last = {key: used for key, used in last.items() if key not in gone}
        push(store, pushed, clock)
        store.read(ids_of(*pulled), clock)
        last |= dict.fromkeys(pushed, clock)
        last |= {key: clock for key in pulled if key in last}
    assert sorted(held(store)) == sorted(last)


# -- caps -------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go_first() -> None:
    store = living(Lifecycle(max_rows=2))
    push(store, [1, 2], clock=0)
    store.read(ids_of(1), clock=1)
    push(store, [3], clock=2)
    assert len(store) == 3
    assert store.advance(3).tolist() == [2]
    assert store.statistics().num_evicted == 1
    push(store, [4], clock=3)
    assert store.statistics().column_bytes == 3 * (8 + 8 + 4)  # in the place of the one that went


def test_the_least_often_used_go_first_and_old_uses_fade() -> None:
    store = living(Lifecycle(max_rows=2, evict="lfu"))
    for clock in range(6):
        push(store, [1], clock)
    push(store, [2], 6)
    push(store, [2], 6)
    push(store, [3], 6)
    assert store.advance(7).tolist() == [3]
    for _ in range(2 * HALVE_AFTER):
        push(store, [2], 8)
        store.advance(8)
    push(store, [3], 9)
    for _ in range(3):
        push(store, [3], 9)
    assert store.advance(10).tolist() == [1]


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["lru", "lfu"]), st.integers(1, 6), st.lists(st.tuples(IDS, IDS), max_size=6))
def test_the_cap_is_held_and_the_right_rows_go(evict: str, cap: int, clocks: list[tuple[list[int], list[int]]]) -> None:
    store = living(Lifecycle(max_rows=cap, evict=evict))
    key_of: Counter[int] = Counter()
    num_uses = 0
    for clock, (pushed, pulled) in enumerate(clocks, start=1):
        push(store, pushed, clock)
        known = set(key_of) | set(pushed)
        store.read(ids_of(*pulled), clock)
        for used in (set(pushed), known & set(pulled)):
            for key in used:
                key_of[key] = clock if evict == "lru" else key_of[key] + 1
        num_uses += len(set(pushed)) + sum(key in known for key in pulled)
        if evict == "lfu" and num_uses >= HALVE_AFTER * max(1, len(key_of)):
            key_of, num_uses = Counter({key: uses // 2 for key, uses in key_of.items()}), 0
        gone = store.advance(clock).tolist()
        assert len(gone) == max(0, len(key_of) - cap)
        left = [uses for key, uses in key_of.items() if key not in gone]
        assert all(key_of[key] <= min(left) for key in gone)
        key_of = Counter({key: uses for key, uses in key_of.items() if key not in gone})
        assert sorted(held(store)) == sorted(key_of)
        assert len(store) <= cap
