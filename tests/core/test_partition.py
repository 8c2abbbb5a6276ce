"""Which server owns which elements: everything once, in order, balanced, cut where the vector loops allow it."""

from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from paceline.core.partition import ALIGNMENT, Effort, Range, check_shares, partition, shares_by_speed
from paceline.errors import UsageError

LENGTHS = st.lists(st.integers(0, 2000), min_size=1, max_size=12)


@given(LENGTHS, st.integers(1, 8), st.sampled_from(["anywhere", "between_tensors"]))
def test_ranges_cover_the_table_once_and_in_order(lengths: list[int], num_servers: int, cut: str) -> None:
    assume(num_servers <= (sum(lengths) if cut == "anywhere" else len(lengths)))
    ranges = partition(lengths, num_servers, cut=cut)  # type: ignore[arg-type]
    assert [r.server for r in ranges] == list(range(num_servers))
    assert ranges[0].start == 0
    assert ranges[-1].stop == sum(lengths)
    assert all(before.stop == after.start for before, after in pairwise(ranges))
    assert all(r.length >= 0 for r in ranges)


@given(LENGTHS, st.integers(1, 8))
def test_cuts_inside_a_tensor_are_aligned_to_its_start(lengths: list[int], num_servers: int) -> None:
    assume(num_servers <= sum(lengths))
    starts = list(accumulate(lengths, initial=0))
    for r in partition(lengths, num_servers)[:-1]:
        tensor_start = max(start for start in starts if start <= r.stop)
        assert r.stop in starts or (r.stop - tensor_start) % ALIGNMENT == 0


@given(LENGTHS, st.integers(1, 8))
def test_no_range_is_off_its_fair_share_by_more_than_the_alignment(lengths: list[int], num_servers: int) -> None:
    assume(num_servers <= sum(lengths))
    fair = sum(lengths) / num_servers
    assert all(abs(r.length - fair) <= ALIGNMENT + 1 for r in partition(lengths, num_servers))


@given(LENGTHS, st.integers(1, 8))
def test_whole_tensors_stay_whole(lengths: list[int], num_servers: int) -> None:
    assume(num_servers <= len(lengths))
    starts = set(accumulate(lengths, initial=0))
    assert all(r.stop in starts for r in partition(lengths, num_servers, cut="between_tensors"))


def test_a_small_table_has_empty_ranges_rather_than_cuts_off_the_grid() -> None:
    assert [r.length for r in partition([10], 3)] == [0, 0, 10]


def test_the_example() -> None:
    assert partition([100, 100], 2) == (Range(0, 0, 100), Range(1, 100, 200))
    assert partition([1000], 2) == (Range(0, 0, 512), Range(1, 512, 1000))


def test_more_servers_than_elements() -> None:
    with pytest.raises(UsageError, match=r"3 servers for a table of 2 parameters\. Use at most 2"):
        partition([1, 1], 3)


def test_more_servers_than_whole_tensors() -> None:
    with pytest.raises(UsageError, match="3 servers for a table of 2 tensors, and its update rule needs each"):
        partition([500, 500], 3, cut="between_tensors")


@given(st.integers(1000, 100_000), st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_ranges_are_in_proportion_to_the_shares(total: int, shares: list[int]) -> None:
    assume(sum(shares) > 0)
    ranges = partition([total], len(shares), shares=shares)
    assert sum(r.length for r in ranges) == total
    for r, share in zip(ranges, shares, strict=True):
        assert abs(r.length - total * share / sum(shares)) <= ALIGNMENT + 1


def test_equal_shares_are_none() -> None:
    assert partition([1000, 333], 3, shares=(0.1, 0.1, 0.1)) == partition([1000, 333], 3)


def test_a_server_without_a_share_holds_nothing_and_does_not_count() -> None:
    ranges = partition([64], 3, shares=(0.0, 0.7, 0.0))
    assert [r.length for r in ranges] == [0, 64, 0]
    assert [r.length for r in partition([5], 2, cut="between_tensors", shares=(0, 1))] == [0, 5]


@pytest.mark.parametrize("shares", [(1.0,), (1.0, -1.0), (0.0, 0.0), (1.0, float("nan")), (float("inf"), 1.0)])
def test_what_are_no_shares_is_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match=r"shares of 2 server"):
        check_shares(shares, 2)


@given(LENGTHS, st.lists(st.integers(0, 9), min_size=1, max_size=8))
def test_whole_tensors_are_shared_out_as_evenly_as_their_sizes_allow(lengths: list[int], shares: list[int]) -> None:
    assume(0 < sum(share > 0 for share in shares) <= len(lengths))
    ranges = partition(lengths, len(shares), cut="between_tensors", shares=shares)
    for r, share in zip(ranges, shares, strict=True):
        assert abs(r.length - sum(lengths) * share / sum(shares)) <= max(lengths) + 1


EFFORTS = st.builds(Effort, st.floats(0, 1e12, allow_subnormal=False), st.just(0.0) | st.floats(1e-6, 1e6))


@given(st.lists(st.tuples(st.integers(0, 9), EFFORTS), min_size=1, max_size=8))
def test_shares_by_speed_are_shares(measured: list[tuple[int, Effort]]) -> None:
    former, efforts = [share for share, _ in measured], [effort for _, effort in measured]
    assume(sum(former) > 0)
    shares = shares_by_speed(former, efforts)
    assert sum(shares) == pytest.approx(1.0)
    assert all(share >= 0 for share in shares)
    assert check_shares(shares, len(shares))


@given(st.floats(0.1, 100), st.floats(1.1, 100))
def test_a_server_that_was_busy_for_longer_with_as_much_gets_less(busy_s: float, longer: float) -> None:
    quick, slow = shares_by_speed((), [Effort(1e6, busy_s), Effort(1e6, longer * busy_s)])
    assert quick / slow == pytest.approx(longer)


def test_an_idle_server_keeps_its_share() -> None:
    assert shares_by_speed((), [Effort(0, 0.0), Effort(0, 0.0)]) == (0.5, 0.5)
    assert shares_by_speed((2, 1, 1), [Effort(0, 3.0), Effort(30, 1.0), Effort(10, 1.0)]) == (0.5, 0.375, 0.125)
    assert shares_by_speed((1, 0), [Effort(5, 1.0), Effort(0, 0.0)]) == (1.0, 0.0)


def test_shares_of_equal_speed_stay() -> None:
    assert shares_by_speed((3, 1), [Effort(30, 3.0), Effort(10, 1.0)]) == (0.5, 0.5), "half as much at the same speed"
