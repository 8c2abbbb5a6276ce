"""What servers do with a table as a whole: once for each call, when the clock has come, whatever happens to frames."""

import threading
from pathlib import Path

import pytest
import torch
from tests.nodes.client import NUMEL, SENDER, member, serve_table
from tests.nodes.cluster import Cluster, cluster, counts_of, open_table, run_threads, table
from tests.nodes.own_functions import HERE

from paceline.core.messages import Clock, Sender, Ticked
from paceline.errors import Refused
from paceline.server import table_rpc
from paceline.transport import FaultPlan
from paceline.transport.base import EMPTY
from paceline.update.named_rules import Add
from paceline.update.rows.spec import RowTableSpec
from paceline.wire.messages import encode
from paceline.wire.requests import CallFunction, CountRows, ReadRows, RequestDone, RequestFailed, TableCall, WriteRows
from paceline.worker.node import WorkerNode
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.state import CacheOptions
from paceline.worker.table_calls import TableCalls

NUM_WORKERS, NUM_CALLS, NUM_ROWS = 2, 12, 40
INCREMENT, INCREMENT_ROWS, LOOK = f"{HERE}:increment", f"{HERE}:increment_rows", f"{HERE}:look"

_ABOUT_CALLS = {
    encode(CallFunction(TableCall(1, "w", 0, 1), "x", {}))[0],
    encode(RequestDone(1))[0],
    encode(RequestFailed(1, ""))[0],
}
FAULTS = FaultPlan(
    drop=0.15,
    duplicate=0.2,
    delay=0.1,
    reorder=0.1,
    cut=0.05,
    delay_s=(0.001, 0.005),
    only=lambda h: h[0] in _ABOUT_CALLS,
)


def row_table(consistency: str) -> RowTableSpec:
    return RowTableSpec("rows", 3, "float32", Add(), consistency, "sum", "reject")


@pytest.mark.parametrize(("kind", "num_servers"), [("memory", 1), ("tcp", 3), ("shm", 2)])
def test_every_call_runs_once_on_every_server_whatever_happens_to_frames(
    kind: str, num_servers: int, tmp_path: Path
) -> None:
    def work(node: WorkerNode) -> None:
        open_table(node, table("w", 7, "bsp"))
        RowClient.open(node.context, row_table("bsp"), CacheOptions())
        if node.settings.sender.worker == 0:
            node.client("rows").push(torch.arange(NUM_ROWS), torch.zeros(NUM_ROWS, 3), count=1.0, hyper=())
        node.tick()
        for _ in range(NUM_CALLS):
            TableCalls(node, "w").call(INCREMENT, {}, exact=True)
            TableCalls(node, "rows").call(INCREMENT_ROWS, {}, exact=True)

    with cluster(kind, tmp_path, num_workers=NUM_WORKERS, num_servers=num_servers, plan=FAULTS, seed=3) as servers:
        servers.run(NUM_WORKERS, work)

        assert servers.values("w").tolist() == [float(NUM_WORKERS * NUM_CALLS)] * 7
        stores = [server._tables["rows"].store for server in servers.servers]
        assert sum(len(store) for store in stores) == NUM_ROWS
        assert all((store.rows(0, NUM_ROWS).values == NUM_WORKERS * NUM_CALLS).all() for store in stores)
        counts = counts_of(servers.transport)
        assert min(counts.dropped, counts.duplicated, counts.cut) > 0, counts


def call(number: int, *, needs: int = 0, settled: int = 0, name: str = INCREMENT) -> CallFunction:
    return CallFunction(TableCall(number, "w", needs, settled), name, {})


def test_a_copy_of_a_call_is_given_the_answer_and_a_late_one_nothing(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker)
        worker.say(call(3))
        _, first = worker.hear(RequestDone)
        worker.say(call(4))
        worker.hear(RequestDone)
        worker.say(call(3))
        again, body = worker.hear(RequestDone)
        assert (again.number, bytes(body)) == (3, bytes(first))

        worker.say(call(5, settled=5))
        worker.hear(RequestDone)
        worker.say(call(4))  # its sender has said that it has the answer
        worker.say(call(6, settled=6, name=LOOK))
        assert worker.hear(RequestDone)[0].number == 6
        assert servers.values("w").tolist() == [3.0] * NUMEL


