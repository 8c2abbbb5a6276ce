from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.update.rows.stores import RANDOM_FIRST, Model, held, ids_of, push, push_of, rows_of, store_of

from paceline.errors import ProtocolBug, UsageError
from paceline.update.named_rules import FTRL, SGD, Adagrad, Adam, AdaptiveRevision, Add, RowwiseAdagrad
from paceline.update.rows.contribution import RowContribution
from paceline.update.rows.layout import RowStatistics, index_bytes, row_bytes
from paceline.update.rows.memory import PIECE_ROWS, RowColumns
from paceline.update.rows.native_ops import load_library
from paceline.update.rows.rules import row_rule

RULES = (
    Add(),
    SGD(lr=0.1, momentum=0.9),
    Adagrad(lr=0.1),
    RowwiseAdagrad(lr=0.1),
    Adam(lr=0.1),
    FTRL(alpha=0.1, beta=1.0, l1=0.01, l2=0.1),
    AdaptiveRevision(lr=0.1),
)
OPS = ["torch"] if isinstance(load_library(), str) else ["torch", "native"]
EDGE = st.sampled_from([0, -1, 2**63 - 1, -(2**63), 5, 6, 7])
IDS = st.lists(EDGE | st.integers(0, 30), max_size=12)
NUMBERS = st.integers(-8, 8).map(float)


@st.composite
def updates(draw: st.DrawFn, *, echo: bool) -> list[RowContribution]:
    """One to three pushes; sums of their numbers are exact in any order only where they are small."""
    pushes: list[RowContribution] = []
    for _ in range(draw(st.integers(1, 3))):
        ids = draw(IDS)
        rows = torch.tensor(draw(st.lists(NUMBERS, min_size=2 * len(ids), max_size=2 * len(ids)))).view(-1, 2) / 3
        echoes = rows.round() if echo and draw(st.booleans()) else None
        pushes.append(RowContribution(ids_of(*ids), rows, draw(st.sampled_from([1.0, 2.0, 5.0])), echo=echoes))
    return pushes


