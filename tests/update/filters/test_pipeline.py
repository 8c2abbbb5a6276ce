import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.update.filters.filtering import Account, kept, kept_in, num_kept, one, pipeline_of, pushed, rest, row

from paceline.update.filters import KKT, Cast, FilterSpec, Int8, RandomSkip, Significant, TopK
from paceline.update.filters.encoding import codec_of
from paceline.update.filters.pipeline import FilteredPush, FilterPipeline

SELECTIONS: list[tuple[FilterSpec, ...]] = [
    (),
    (Significant(40.0),),
    (TopK(0.3),),
    (Significant(20.0, max_age=3), TopK(0.5)),
    (TopK(0.1, max_age=2),),
]
CODECS: list[tuple[FilterSpec, ...]] = [(Cast("bfloat16"),), (Cast("float16"),), (Int8(),), (TopK(0.3), Int8())]
LOSSY = [*SELECTIONS[1:], *CODECS]

# A push is a row of two whole numbers for some of a few ids: their sums are exact.
PUSHES = st.lists(
    st.dictionaries(st.integers(-3, 8), st.tuples(st.integers(-99, 99), st.integers(-99, 99)), max_size=9), max_size=12
)


@given(PUSHES, st.sampled_from([*SELECTIONS, *CODECS]), st.sets(st.integers(0, 11)))
def test_sent_and_kept_back_are_what_was_given(
    pushes: list[dict[int, tuple[int, int]]], filters: tuple[FilterSpec, ...], refused: set[int]
) -> None:
    pipeline, given_sum, sent_sum = pipeline_of(*filters), Account(), Account()
    codec = codec_of(filters, "push")
    tolerance = 1e-9 if codec.row_bytes(2, torch.float64) < 16 else 0.0
    for clock, push in enumerate(pushes):
        ids = torch.tensor(list(push), dtype=torch.int64)
        rows = torch.tensor(list(push.values()), dtype=torch.float64).view(len(ids), 2)
        before = rows.clone()
        filtered = pipeline.sift(ids, rows, clock)
        assert torch.equal(rows, before)
        assert torch.equal(codec.decode(filtered.encoded, 2, torch.float64), filtered.decoded)
        assert len(filtered.ids.unique()) == len(filtered.ids)
        if clock in refused:
            undo(pipeline, filtered)
        else:
            given_sum.add(ids, rows)
            sent_sum.add(filtered.ids, filtered.decoded)
        both = kept_in(pipeline)
        both.add_all(sent_sum)
        assert both.agrees_with(given_sum, tolerance)
        counts = pipeline.counts
        assert counts.given + counts.late == counts.sent + counts.kept_back
    sent_sum.add(*rest(pipeline))
    assert sent_sum.agrees_with(given_sum, tolerance)


@given(PUSHES, st.sampled_from(LOSSY), st.integers(0, 11), st.integers(0, 4))
def test_a_push_that_is_refused_later_leaves_the_sum_of_the_others(
    pushes: list[dict[int, tuple[int, int]]], filters: tuple[FilterSpec, ...], refused: int, later: int
) -> None:
    pipeline, given_sum, sent_sum = pipeline_of(*filters), Account(), Account()
    tolerance = 1e-9 if codec_of(filters, "push").row_bytes(2, torch.float64) < 16 else 0.0
    lost: FilteredPush | None = None
    for clock, push in enumerate(pushes):
        if lost is not None and clock == refused + later:
            undo(pipeline, lost)
            lost = None
        ids = torch.tensor(list(push), dtype=torch.int64)
        rows = torch.tensor(list(push.values()), dtype=torch.float64).view(len(ids), 2)
        filtered = pipeline.sift(ids, rows, clock)
        if clock == refused:
            lost = filtered
        else:
            given_sum.add(ids, rows)
            sent_sum.add(filtered.ids, filtered.decoded)
    if lost is not None:
        undo(pipeline, lost)
    sent_sum.add(*rest(pipeline))
    assert sent_sum.agrees_with(given_sum, tolerance)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("filters", [*LOSSY, (RandomSkip(0.5), Significant(0.5, max_age=3))], ids=str)
