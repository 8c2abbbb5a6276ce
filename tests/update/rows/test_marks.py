"""Cuts of the rows that have changed: with the cut before them they are all rows, bit for bit."""

import random

import pytest
import torch
from safetensors.torch import load
from tests.update.rows.stores import ids_of, push, rows_of, store_of
from tests.update.rows.test_row_cuts import Rows, all_rows, rows_in

from paceline.update.named_rules import Adam
from paceline.update.rows import cuts
from paceline.update.rows.cuts import REMOVED, RowsCut
from paceline.update.rows.marks import RowMarks
from paceline.update.rows.spec import Lifecycle


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "PIECE_BYTES", 200)


def read_all(cut: RowsCut) -> Rows:
    found = Rows()
    for index in range(cut.num_pieces):
        found |= rows_in(load(bytes(cut.read(index))))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_changes_on_top_of_what_was_there_are_all_rows(seed: int) -> None:
    choose = random.Random(seed)
    life = [Lifecycle(), Lifecycle(expire_after=2), Lifecycle(max_rows=30, evict="lfu")][seed % 3]
    store, clock = store_of(rows_of(Adam(lr=0.1), life)), 0

    def change() -> None:
        nonlocal clock
        kind = choose.random()
        if kind < 0.5:
            push(store, choose.sample(range(60), 4), clock)
        elif kind < 0.7:
            clock += 1
            store.advance(clock)
        elif kind < 0.85:
            store.read(ids_of(*choose.sample(range(60), 3)), clock)
        else:
            store.load(store.rows(choose.randrange(20), 3), clock)

    rows, marks, num_read, num_rows = Rows(), "", 0, 0
    for _ in range(15):
        for _ in range(choose.randrange(6)):
            change()
        expected, cut = all_rows(store), store.cut(since=marks)
        assert cut.base == marks
        for each in cut.fixed.get(REMOVED, torch.empty(0)).tolist():
            rows.pop(each, None)
        for _ in range(choose.randrange(3)):
            change()  # before it is read
        found = read_all(cut)
        num_read, num_rows = num_read + len(found), num_rows + len(expected)
        rows |= found
        assert rows == expected
        marks = cut.marks
    if not life.max_rows:  # where uses fade, all rows change
        assert num_read < num_rows, "it is not that all rows come each time"
    store.close()


def test_a_cut_that_names_other_marks_has_all_rows() -> None:
    store = store_of(rows_of())
    push(store, range(50))
    first = store.cut(since="")
    push(store, [3])
    assert (first.base, len(read_all(store.cut(since="of another server")))) == ("", 50)
    assert len(read_all(store.cut(since=first.marks))) == 50, "these are of the cut before the last"
    plain = store.cut()
    assert (plain.base, plain.marks) == ("", "")
    store.close()


def test_marks_take_a_byte_a_slot_however_often_rows_go() -> None:
    marks = RowMarks(0)
    for _ in range(1000):
        marks.note(torch.arange(10))
        marks.note_removed(torch.arange(10))
    assert len(marks._removed) <= 65
    assert marks.removed.tolist() == list(range(10))
    marks.note_all(20)
    assert marks.changed(20).all()
    assert marks.changed(30).sum() == 20
