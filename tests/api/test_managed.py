"""Managed communication in whole jobs: sums, own pushes, deadlines, ends, and bad settings."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest
import torch
from tests.jobs import job, run_job

import paceline
from paceline.api.session import Session
from paceline.errors import DeadlineExceeded, PeerError, Refused, UsageError
from paceline.worker.rows.table import RowTable

ADD = paceline.update.Add()
NUM_IDS = 60


def table(ps: Session, mbps: float = 50.0, consistency: str = "ssp:2", **more: object) -> RowTable:
    managed = paceline.managed(mbps, **more)  # type: ignore[arg-type]
    return ps.table("t", rows=3, update=ADD, consistency=consistency, communication=managed)


def num_sending() -> int:
    return sum(thread.name == "paceline-sending" for thread in threading.enumerate())


@pytest.mark.parametrize("carrier", ["memory", "tcp"])
@pytest.mark.parametrize(
    ("consistency", "priority"), [("ssp:2", "relative_magnitude"), ("essp:3", "random"), ("ssp:1", "fifo")]
)
def test_all_that_was_pushed_arrives_once(tmp_path: Path, carrier: str, consistency: str, priority: str) -> None:
    def work(ps: Session) -> float:
        t = table(ps, 1.0, consistency, priority=priority)
        draws, futures = torch.Generator().manual_seed(ps.rank), []
        for clock in range(12):
            ids = torch.randint(0, NUM_IDS, (20,), generator=draws)
            t.pull(ids)
            futures.append(t.push(ids, torch.ones(20, 3)))
            assert ps.clock() == clock + 1
        ps.barrier()
        assert all(future.result(timeout=30).applied for future in futures)
        total = float(t.pull(torch.arange(NUM_IDS), exact=True).sum())
        ps.barrier()
        return total

    assert run_job(tmp_path, work, workers=3, servers=2, carrier=carrier) == [12 * 20 * 3 * 3.0] * 3
    assert num_sending() == 0


def test_reads_are_recorded_by_what_they_are_sure_to_contain(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        t = table(ps, consistency="ssp:3", hold=2)
        for clock in range(6):
            asked = t.pull_later([1, 2])
            asked.result()
            assert asked.reading.needs == max(0, clock - 1)
            t.push([1], [[1.0, 1.0, 1.0]])
            ps.clock()

    run_job(tmp_path, work, workers=2)


def test_a_worker_reads_its_own_pushes_before_they_are_sent(tmp_path: Path) -> None:
    def work(ps: Session) -> list[list[float]]:
        t = ps.table(
            "t", rows=2, update=paceline.update.SGD(lr=0.5), consistency="ssp:4", communication=paceline.managed(1e-6)
        )
        t.push(list(range(1000, 6000)), torch.ones(5000, 2))  # more than may go at once, and then nothing for hours
        t.push([7, 7, 8], [[1.0, 2.0], [1.0, 2.0], [4.0, 4.0]])
        t.push([9], [[2.0, 2.0]])
        read = t.pull([7, 8, 9]).tolist()
        t.push([9], [[2.0, 2.0]])
        assert len(t.client._budgeted.pending)
        return [*read, *t.pull([9]).tolist()]

    with job(tmp_path, workers=1) as ready:
        ps = ready.join(0)
        assert work(ps) == [[-1.0, -2.0], [-2.0, -2.0], [-1.0, -1.0], [-2.0, -2.0]]
        ps.close(politely=False)
    assert num_sending() == 0


def test_flush_and_leaving_send_the_rest(tmp_path: Path) -> None:
    def work(ps: Session) -> float:
        t = table(ps, consistency="ssp:9")
        t.push([1, 2], torch.ones(2, 3))
        assert t.flush().result(timeout=30).applied
        assert not len(t.client._budgeted.pending)
        t.push([1], torch.ones(1, 3))
        return 0.0

    with job(tmp_path, workers=1) as ready:
        ready.run(work)
        store = ready.servers[0]._tables["t"].store
        assert store.read(torch.tensor([1, 2]), 0).tolist() == [[2.0] * 3, [1.0] * 3]


def test_a_clock_that_waits_for_the_budget_gives_up_in_time(tmp_path: Path) -> None:
    with job(tmp_path, workers=1) as ready:
        ps = ready.join(0)
        t = table(ps, 1e-6, hold=0)
        lost = t.push(list(range(5000)), torch.ones(5000, 3))
        ps.node.waits.set_timeout(0.1)
        with pytest.raises(DeadlineExceeded, match="rows of table 't' that may wait no longer"):
            ps.clock()
        assert ps.node.clock == 0
        ps.close(politely=False)
        with pytest.raises(PeerError):
            lost.result(timeout=30)
    assert num_sending() == 0


def test_a_thread_that_fails_ends_the_waits_of_its_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with job(tmp_path, workers=1) as ready, monkeypatch.context() as patched:
        patched.setattr(threading, "excepthook", lambda _: None)
        ps = ready.join(0)
        t = table(ps, hold=0)
        patched.setattr(t.client.state.pipeline, "sift", None)
        t.push([1], torch.ones(1, 3))
        with pytest.raises(PeerError, match="thread that sends rows has failed"):
            ps.clock()
        ps.close(politely=False)
    assert num_sending() == 0


@pytest.mark.parametrize(("consistency", "mbps"), [("ssp:4", 1.0), ("essp:2", 0.3)])
def test_own_pushes_are_read_once_while_they_wait_and_travel_and_after(
    tmp_path: Path, consistency: str, mbps: float
) -> None:
    def work(ps: Session) -> None:
        t = table(ps, mbps, consistency, chunk_kb=1.0)
        expected, draws = torch.zeros(200, 3), torch.Generator().manual_seed(ps.rank)
        for _ in range(30):
            ids = torch.randint(0, 200, (60,), generator=draws).unique()
            t.push(ids + 1000 * ps.rank, torch.ones(len(ids), 3))  # no other worker pushes these
            expected[ids] += 1
            read = torch.randint(0, 200, (60,), generator=draws)
            assert torch.equal(t.pull(read + 1000 * ps.rank), expected[read])
            ps.clock()

    run_job(tmp_path, work, workers=2, servers=2, carrier="tcp")


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"budget_mbps": 0.0}, "budget_mbps is 0.0"),
        ({"budget_mbps": math.nan}, "budget_mbps is nan"),
        ({"budget_mbps": 1.0, "chunk_kb": -1.0}, "chunk_kb is -1.0"),
        ({"budget_mbps": 1.0, "priority": "lifo"}, "expected one of relative_magnitude, random, fifo"),
        ({"budget_mbps": 1.0, "hold": -1}, "hold is -1"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(numbers: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        paceline.managed(**numbers)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"consistency": "bsp"}, "staleness bound of 1 or more"),
        ({"consistency": "ssp:0"}, "staleness bound of 1 or more"),
        ({"consistency": "asynchronous"}, "staleness bound of 1 or more"),
        ({"consistency": "bound=2,visible=on_clock"}, "staleness bound of 1 or more"),
        ({"communication": paceline.managed(1.0, hold=3)}, "held for 3 clocks"),
        ({"update": paceline.update.Adagrad(lr=0.1)}, "has to add"),
        ({"update": paceline.update.SGD(lr=0.1, momentum=0.9)}, "has to add"),
        ({"filters": (paceline.filters.TopK(0.5),)}, "filter top_k"),
        ({"cache": False}, "cannot do without a cache"),
    ],
)
def test_tables_that_leave_no_room_for_waiting_are_refused(changed: dict[str, object], said: str) -> None:
    given: dict[str, object] = {"update": ADD, "consistency": "ssp:2", "communication": paceline.managed(1.0)}
    with paceline.connect() as ps, pytest.raises(UsageError, match=said):
        ps.table("t", rows=2, **(given | changed))  # type: ignore[call-overload]


def test_workers_hold_back_alike_as_reads_of_all_of_them_allow_for_it(tmp_path: Path) -> None:
    with job(tmp_path, workers=2) as ready, ready.join(0) as first, ready.join(1) as second:
        with pytest.raises(UsageError, match="held for 5 clocks"):
            table(first, consistency="ssp:4", hold=5)
        table(first, consistency="ssp:4", hold=1)
        with pytest.raises(Refused, match="hold is 2 here and 1 there"):
            table(second, consistency="ssp:4")
        with pytest.raises(Refused, match="hold is 0 here and 1 there"):
            second.table("t", rows=3, update=ADD, consistency="ssp:4")
        table(second, 1.0, consistency="ssp:4", hold=1, priority="fifo")


def test_what_cannot_be_summed_is_refused_and_the_table_goes_on() -> None:
    with paceline.connect() as ps:
        t = ps.table(
            "t", rows=1, update=paceline.update.SGD(lr=1.0), consistency="ssp:2", communication=paceline.managed(1.0)
        )
        with pytest.raises(UsageError, match="hyperparameters"):
            t.push([1], [[1.0]], hyper=({"lr": 0.5},))
        assert t.push([1], [[math.nan]]).result(timeout=30).reason
        t.push([1], [[1.0]])
        assert t.pull([1]).tolist() == [[-1.0]]
        with pytest.raises(UsageError, match="communication"):
            ps.table("w", shape=(2,), update=ADD, communication=paceline.managed(1.0))  # type: ignore[call-overload]
