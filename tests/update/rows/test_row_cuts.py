"""Cuts of rows: what they were at one moment, whatever comes, goes and changes before each piece is read."""

import random

import pytest
import torch
from safetensors.torch import load
from tests.update.rows.stores import ids_of, push, rows_of, store_of

from paceline.errors import UsageError
from paceline.update.named_rules import Adam
from paceline.update.rows import cuts
from paceline.update.rows.cuts import RowsCut
from paceline.update.rows.spec import Lifecycle
from paceline.update.rows.store import RowStore

Rows = dict[int, tuple[list[float], ...]]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "PIECE_BYTES", 200)


def rows_in(columns: dict[str, torch.Tensor]) -> Rows:
    ids, names = columns["ids"].tolist(), sorted(columns.keys() - {"ids"})
    assert len(set(ids)) == len(ids)
    return {each: tuple(columns[name][at].tolist() for name in names) for at, each in enumerate(ids)}


def all_rows(store: RowStore) -> Rows:
    piece = store.rows(0, 1 << 20)
    return rows_in({"ids": piece.ids, **piece.columns})


def read(cut: RowsCut, index: int) -> Rows:
    return rows_in(load(bytes(cut.read(index))))


@pytest.mark.parametrize("seed", range(8))
def test_a_cut_has_the_rows_of_its_moment_whenever_each_piece_is_read(seed: int) -> None:
    choose = random.Random(seed)
    life = [Lifecycle(), Lifecycle(expire_after=2), Lifecycle(max_rows=30, evict="lfu")][seed % 3]
    store, clock = store_of(rows_of(Adam(lr=0.1), life)), 0

    def change() -> None:
        nonlocal clock
        kind = choose.random()
        if kind < 0.5:
            push(store, choose.sample(range(60), 9), clock)
        elif kind < 0.7:
            clock += 1
            store.advance(clock)
        elif kind < 0.85:
            store.read(ids_of(*choose.sample(range(60), 5)), clock)
        else:
            store.load(store.rows(0, 7), clock)

    for _ in range(20):
        change()
    expected, cut, found = all_rows(store), store.cut(), Rows()
    for index in choose.sample(range(cut.num_pieces), cut.num_pieces):
        for _ in range(choose.randrange(3)):
            change()
        found |= read(cut, index)
    assert found == expected
    assert cut.is_over
    store.close()


def test_only_rows_that_change_are_kept() -> None:
    store = store_of(rows_of())
    push(store, range(100))
    cut = store.cut()
    push(store, [5, 200])
    push(store, [5, 6, 200])
    assert cut.most_kept_bytes == 2 * store.row_bytes
    store.close()


def test_a_cut_is_given_up_where_memory_is_short() -> None:
    store = store_of(rows_of())
    push(store, range(100))
    cut = store.cut(lambda num_bytes: num_bytes < 10 * store.row_bytes)
    push(store, range(20))
    with pytest.raises(UsageError, match="no memory for what they change"):
        cut.read(0)
    store.close()


def test_a_piece_that_could_not_be_copied_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(_: torch.Tensor) -> dict[str, torch.Tensor]:
        raise MemoryError

    store = store_of(rows_of())
    push(store, range(100))
    expected, cut, found = all_rows(store), store.cut(), Rows()
    with monkeypatch.context() as patched:
        patched.setattr(cut, "_copies", short)
        with pytest.raises(MemoryError):
            cut.read(0)
    push(store, range(50))
    for index in range(cut.num_pieces):
        found |= read(cut, index)
    assert found == expected
    store.close()
