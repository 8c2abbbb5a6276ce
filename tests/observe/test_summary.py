import pytest
from tests.observe.synthetic import Rehearsal

from paceline.observe.runs import Run, gather
from paceline.observe.summary import CURVE_POINTS, CurvePoint, summarize
from paceline.observe.trace import Evaluated, MembershipRecord, MinClock, ReadRecord, RowRead, Step, TraceRecord


def read(t: float, worker: int, clock: int, value_clock: int, table: str = "w") -> ReadRecord:
    return ReadRecord(t, worker, table, clock, value_clock, 0.0, "fetch")


def step(
    t: float, worker: int, clock: int, *, wait_s: float = 0.0, comm_s: float = 0.0, step_s: float = 1.0,
    loss: float = 1.0,
) -> Step:  # fmt: skip
    return Step(t, worker, clock, 10, loss, wait_s, step_s, comm_s)


def test_seconds_run_from_the_first_steps_beginning_to_the_last_steps_end() -> None:
    summary = summarize(gather([step(11.0, 0, 0, step_s=1.0), step(12.5, 1, 0, step_s=3.0), step(13.5, 0, 1)]))
    assert summary.seconds == 4.0
    assert summary.samples_per_s == 7.5
    assert summary.num_clocks == 2


def test_wait_shares_of_the_workers() -> None:
    run = gather([
        step(1.0, 0, 0, wait_s=0.5), step(2.0, 0, 1, wait_s=0.25), step(2.0, 1, 0, step_s=2.0),
    ])  # fmt: skip
    summary = summarize(run)
    assert [(w.worker, w.num_clocks, w.num_samples, w.wait_share) for w in summary.workers] == [
        (0, 2, 20, 0.375), (1, 1, 10, 0.0),
    ]  # fmt: skip
    assert (summary.wait_share_mean, summary.wait_share_max) == (0.1875, 0.375)


def test_communication_shares_of_the_workers_contain_the_waiting() -> None:
    run = gather([
        step(1.0, 0, 0, wait_s=0.5, comm_s=0.75), step(2.0, 0, 1, comm_s=0.25), step(2.0, 1, 0, step_s=2.0),
    ])  # fmt: skip
    summary = summarize(run)
    assert [(w.comm_share, w.wait_share) for w in summary.workers] == [(0.5, 0.25), (0.0, 0.0)]
    assert (summary.comm_share_mean, summary.wait_share_mean) == (0.25, 0.125)


def test_histogram_of_clock_differentials() -> None:
    run = gather([read(1, 0, 0, 0), read(2, 0, 1, 1), read(3, 0, 2, 1), read(4, 0, 5, 2)])
    summary = summarize(run)
    assert summary.differentials == {-4: 1, -2: 1, -1: 2}
    assert summary.max_staleness == 3
    assert summary.current_share == 0.5
    assert summary.num_reads == 4


def test_every_row_of_a_read_of_rows_counts_as_a_read() -> None:
    records: list[TraceRecord] = [MinClock(1.0, 0, "rows", 2), RowRead(2.0, 0, "rows", 3, {0: 4, 2: 6}, 0.0)]
    summary = summarize(gather(records))
    assert summary.differentials == {-4: 4, -2: 6}
    assert (summary.num_reads, summary.max_staleness, summary.freshest_share) == (10, 3, 0.6)
    assert (summary.freshest, summary.max_lead) == ({-4: 0, -2: 6}, 0)


def test_a_read_is_freshest_when_no_server_could_have_given_more() -> None:
    records: list[TraceRecord] = [
        read(0.5, 0, 0, 0),  # nothing has advanced: freshest
        MinClock(1.0, 0, "w", 1),
        read(1.5, 0, 1, 0),  # the other server is still at 0: freshest
        MinClock(2.0, 1, "w", 1),
        read(2.5, 1, 1, 0),  # both are at 1: stale
        MinClock(2.6, 0, "other", 9),
        read(2.8, 0, 2, 1),  # another table does not count: freshest
    ]
    summary = summarize(gather(records))
    assert summary.freshest_share == 0.75
    assert sum((summary.freshest or {}).values()) == 0.75 * summary.num_reads


