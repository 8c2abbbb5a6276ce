from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tests.update.rows.stores import held, ids_of, push, rows_of, store_of

from paceline.errors import ProtocolBug, UsageError
from paceline.update.named_rules import SGD, Add
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.export import load_rows, save_rows
from paceline.update.rows.layout import RowPiece
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import Lifecycle, RowTableSpec
from paceline.update.rows.store import RowStore

SPEC = rows_of(SGD(lr=0.5, momentum=0.5), Lifecycle(expire_after=5, max_rows=1000, evict="lfu"), width=3)


def pieces(store: RowStore, limit: int = 7) -> Iterator[RowPiece]:
    start: int | None = 0
    while start is not None:
        piece = store.rows(start, limit)
        yield piece
        start = piece.next_slot


def filled(spec: RowTableSpec = SPEC) -> RowStore:
    store, random = store_of(spec), torch.Generator().manual_seed(0)
    for clock in range(4):
        ids = torch.randint(-50, 50, (40,), generator=random)
        rows = torch.randn(40, spec.width, generator=random).to(getattr(torch, spec.dtype))
        store.apply([RowContribution(ids, rows)], clock)
        store.advance(clock)
    return store


def saved(store: RowStore, path: Path) -> Path:
    save_rows(path, store.spec, row_rule(store.spec.rule, None), pieces(store), len(store))
    return path


def loaded(spec: RowTableSpec, path: Path) -> RowStore:
    store = store_of(spec)
    for piece in load_rows(path, spec, row_rule(spec.rule, None)):
        store.load(piece, clock=0)
    return store


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_a_table_that_was_saved_goes_on_as_if_nothing_had_been(tmp_path: Path, dtype: str) -> None:
    store = filled(replace(SPEC, dtype=dtype))
    again = loaded(store.spec, saved(store, tmp_path / "rows.safetensors"))
    assert [path.name for path in tmp_path.iterdir()] == ["rows.safetensors"]
    rows = torch.randn(80, 3).to(getattr(torch, dtype))
    for clock in range(4, 12):
        for each in (store, again):
            each.apply([RowContribution(torch.arange(0, 80), rows)], clock)
        assert sorted(store.advance(clock).tolist()) == sorted(again.advance(clock).tolist())
    ours, theirs = held(store), held(again)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(row, theirs[key]) for key, row in ours.items())


def test_any_reader_of_safetensors_can_read_it(tmp_path: Path) -> None:
    store = filled()
    tensors = load_file(saved(store, tmp_path / "rows"))
    assert set(tensors) == {"ids", "values", "state.momentum_buffer", "last_used", "num_uses"}
    assert torch.equal(store.read(tensors["ids"], 0), tensors["values"])


def test_an_empty_table(tmp_path: Path) -> None:
    assert len(loaded(SPEC, saved(store_of(SPEC), tmp_path / "rows"))) == 0


def test_rows_that_went_are_not_saved(tmp_path: Path) -> None:
    spec = rows_of(life=Lifecycle(expire_after=1))
    store = store_of(spec)
    push(store, [1, 2, 3], 0)
    push(store, [2], 5)
    assert sorted(store.advance(5).tolist()) == [1, 3]
    assert sorted(held(loaded(spec, saved(store, tmp_path / "rows")))) == [2]


def test_loading_overwrites_rows_and_keeps_others() -> None:
    store, other = store_of(rows_of()), store_of(rows_of())
    push(store, [1, 2])
    for _ in range(3):
        push(other, [2, 3])
    store.load(other.rows(0, 10), 0)
    assert store.read(ids_of(1, 2, 3), 0)[:, 0].tolist() == [1.0, 3.0, 3.0]


def test_pieces_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    store = filled()
    piece = store.rows(0, 10)
    for wrong in (
        replace(piece, ids=piece.ids[:1]),
        replace(piece, columns={"values": piece.values}),
        replace(piece, ids=piece.ids * 0),
    ):
        with pytest.raises(ProtocolBug):
            store_of(SPEC).load(wrong, 0)
    with pytest.raises(ProtocolBug, match="expected 1000"):
        save_rows(tmp_path / "rows", SPEC, row_rule(SPEC.rule, None), pieces(store), 1000)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    path = saved(filled(), tmp_path / "rows")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(UsageError, match="not a whole file of rows"):
        loaded(SPEC, path)


def test_a_single_wrong_bit_is_noticed(tmp_path: Path) -> None:
    path = saved(filled(), tmp_path / "rows")
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)
    with pytest.raises(UsageError, match="is damaged: the checksum"):
        loaded(SPEC, path)


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    save_file({"weight": torch.ones(3)}, foreign)
    with pytest.raises(UsageError, match=r"has format ''.*needs 'paceline rows"):
        loaded(SPEC, foreign)
    foreign.write_text("not tensors")
    with pytest.raises(UsageError, match="not a whole file of rows"):
        loaded(SPEC, foreign)
    with pytest.raises(UsageError, match="missing"):
        loaded(SPEC, tmp_path / "missing")


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(SPEC, name="other"), "table 'rows'"),
        (replace(SPEC, width=4), "width '3'"),
        (replace(SPEC, dtype="float64"), "dtype 'float32'"),
        (replace(SPEC, rule=Add()), "rule 'torch.optim.SGD'"),
        (replace(SPEC, rule=SGD(lr=0.5)), ""),
    ],
)
def test_a_file_of_another_table_is_refused(tmp_path: Path, other: RowTableSpec, what: str) -> None:
    path = saved(filled(), tmp_path / "rows")
    if what:
        with pytest.raises(UsageError, match=what):
            loaded(other, path)
    else:  # more state than this rule needs
        assert len(loaded(other, path)) > 0


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written to"):
        saved(filled(), tmp_path / "missing" / "rows")


def test_what_is_there_and_is_no_file_stays_as_it_is(tmp_path: Path) -> None:
    """To put a file in the place of a device would take it from all programs of the machine."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    link = tmp_path / "link"
    link.symlink_to(pipe)
    for path in (pipe, link, tmp_path, Path("/")):
        with pytest.raises(UsageError, match=r"cannot be written to .*: that is there, and is not a file to replace"):
            saved(filled(), path)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, pipe]
    assert saved(filled(), saved(filled(), tmp_path / "rows")).is_file(), "a file is replaced"