def test_what_is_kept_back_is_bit_for_bit_as_if_a_refused_push_had_not_been_made(
    filters: tuple[FilterSpec, ...], dtype: torch.dtype
) -> None:
    pipeline = pipeline_of(*filters, dtype=dtype)
    for clock in range(6):
        pipeline.sift(*rows_of(clock, dtype), clock)
        before = kept(pipeline)
        undo(pipeline, pipeline.flush() if clock % 3 == 2 else pipeline.sift(*rows_of(clock + 50, dtype), clock))
        after = kept(pipeline)
        assert num_kept(pipeline) > 0
        assert all(map(torch.equal, before, after))


def rows_of(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    ids, rows = rows_at(seed)
    return ids, rows.to(dtype)


def undo(pipeline: FilterPipeline, filtered: FilteredPush) -> None:
    if filtered.change is not None:
        pipeline.undo(filtered.change)


@pytest.mark.parametrize("filters", LOSSY, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_small_constant_gradient_arrives_in_the_end(filters: tuple[FilterSpec, ...], dtype: torch.dtype) -> None:
    pipeline = pipeline_of(*filters, width=2, dtype=dtype)
    ids = torch.tensor([7, 8])
    # Beside a great neighbour in its row, and a great row in its push, it is rounded to nothing at first.
    rows = torch.tensor([[0.01, 8.0], [50.0, 50.0]], dtype=dtype)
    arrived = torch.zeros((), dtype=torch.float64)
    for clock in range(200):
        filtered = pipeline.sift(ids, rows, clock)
        arrived += filtered.decoded[filtered.ids == 7][:, 0].double().sum()
    due = 200 * rows[0, 0].item()
    assert 0.8 * due < arrived < 1.05 * due


def test_nothing_is_copied_where_nothing_is_declared() -> None:
    rows = torch.randn(5, 2)
    filtered = pipeline_of(dtype=torch.float32).sift(torch.arange(5), rows, 0)
    assert filtered.decoded.data_ptr() == filtered.encoded.data_ptr() == rows.data_ptr()


def test_significant_rows_have_one_number_above_the_threshold() -> None:
    pipeline = pipeline_of(Significant(1.0))
    assert pushed(pipeline, 0, {1: (1.0, -1.0), 2: (0.0, -1.5), 3: (0.0, 0.0)}) == {2: [0.0, -1.5]}
    assert pushed(pipeline, 1, {1: (0.5, 0.0)}) == {1: [1.5, -1.0]}
    assert num_kept(pipeline) == 0


def test_the_largest_rows_go_in_the_order_of_the_push() -> None:
    pipeline = pipeline_of(TopK(0.5))
    assert list(pushed(pipeline, 0, {4: (1, 0), 3: (0, 5), 2: (4, 0), 1: (3, 3)})) == [3, 1]
    assert pushed(pipeline, 1, {4: (1, 0)}) == {4: [2.0, 0.0]}


@pytest.mark.parametrize(("share", "expected"), [(0.07, 7), (0.071, 8), (1e-9, 1), (0.999, 100), (1.0, 100)])
def test_a_share_is_rounded_up(share: float, expected: int) -> None:
    filtered = pipeline_of(TopK(share)).sift(torch.arange(100), torch.rand(100, 2, dtype=torch.float64), 0)
    assert len(filtered.ids) == expected


def test_a_row_goes_when_it_has_waited_for_as_long_as_it_may() -> None:
    pipeline = pipeline_of(Significant(1.0, max_age=3))
    assert pushed(pipeline, 5, {1: (0.1, 0), 2: (0.2, 0)}) == {}
    assert pushed(pipeline, 6, {2: (0.2, 0), 3: (0.1, 0)}) == {}
    assert pushed(pipeline, 7, {9: (2, 0)}) == {9: [2.0, 0.0]}
    assert pipeline.must_send(7).tolist() == []
    assert pipeline.must_send(8).tolist() == [1, 2]
    # The push of its clock has both, though one of them is not in it; each waits anew after that.
    assert pushed(pipeline, 8, {2: (0.1, 0)}) == {2: [0.5, 0.0], 1: [0.1, 0.0]}
    assert pipeline.must_send(8).tolist() == []
    assert pipeline.must_send(9).tolist() == [3]
    assert (pipeline.counts.late, num_kept(pipeline)) == (1, 1)


def test_what_is_rounded_off_waits_for_the_next_push_of_its_row() -> None:
    pipeline = pipeline_of(TopK(1.0, max_age=1), Int8())
    pushed(pipeline, 0, {1: (0.1, 8)})
    assert num_kept(pipeline) == 1
    assert pipeline.must_send(1000).tolist() == []


def test_a_flush_sends_everything_as_the_codec_has_it() -> None:
    pipeline = pipeline_of(Significant(10.0), Cast("bfloat16"))
    given_rows = torch.tensor([[0.1, 8.0], [0.3, 0.7]], dtype=torch.float64)
    pipeline.sift(torch.tensor([6, 2]), given_rows, 0)
    flushed = pipeline.flush()
    assert flushed.ids.tolist() == [2, 6]
    assert torch.equal(flushed.decoded, given_rows.flip(0).bfloat16().double())
    assert rest(pipeline)[0].tolist() == [2, 6]


@pytest.mark.parametrize("filters", [*LOSSY, (RandomSkip(0.5),)], ids=str)
def test_rows_that_are_not_finite_are_sent_as_they_are_and_spoil_nothing(filters: tuple[FilterSpec, ...]) -> None:
    pipeline = pipeline_of(*filters)
    pushed(pipeline, 0, {1: (0.01, 5), 2: (60.1, 60.2)})
    before = kept_in(pipeline)
    filtered = pipeline.sift(one(1), row(float("nan"), 1.0), 1)
    assert filtered.ids[-1] == 1
    assert filtered.decoded[-1].isnan().any()
    if filtered.ids.tolist() == [1]:  # and no other row was due
        assert kept_in(pipeline).agrees_with(before)
    assert rest(pipeline)[1].isfinite().all()


def test_sums_saturate_and_do_not_become_infinite() -> None:
    pipeline = pipeline_of(Significant(65000.0), dtype=torch.float16)
    for clock in range(3):
        filtered = pipeline.sift(one(1), row(40000, 1, dtype=torch.float16), clock)
    assert filtered.decoded.isfinite().all()
    skipping = pipeline_of(RandomSkip(0.01), dtype=torch.float16)
    for clock in range(400):
        assert skipping.sift(one(1), row(40000, 1, dtype=torch.float16), clock).decoded.isfinite().all()


def rows_at(clock: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(clock)
    return torch.randperm(40, generator=random)[:20], torch.randn(20, 2, generator=random, dtype=torch.float64)


def skipped(seed: int, worker: int = 0) -> FilteredPush:
    return pipeline_of(RandomSkip(0.25, seed), worker=worker).sift(
        torch.arange(64), torch.ones(64, 2, dtype=torch.float64), 0
    )


def test_random_skip_is_right_on_average() -> None:
    sums = torch.stack([skipped(seed).decoded.sum(dim=0) for seed in range(400)])
    # The mean of 400 * 64 draws of 0 or 4 has a deviation of 1.732 / 160; this allows for more than four of it.
    assert (sums.mean(dim=0) / 64 - 1).abs().max() < 0.045
    assert sums.std() > 0


def test_random_skip_depends_on_seed_and_worker_alone() -> None:
    first = skipped(3, 1)
    assert torch.equal(first.ids, skipped(3, 1).ids)
    assert not torch.equal(first.ids, skipped(3, 2).ids)
    assert not torch.equal(first.ids, skipped(3 + 2**40, 1).ids)
    assert first.decoded.unique().tolist() == [4.0]


def test_only_kkt_looks_at_values() -> None:
    assert pipeline_of(KKT(0.1)).needs_values
    assert not any(pipeline_of(*filters).needs_values for filters in LOSSY)
