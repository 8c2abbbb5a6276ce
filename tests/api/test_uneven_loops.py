"""Loops of different length: a worker that has left is not waited for, and one that meets others too soon is named."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from tests.jobs import Job, job, run_job

import paceline
from paceline.api.session import Session
from paceline.errors import DeadlineExceeded, UsageError


@pytest.mark.parametrize("consistency", ["bsp", "ssp:2", "essp:2", "asynchronous", "backup:1"])
def test_a_worker_that_has_left_is_waited_for_no_longer(tmp_path: Path, consistency: str) -> None:
    def work(ps: Session) -> int:
        table = ps.table("w", shape=(2,), update=paceline.update.Add(), scale="sum", consistency=consistency)
        for _ in range(20 if ps.rank == 0 else 10):
            table.push([1.0, 1.0])
            ps.clock()
            table.pull()
        return ps.node.clock

    clocks = run_job(tmp_path, work, workers=2)
    assert clocks[0] >= 20


def test_loops_that_end_by_the_clock_behind_the_read_meet_at_a_barrier_however_late_a_worker_is(tmp_path: Path) -> None:
    with job(tmp_path, workers=3) as started:

        def work(ps: Session) -> tuple[int, list[float]]:
            table = ps.table("w", shape=(1,), update=paceline.update.Add(), scale="sum", consistency="backup:1")
            num_reads = 0
            while True:
                table.pull()
                num_reads += 1
                if ps.node.clock >= 8:
                    break
                while ps.rank == 0 and num_reads == 2 and started.servers[0]._core.clock_of("w") < 8:
                    threading.Event().wait(0.01)  # until the others have completed all clocks
                table.push([1.0])
                ps.clock()
            ps.barrier()
            return ps.node.clock, table.pull(exact=True).tolist()

        found = started.run(work)
    assert [clock for clock, _ in found] == [8] * 3
    assert all(16.0 <= values[0] <= 18.0 for _, values in found)


def _at_the_barrier(started: Job) -> bool:
    return bool(started.servers[0]._request_handler.at_barriers())


def test_a_barrier_that_the_others_cannot_reach_names_where_each_is(tmp_path: Path) -> None:
    with job(tmp_path, workers=2) as started:

        def work(ps: Session) -> None:
            table = ps.table("w", shape=(2,), update=paceline.update.Add(), scale="sum")
            ps.node.waits.set_timeout(2.0)
            if ps.rank == 1:
                ps.barrier()  # which fails, or ends as the other worker leaves the job
                return
            while not _at_the_barrier(started):
                threading.Event().wait(0.01)
            table.push([1.0, 1.0])
            ps.clock()
            table.pull()

        with pytest.raises(
            DeadlineExceeded,
            match=r"^worker . \(clock .\) waited .* s for .*: "
            r"worker 0 waits for clock 0 of worker 1 \(table 'w', bsp\); "
            r"worker 1 is in barrier\(\), waiting for worker 0. None of these can go on(: have all .*)?$",
        ):
            started.run(work)


def test_a_script_says_how_long_its_waits_may_take(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        assert ps.node.waits.limit_s == 50.0
        paceline.init(timeout_s=1800)
        assert ps.node.waits.limit_s == 1800.0
        with pytest.raises(UsageError, match="timeout_s is -1, expected more than 0 seconds"):
            paceline.init(timeout_s=-1)

    run_job(tmp_path, work)