def test_an_error_is_an_answer_as_well(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        worker.say(call(3))
        assert "there is no table 'w' on server 0; tables: none" in worker.hear(RequestFailed)[0].reason
        serve_table(worker)
        worker.say(call(3))  # a copy of the first: what was refused does not run later
        assert worker.hear(RequestFailed)[0].number == 3
        assert servers.values("w").tolist() == [0.0] * NUMEL


def test_a_call_waits_for_its_clock_and_then_runs_once(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker, "bsp")
        for _ in range(3):
            worker.say(call(3, needs=1))
        worker.say(call(4, name=LOOK))
        assert worker.hear(RequestDone)[0].number == 4, "this one waits for nothing"
        assert servers.values("w").tolist() == [0.0] * NUMEL
        worker.say(Clock(SENDER, 1))
        assert worker.hear(RequestDone)[0].number == 3
        assert servers.values("w").tolist() == [1.0] * NUMEL


def test_a_call_waits_for_the_clock_of_a_table_that_no_push_has_touched(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker, "bsp")
        worker.say(Clock(SENDER, 1))  # from here on, the clocks pass the table by
        worker.hear(Ticked)
        worker.say(call(3, needs=2))
        worker.say(call(4, name=LOOK))
        assert worker.hear(RequestDone)[0].number == 4, "this one waits for nothing"
        worker.say(Clock(SENDER, 2))
        assert worker.hear(RequestDone)[0].number == 3


def test_a_worker_that_is_gone_has_nothing_done(tmp_path: Path) -> None:
    with (
        cluster("memory", tmp_path, num_workers=3, num_servers=1) as servers,
        member(servers, 1) as worker,
        member(servers, 2) as other,
    ):
        serve_table(worker, "bsp")
        worker.say(call(3, needs=1))
        worker.say(call(4, name=LOOK))
        worker.hear(RequestDone)
        servers.servers[0].report_death(1, 0, "the test says so")
        servers.servers[0].report_death(0, 0, "the test says so")
        both_are_gone = threading.Event()
        servers.servers[0].do(lambda _: both_are_gone.set())  # frames that have arrived may come before a death
        assert both_are_gone.wait(120)
        worker.say(call(5))
        assert "worker 1 takes no part" in worker.hear(RequestFailed)[0].reason
        other.say(Clock(Sender(1, 2, 0), 1))
        other.hear(Ticked)
        assert servers.values("w").tolist() == [0.0] * NUMEL


def test_a_worker_may_ask_for_many_tables_before_it_has_an_answer(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker, "bsp")
        for number in range(3, 303):
            worker.say(call(number, name=LOOK, needs=1))
        worker.say(Clock(SENDER, 1))
        assert sorted(worker.hear(RequestDone)[0].number for _ in range(300)) == list(range(3, 303))


def test_a_worker_with_too_much_open_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rpc, "MAX_OPEN", 8)
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker, "bsp")
        for number in range(3, 12):
            worker.say(call(number, needs=1))
        assert worker.is_cut_off()


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (CountRows(TableCall(3, "w", 0, 0)), "has a shape, and no rows"),
        (ReadRows(TableCall(3, "w", 0, 0), 0, False), "has a shape, and no rows"),
        (ReadRows(TableCall(3, "rows", 0, 0), -1, False), "there is no slot -1"),
        (WriteRows(TableCall(3, "rows", 0, 0)), "header too small"),
        (WriteRows(TableCall(3, "nope", 0, 0)), "there is no table 'nope' on server 0; tables: rows, w"),
    ],
)
def test_a_request_about_rows_that_makes_no_sense_is_answered_with_the_reason(
    request_: object, reason: str, tmp_path: Path
) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers:
        with servers.joined(0) as node:
            RowClient.open(node.context, row_table("asynchronous"), CacheOptions())
        with member(servers, 1) as worker:
            serve_table(worker)
            worker.say(request_, EMPTY)
            assert reason in worker.hear(RequestFailed)[0].reason


def test_only_what_is_allowed_is_imported(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=2) as servers:
        for server in servers.servers:
            server._tables.host.allowed_paths = frozenset({LOOK})
        with servers.joined(0) as node:
            open_table(node, table("w", 4, "asynchronous"))
            calls = TableCalls(node, "w")
            assert len(calls.call(LOOK, {}, exact=False).results) == 2
            assert len(calls.call("summary", {}, exact=False).results) == 2, "what comes with the package is allowed"
            with pytest.raises(Refused, match=f"{INCREMENT} may not be loaded here. Allowed: {LOOK}"):
                calls.call(INCREMENT, {}, exact=False)
            node.leave()


def under_bsp(servers: Cluster, num_clocks: int) -> list[list[float]]:
    """What calls between the clocks see, while another worker is always late."""
    seen: list[list[float]] = []

    def work(rank: int) -> None:
        with servers.joined(rank) as node:
            open_table(node, table("w", 4, "bsp"))
            for _ in range(num_clocks):
                if rank == 0:
                    parts = TableCalls(node, "w").call(LOOK, {}, exact=True).results
                    seen.append(torch.cat([part["values"] for part in parts]).tolist())
                else:
                    TableCalls(node, "w").call("summary", {}, exact=True)
                node.client("w").push(torch.full((4,), 10.0**rank), count=1.0)
                node.tick()
            node.leave()

    run_threads([lambda: work(0), lambda: work(1)])
    return seen


def test_under_bsp_a_call_sees_exactly_the_clocks_below_its_own(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=2) as servers:
        assert under_bsp(servers, 6) == [[11.0 * clock] * 4 for clock in range(6)]
