"""A walk through all rows of a store: each once, in pieces, and written back as it was but for what changed."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.update.named_rules import RowwiseAdagrad
from paceline.update.rows.ops import row_ops
from paceline.update.rows.rules import row_rule
from paceline.update.rows.spec import Evict, Lifecycle, RowTableSpec
from paceline.update.rows.store import RowContribution, RowStore
from paceline.update.rows.walk import RowWalk
from paceline.update.table import NonFinite

IDS = torch.arange(1000) * 31 - 700


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.update.rows.walk.PIECE_BYTES", 1)


def make_store(*, evict: Evict = "lru", nonfinite: NonFinite = "reject") -> RowStore:
    life = Lifecycle(max_rows=10_000, expire_after=50, evict=evict)
    spec = RowTableSpec("users", 2, "float32", RowwiseAdagrad(lr=1.0), "bsp", "sum", nonfinite, life=life)
    store = RowStore(spec, row_rule(spec.rule, None), row_ops("torch"))
    for clock, ids in enumerate((IDS, IDS[::3])):
        store.apply([RowContribution(ids, torch.randn(len(ids), 2, generator=torch.Generator().manual_seed(1)))], clock)
    return store


@pytest.fixture
def store() -> Iterator[RowStore]:
    made = make_store()
    yield made
    made.close()


def everything(store: RowStore) -> dict[str, Tensor]:
    piece = store.rows(0, 1 << 20)
    order = piece.ids.argsort()
    return {"ids": piece.ids[order], **{name: column[order] for name, column in piece.columns.items()}}


def test_each_row_comes_once_and_a_look_changes_nothing(store: RowStore) -> None:
    before = everything(store)
    walk = RowWalk(store, clock=9, note=lambda _: None)
    ids = [piece.ids for piece in walk.pieces()]
    assert max(map(len, ids)) == 64
    assert torch.equal(torch.cat(ids).sort().values, IDS)
    after = everything(store)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_only_what_was_changed_differs_and_is_noted(evict: Evict) -> None:
    store = make_store(evict=evict)
    before, noted = everything(store), []
    walk = RowWalk(store, clock=9, note=noted.append)
    for piece in walk.pieces():
        piece.values[piece.ids % 2 == 0] *= 2.0
        walk.put(piece)
    after, even = everything(store), IDS % 2 == 0
    assert torch.equal(torch.cat(noted).sort().values, IDS[even])
    assert walk.num_changed == int(even.sum())
    assert torch.equal(after["values"][even], 2.0 * before["values"][even])
    before["values"][even] *= 2.0
    assert all(torch.equal(before[name], after[name]) for name in before), "use and state as well"
    store.close()


def test_a_piece_may_be_put_back_more_than_once(store: RowStore) -> None:
    before = everything(store)["values"]
    walk = RowWalk(store, clock=9, note=lambda _: None)
    for piece in walk.pieces():
        for _ in range(2):
            piece.values.add_(1.0)
            walk.put(piece)
    assert torch.equal(everything(store)["values"], before + 1.0 + 1.0)
    assert walk.num_changed == 2 * len(IDS)


def test_a_piece_that_cannot_be_put_back_changes_nothing(store: RowStore) -> None:
    before = everything(store)["values"]
    walk = RowWalk(store, clock=9, note=lambda _: None)
    first = next(walk.pieces())
    first.values[3] = torch.nan
    with pytest.raises(UsageError, match="2 of 128 new values of a piece are NaN or infinite"):
        walk.put(first)
    assert torch.equal(everything(store)["values"], before)


def test_a_table_that_ignores_what_is_not_finite_takes_it() -> None:
    store = make_store(nonfinite="ignore")
    walk = RowWalk(store, clock=9, note=lambda _: None)
    for piece in walk.pieces():
        piece.values.fill_(torch.inf)
        walk.put(piece)
    assert everything(store)["values"].isinf().all()
    store.close()
