"""Each way of being consistent as a script sees it: which worker waits, sees what, and comes too late."""

import threading
import time
from pathlib import Path

import pytest
import torch
from tests.jobs import Job, job, join_all, run_job
from tests.nodes.cluster import read_values

import paceline
from paceline.api.session import Session
from paceline.core.consistency import Consistency
from paceline.errors import PeerError

ADD = paceline.update.Add()
UNNAMED = ["bound=2,visible=on_clock", "bound=1,visible=on_clock,deliver=on_clock", "bound=none,deliver=on_clock",
           "bound=none,visible=on_clock", "bound=1,visible=on_clock,backups=1"]  # fmt: skip


@pytest.mark.parametrize("consistency", ["bsp", "ssp:0", "ssp:3", "essp:0", "essp:3", "asynchronous", *UNNAMED])
def test_no_push_is_lost_and_no_read_is_too_old(tmp_path: Path, consistency: str) -> None:
    policy, num_clocks = Consistency.parse(consistency), 20

    def work(ps: Session) -> float:
        w = ps.table("w", shape=(70, 3), update=ADD, scale="sum", consistency=consistency)
        pushed = []
        # By clocks and not by rounds: under a quorum a late worker jumps, and must not want more clocks than there are.
        while (clock := ps.node.clock) < num_clocks:
            pushed.append(w.push(torch.nn.functional.one_hot(torch.tensor(ps.rank), 3).expand(70, 3)))
            ps.clock()
            values = w.pull(refresh=clock % 2 == 0)
            if policy.bound is not None and not policy.backups:
                assert (values >= clock + 1 - policy.bound).all(), f"read at clock {clock + 1}: {values}"
        ps.barrier()
        num_applied = sum(future.result(timeout=30).applied for future in pushed)
        assert (w.pull(exact=True)[:, ps.rank] == num_applied).all()
        return num_applied

    num_applied = run_job(tmp_path, work, workers=3, servers=2)
    if not policy.backups:
        assert num_applied == [num_clocks] * 3


def test_essp_values_come_by_themselves(tmp_path: Path) -> None:
    """Once read, a table is delivered at every clock: within a wide bound no worker asks again."""
    num_clocks = 10

    def work(ps: Session) -> set[str]:
        w = ps.table("w", shape=(4,), update=ADD, scale="sum", consistency=f"essp:{num_clocks}")
        out = w.pull()
        for _ in range(num_clocks):
            w.push(torch.ones(4))
            ps.clock()
        sources, deadline = set[str](), time.monotonic() + 60
        while out[0] < 2 * num_clocks and time.monotonic() < deadline:
            sources.add(read_values(ps.node, "w", out, refresh=False).source)
        assert out.tolist() == [2.0 * num_clocks] * 4
        return sources

    assert run_job(tmp_path, work, workers=2, servers=2, carrier="shm") == [{"delivery"}] * 2


def test_asynchronous_reads_wait_for_no_worker(tmp_path: Path) -> None:
    with job(tmp_path, workers=2, servers=2) as started:
        worker = started.join(0)  # worker 1 never comes
        with worker as ps:
            w = ps.table("w", shape=(2,), update=ADD, consistency="asynchronous")
            for clock in range(1, 6):
                w.push(torch.ones(2))
                ps.clock()
                assert w.pull().tolist() == [clock, clock]


def test_a_late_backup_worker_is_refused_and_continues_where_the_others_are(tmp_path: Path) -> None:
    others_are_done = threading.Event()

    def work(ps: Session) -> tuple[int, list[bool], float]:
        weight = torch.nn.Parameter(torch.zeros(2))
        optimizer = paceline.distributed(torch.optim.SGD([weight], lr=1.0), consistency="backup:1", scale="mean")
        if ps.rank == 2:
            assert others_are_done.wait(120)
        for _ in range(5 if ps.rank < 2 else 1):
            weight.grad = torch.full((2,), float(ps.rank + 1))
            optimizer.step()
        if ps.rank == 0:
            others_are_done.set()
        ps.barrier()
        return ps.node.clock, optimizer.num_refused, weight[0].item()

    *quick, late = run_job(tmp_path, work, workers=3, servers=2)
    assert quick == [(5, 0, -7.5)] * 2  # the mean of the two that came: the divisor is their number
    assert late == (5, 1, -7.5)