@pytest.mark.parametrize("ops", OPS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_store_does_what_a_dict_of_rows_does(ops: str, data: st.DataObject) -> None:
    scale = data.draw(st.sampled_from(["sum", "mean", "samples"]))
    spec = replace(rows_of(data.draw(st.sampled_from(RULES))), scale=scale, first=RANDOM_FIRST)
    store, model = store_of(spec, ops), Model(spec)
    for clock in range(data.draw(st.integers(1, 4))):
        pushes = data.draw(updates(echo=bool(model.rule.echo)))
        assert store.apply(pushes, clock).tolist() == model.apply(pushes)
        asked = data.draw(IDS)
        torch.testing.assert_close(store.read(ids_of(*asked), clock), model.read(asked), rtol=1e-6, atol=1e-6)
    assert sorted(held(store)) == sorted(model.values)
    store.close()


def test_both_operations_give_the_same_bits() -> None:
    random = torch.Generator().manual_seed(0)
    stores = [store_of(replace(rows_of(Adam(lr=0.1), width=5), first=RANDOM_FIRST), ops) for ops in OPS]
    for clock in range(2):
        ids = torch.randint(20_000, (PIECE_ROWS + 3,), generator=random)  # in several pieces
        rows = torch.randn(len(ids), 5, generator=random)
        for store in stores:
            store.apply([RowContribution(ids, rows), RowContribution(ids.flip(0), rows)], clock)
    found = [store.read(torch.arange(20_000), 3) for store in stores]
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize(
    ("scale", "counts", "expected"),
    [
        ("sum", (1, 3), 8.0),
        ("mean", (1, 3), 4.0),
        ("samples", (2, 2), 4.0),
        ("samples", (1, 3), (1 * 2 + 3 * 6) / 4),
        ("samples", (0, 0), 4.0),
    ],
)
def test_scales_as_dense_tables_do(scale: str, counts: tuple[float, float], expected: float) -> None:
    store = store_of(replace(rows_of(), scale=scale))
    store.apply([replace(push_of([1], g), count=count) for g, count in zip((2.0, 6.0), counts, strict=True)], 0)
    assert store.read(ids_of(1), 0).tolist() == [[expected] * 2]


def test_a_push_without_a_row_counts_as_zeros_there() -> None:
    store = store_of(replace(rows_of(), scale="mean"))
    store.apply([push_of([1], 6.0), push_of([2], 4.0), push_of([])], 0)
    assert store.read(ids_of(1, 2), 0)[:, 0].tolist() == pytest.approx([2.0, 4 / 3])


def test_adds_in_the_order_given() -> None:
    # 1 is lost beside 1e8 in float32, so the order shows.
    first, last = store_of(rows_of()), store_of(rows_of())
    first.apply([push_of([1], 1e8), push_of([1], -1e8), push_of([1], 1.0)], 0)
    last.apply([push_of([1], 1.0), push_of([1], 1e8), push_of([1], -1e8)], 0)
    assert first.read(ids_of(1), 0)[0].tolist() == [1.0, 1.0]
    assert last.read(ids_of(1), 0)[0].tolist() == [0.0, 0.0]


def test_a_push_is_only_read() -> None:
    store = store_of(replace(rows_of(SGD(lr=1.0, momentum=0.9)), scale="samples"))
    given_ = push_of([1, 2], 3.0)
    store.apply([given_], 0)
    store.apply([given_, replace(push_of([3]), count=2.0)], 0)
    assert given_.gradient.tolist() == [[3.0, 3.0]] * 2


def test_hyperparameters_are_those_of_the_last_push_that_has_some() -> None:
    store = store_of(rows_of(SGD(lr=1.0)))
    half, tenth = SGD(lr=0.5).groups, SGD(lr=0.1).groups
    store.apply([replace(push_of([1]), hyper=tenth), replace(push_of([1]), hyper=half), push_of([1])], 0)
    assert store.hyper == half
    push(store, [2])
    assert store.read(ids_of(1, 2), 0)[:, 0].tolist() == [-1.5, -0.5]


def test_non_finite_numbers_become_zeros_and_are_counted() -> None:
    store = store_of(replace(rows_of(), nonfinite="zero"))
    rows = torch.tensor([[math.nan, 1.0], [math.inf, -math.inf]])
    store.apply([RowContribution(ids_of(1, 2), rows), push_of([1])], 0)
    assert store.read(ids_of(1, 2), 0).tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert store.statistics().num_zeroed == 3


def test_reading_makes_no_row() -> None:
    store = store_of(replace(rows_of(), first=RANDOM_FIRST))
    found = store.read(ids_of(5, -7, 5), 0)
    assert torch.equal(found[0], found[2])
    assert found.abs().max() <= 0.5
    assert len(store) == 0
    assert store.read(ids_of(), 0).shape == (0, 2)


def test_an_empty_push_changes_nothing() -> None:
    store = store_of(rows_of())
    assert push(store, []) == []
    assert store.statistics() == replace(RowStatistics(), index_bytes=index_bytes(0))


def test_the_echo_is_read_beside_the_values_and_comes_back() -> None:
    store = store_of(rows_of(AdaptiveRevision(lr=1.0)))
    assert store.read_width == 4
    assert store.read(ids_of(1), 0).tolist() == [[0.0] * 4]
    push(store, [1])
    push(store, [1])
    assert store.read(ids_of(1), 0)[0, 2:].tolist() == [2.0, 2.0]
    # A stale reader went too far, and gets it back.
    stale, fresh = store_of(rows_of(AdaptiveRevision(lr=1.0))), store_of(rows_of(AdaptiveRevision(lr=1.0)))
    for each, seen in ((stale, 0.0), (fresh, 1.0)):
        push(each, [1])
        # Of two pushes that bring the row, the echo of the first counts.
        both = [replace(push_of([1]), echo=torch.full((1, 2), echo)) for echo in (seen, 9.0)]
        each.apply(both, 1)
    assert stale.read(ids_of(1), 1)[0, 0] > fresh.read(ids_of(1), 1)[0, 0]


def test_a_rule_that_refuses_changes_nothing() -> None:
    store = store_of(rows_of(SGD(lr=1.0)))
    push(store, [1])
    with_momentum = replace(push_of([1, 2]), hyper=SGD(lr=1.0, momentum=0.9).groups)
    with pytest.raises(UsageError, match="momentum"):
        store.apply([with_momentum], 1)
    assert held(store)[1].tolist() == [-1.0, -1.0]
    assert len(store) == 1
    push(store, [2])
    assert len(store) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        RowContribution(torch.tensor([1], dtype=torch.int32), torch.ones(1, 2)),
        RowContribution(torch.tensor([[1]]), torch.ones(1, 2)),
        RowContribution(ids_of(1), torch.ones(1, 3)),
        RowContribution(ids_of(1), torch.ones(2, 2)),
        RowContribution(ids_of(1), torch.ones(1, 2, dtype=torch.float64)),
        RowContribution(ids_of(1), torch.ones(1, 2), echo=torch.ones(1, 2)),
        RowContribution(ids_of(1), torch.ones(1, 2), hyper=({}, {})),
    ],
    ids=["dtype of ids", "shape of ids", "width", "number", "dtype", "echo", "hyper"],
)
def test_what_does_not_fit_is_refused(wrong: RowContribution) -> None:
    store = store_of(rows_of())
    with pytest.raises(ProtocolBug, match="expected"):
        store.apply([push_of([7]), wrong], 0)
    with pytest.raises(ProtocolBug, match="without contributions"):
        store.apply([], 0)
    assert len(store) == 0


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_other_dtypes(dtype: str) -> None:
    spec = replace(rows_of(Adagrad(lr=0.5)), dtype=dtype)
    store, rows = store_of(spec), torch.full((2, 2), 2.0, dtype=getattr(torch, dtype))
    store.apply([RowContribution(ids_of(1, 1), rows)], 0)
    assert store.read(ids_of(1), 0)[0].tolist() == pytest.approx([-0.5, -0.5])