def test_the_lead_is_between_workers_that_compute_at_the_same_time() -> None:
    records: list[TraceRecord] = [
        read(1, 0, 0, 0), read(1, 1, 0, 0),
        step(2, 0, 0), read(2, 0, 1, 0), step(3, 0, 1), read(3, 0, 2, 0),  # 2 ahead of worker 1
        step(4, 1, 0), step(4, 0, 2), read(4, 0, 3, 1),  # worker 1 computes nothing now
    ]  # fmt: skip
    assert summarize(gather(records)).max_lead == 2


def test_a_dead_worker_holds_no_other_back() -> None:
    died = MembershipRecord(1.5, 0, 1, 0, "died")
    records: list[TraceRecord] = [read(1, 0, 0, 0), read(1, 1, 0, 0), died, step(2, 0, 0), read(3, 0, 9, 9)]
    assert summarize(gather(records)).max_lead == 0


def test_the_last_evaluation_is_the_final_one() -> None:
    summary = summarize(gather([Evaluated(9.0, 0, 5, 0.3, 0.9), Evaluated(1.0, 1, 1, 2.0, 0.1)]))
    assert (summary.test_loss, summary.test_accuracy) == (0.3, 0.9)


def test_curves_by_time_since_the_first_step_and_by_clock() -> None:
    run = gather([step(11, 0, 0, loss=4.0), step(12, 1, 0, loss=2.0), step(13, 0, 1, loss=1.0)])
    summary = summarize(run)
    assert summary.loss_by_time == (CurvePoint(1, 4.0), CurvePoint(2, 2.0), CurvePoint(3, 1.0))
    assert summary.loss_by_clock == (CurvePoint(1, 3.0), CurvePoint(2, 1.0))


def test_long_curves_are_averaged_in_equal_groups() -> None:
    run = gather([step(t, 0, t, loss=float(t)) for t in range(2 * CURVE_POINTS)])
    curve = summarize(run).loss_by_clock
    assert len(curve) == CURVE_POINTS
    assert curve[1] == CurvePoint(3.5, 2.5)


def test_steps_without_a_loss_are_left_out_of_the_curves() -> None:
    assert summarize(Run(steps=(Step(1.0, 0, 0, 1, None, 0.0, 1.0),))).loss_by_time == ()


@pytest.mark.parametrize(("factor", "slow"), [(1.1, None), (2.0, 2)])
def test_the_slow_worker_takes_clearly_longer_for_a_clock(factor: float, slow: int | None) -> None:
    steps = [step(9, worker, 0, step_s=factor if worker == 2 else 1.0) for worker in range(4)]
    assert summarize(gather(steps)).slow_worker == slow


@pytest.mark.parametrize(("num_slow", "slow"), [(1, None), (3, 2)])
def test_a_worker_that_is_slow_at_times_is_found_though_it_keeps_up_on_average(num_slow: int, slow: int | None) -> None:
    fitful = [3.0] * num_slow + [0.2] * (10 - num_slow)
    steps = [step(9, worker, c, step_s=fitful[c] if worker == 2 else 1.0) for worker in range(4) for c in range(10)]
    assert summarize(gather(steps)).slow_worker == slow


def test_an_empty_run_has_no_numbers() -> None:
    summary = summarize(Run())
    assert (summary.seconds, summary.samples_per_s, summary.num_clocks) == (0, 0, 0)
    assert summary.comm_share_mean == summary.wait_share_mean == summary.wait_share_max == 0
    assert summary.freshest_share is summary.max_lead is summary.max_staleness is summary.current_share is None
    assert summary.slow_worker is None


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("refresh", ["always", "lazily"])
def test_a_bounded_rehearsal_stays_in_its_bound(bound: int, refresh: str) -> None:
    summary = summarize(Rehearsal(bound, refresh, num_clocks=60).run())
    assert summary.max_lead == bound
    assert summary.max_staleness == bound
    assert summary.slow_worker == 3
    if refresh == "always":
        assert summary.freshest_share == 1.0