# -- workers that come and go ----------------------------------------------------------------------------------------


def run_as(ps: Session, name: str, num_clocks: int, consistency: str) -> list[float]:
    w = ps.table(name, shape=(2,), update=ADD, scale="sum", consistency=consistency)
    seen = []
    for _ in range(num_clocks):
        w.push(torch.ones(2))
        ps.clock()
        seen.append(w.pull()[0].item())
    return seen


@pytest.mark.parametrize("consistency", ["bsp", "ssp:1", "essp:1", "asynchronous", "backup:1"])
def test_a_worker_that_is_started_again_joins_at_the_slowest_clock(tmp_path: Path, consistency: str) -> None:
    with job(tmp_path, workers=2, servers=2) as started:
        survivor_is_at_10 = threading.Event()
        back_again = threading.Event()
        failures: list[BaseException] = []

        def survive() -> None:
            try:
                with started.join(0) as ps:
                    run_as(ps, "w", 10, consistency)
                    survivor_is_at_10.set()
                    assert back_again.wait(120)
                    ps.barrier()
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=survive, daemon=True)
        thread.start()
        first = started.join(1)
        run_as(first, "w", 3, consistency)
        started.kill(first)
        assert survivor_is_at_10.wait(120)
        with started.join(1, incarnation=1) as second:
            joined_at = second.node.clock
            w = second.table("w", shape=(2,), update=ADD, scale="sum", consistency=consistency)
            before = w.pull()[0].item()
            back_again.set()
            second.barrier()  # the survivor has met no other before, nor has this life
        join_all([thread])
    assert not failures
    assert joined_at >= 3
    assert 10 <= before <= 13


def test_the_former_life_can_do_no_more(tmp_path: Path) -> None:
    with job(tmp_path, workers=1) as started:
        first = started.join(0)
        w = first.table("w", shape=(2,), update=ADD)
        with started.join(0, incarnation=1) as second:
            again = second.table("w", shape=(2,), update=ADD)
            pushed = w.push(torch.ones(2))
            with pytest.raises(PeerError, match=r"worker 0 has ended since it joined \(incarnation 0 is over\)"):
                pushed.result(timeout=30)
            first.close(politely=False)
            second.clock()
            assert again.pull().tolist() == [0.0, 0.0]


def test_the_others_are_told_when_a_worker_dies_and_go_on(tmp_path: Path) -> None:
    def survive(started: Job) -> list[float]:
        with started.join(0) as ps:
            return run_as(ps, "w", 10, "bsp")

    with job(tmp_path, workers=2, servers=2) as started:
        seen: list[list[float]] = []
        thread = threading.Thread(target=lambda: seen.append(survive(started)), daemon=True)
        thread.start()
        dying = started.join(1)
        run_as(dying, "w", 4, "bsp")
        started.kill(dying)
        join_all([thread])
    assert seen == [[2.0, 4.0, 6.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0]]


def test_futures_end_when_the_worker_leaves_after_an_error(tmp_path: Path) -> None:
    with job(tmp_path, workers=2) as started:
        ps = started.join(0)  # worker 1 never comes, so bsp never completes a clock
        w = ps.table("w", shape=(2,), update=ADD)
        pushed = w.push(torch.ones(2))
        ps.clock()
        asked = w.pull_later()
        ps.close(politely=False)
        for future in (pushed, asked):
            with pytest.raises(PeerError, match="worker 0"):
                future.result(timeout=30)