def test_statistics_follow_the_formula() -> None:
    spec = rows_of(SGD(lr=0.1, momentum=0.9), width=16)
    assert row_bytes(spec, row_rule(spec.rule, None)) == 8 + 2 * 16 * 4
    store = store_of(spec)
    store.apply([RowContribution(torch.arange(5000), torch.ones(5000, 16))], 0)
    found = store.statistics()
    assert found.num_rows == found.num_admitted == 5000
    assert found.column_bytes == 5000 * (8 + 2 * 16 * 4)
    assert found.index_bytes == index_bytes(5000) == 8 * 8192
    assert found.memory_bytes == found.column_bytes + found.index_bytes
    assert (found + found).num_rows == 10_000


def test_where_the_system_gives_no_more_memory_only_new_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of(rows_of(Add()))
    capacity = store._memory.columns.num_rows
    known = torch.arange(capacity)
    store.apply([RowContribution(known, torch.ones(capacity, store.spec.width))], 0)
    num_rows = store._memory.columns.num_rows

    def refuse(self: RowColumns, num: int) -> None:
        if num > num_rows:
            raise UsageError("no memory")

    monkeypatch.setattr(RowColumns, "grow", refuse)
    store.reserve([known] * (1 + num_rows // capacity))
    with pytest.raises(UsageError, match="no memory"):
        store.reserve([torch.arange(num_rows + 1)])
    store.apply([RowContribution(known, torch.ones(capacity, store.spec.width))], 1)
    assert store.read(known).eq(2).all()
    store.close()
