"""A server is killed while its replica lags: workers say again what that lacks, and nothing is lost or doubled."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.nodes.cluster import open_table, read_values, run_threads, table
from tests.nodes.slow_line import PATIENCE_S, SlowLine, slow_lines
from tests.nodes.test_clipping import Trained as Clipped
from tests.nodes.test_faults import NUM_CLOCKS, NUM_WORKERS, Ledger
from tests.nodes.test_replicas import WithKeyCache, check, replicated, undisturbed
from tests.nodes.test_successors import MOMENTUM, POLICIES, SIZES, Trained, make_distant, push_to_read

from paceline.server import replica_link
from paceline.worker.dense import DenseClient
from paceline.worker.node import WorkerNode

pytestmark = pytest.mark.usefixtures(slow_lines.__name__)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the undisturbed runs are made, once for all tests."""
    return tmp_path_factory.mktemp("calm")


@pytest.mark.parametrize("lag", [1, 3])
@pytest.mark.parametrize("point", [20, 61, 203, 271, 401])
def test_under_bsp_the_bytes_are_those_of_an_undisturbed_run_wherever_the_server_is_killed(
    point: int, lag: int, tmp_path: Path, calm: Path
) -> None:
    check(tmp_path, calm, "bsp", (point,), lag=lag)
    assert SlowLine.num_lost > 0


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("point", [150, pytest.param(203, marks=pytest.mark.campaign)])
def test_nothing_is_lost_or_doubled_under_any_policy(policy: str, point: int, tmp_path: Path, calm: Path) -> None:
    check(tmp_path, calm, policy, (point, point + 33), lag=2)
    assert SlowLine.num_lost > 0


def test_both_servers_of_a_job_may_be_killed(tmp_path: Path, calm: Path) -> None:
    check(tmp_path, calm, "bsp", (101, 57), kind="tls", lag=2)


@pytest.mark.parametrize("points", [(53, 0), (0, 61), pytest.param((89, 97), marks=pytest.mark.campaign)])
def test_a_norm_that_a_replica_lacks_is_not_needed_any_more(points: tuple[int, ...], tmp_path: Path) -> None:
    job = Clipped()
    with replicated(tmp_path / "job", points, lag=2) as (servers, pairs):
        servers.run(NUM_WORKERS, job.work)
    assert [pair.fate.num_kills for pair in pairs] == [int(point > 0) for point in points]
    job.require_expected()


@pytest.mark.campaign
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("lag", [1, 2, 5])
@pytest.mark.parametrize("point", range(4, 240, 11))
def test_nothing_is_lost_or_doubled_at_any_point(policy: str, lag: int, point: int, tmp_path: Path, calm: Path) -> None:
    check(tmp_path, calm, policy, (point,), lag=lag)


@pytest.mark.parametrize("kind", [Trained, WithKeyCache])
def test_a_server_that_is_killed_again_and_again_has_a_new_replica_each_time(
    kind: type[Trained], tmp_path: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_link, "_IDLE_LOOK_S", 0.0)
    job = kind(Ledger("bsp"), MOMENTUM)
    with replicated(tmp_path / "job", (89,), repeats=True, lag=2) as (servers, [pair]):
        servers.run(NUM_WORKERS, job.work)
        assert job.ledger.expected().sum() == NUM_WORKERS * NUM_CLOCKS
        assert sorted(job.claimed) == [(home, index) for home, size in enumerate(SIZES) for index in range(size)]
    assert pair.fate.num_kills > 1
    assert SlowLine.num_lost > 0
    assert pair.lost == []
    for rank, values in undisturbed(calm / "1", 1).items():
        assert torch.equal(job.values[rank], values)


def test_values_that_leave_ahead_of_their_clock_count_once_it_is_complete(
    tmp_path: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_distant(monkeypatch)
    monkeypatch.setattr(DenseClient, "push", push_to_read)
    check(tmp_path, calm, "bsp", (97, 149), lag=2)


def test_what_is_lost_with_a_worker_and_its_server_at_once_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowLine, "share", 0.0)
    last, lag = 5, 2  # the clock in which both die, and how far the replica may be behind
    spec, values = table("sums", NUM_WORKERS, "bsp"), torch.empty(NUM_WORKERS)
    with replicated(tmp_path / "job", (0,), lag=lag) as (servers, [pair]):
        servers.retry_s = PATIENCE_S  # a tick that is said again makes the head wait for what its replica may lack yet

        def kill_head() -> None:
            pair.fate.stride = 1

        at_last = threading.Barrier(
            NUM_WORKERS, kill_head
        )  # before a tick of that clock comes, for which it waits, too

        def work(node: WorkerNode) -> None:
            rank = node.settings.sender.worker
            open_table(node, spec)
            for clock in range(2 * last):
                if clock == last:
                    at_last.wait(PATIENCE_S)
                    if rank == 1:
                        return
                node.client("sums").push(torch.eye(NUM_WORKERS)[rank], count=1.0)
                node.tick()
                read_values(node, "sums", values if rank == 0 else torch.empty(NUM_WORKERS))
            node.leave()

        def live(rank: int) -> None:
            with servers.joined(rank) as node:
                work(node)
            if rank == 1:
                pair.nodes[1].report_death(rank, 0, "it was killed")

        run_threads([partial(live, rank) for rank in range(NUM_WORKERS)])
    [line] = pair.lost
    assert line.startswith("worker 1 (incarnation 0) did not come back to server 0, whose replica serves: ")
    assert f"from clock {last - lag} on, of {lag} clocks" in line
    assert line.endswith(f"others have read values with its clocks {last - lag} to {last - 1}")
    assert values.tolist() == [2 * last, last - lag, 2 * last]


@pytest.mark.parametrize("lag", [1, 3])
def test_workers_keep_the_pushes_of_no_more_clocks_than_the_replica_may_lack(
    lag: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SlowLine, "share", 0.0)
    spec, kept = table("sums", NUM_WORKERS, "bsp"), list[int]()
    with replicated(tmp_path / "job", (0,), lag=lag) as (servers, _):

        def work(node: WorkerNode) -> None:
            open_table(node, spec)
            for _ in range(NUM_CLOCKS):
                node.client("sums").push(torch.ones(NUM_WORKERS), count=1.0)
                node.tick()
                read_values(node, "sums", torch.empty(NUM_WORKERS))
                kept.append(len(node.client("sums")._kept or ()))

        servers.run(NUM_WORKERS, work)
    assert max(kept) in (lag, lag + 1), "of the clock that is confirmed with the next answer as well"
