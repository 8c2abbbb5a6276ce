"""Requests outside the protocol of clocks: tables, first values, meeting points."""

from pathlib import Path

from tests.nodes.client import NUMEL, ONES, SENDER, member, serve_table
from tests.nodes.cluster import cluster, run_threads, table

from paceline.core.messages import Leave, Left
from paceline.errors import Refused
from paceline.update.named_rules import Add
from paceline.update.rows.spec import RowTableSpec
from paceline.wire.requests import (
    AwaitValues,
    Barrier,
    Declare,
    DeclareRows,
    Initialise,
    LoadState,
    RequestDone,
    RequestFailed,
    SaveState,
)
from paceline.worker.dense import DenseClient


def test_a_request_that_makes_no_sense_is_answered_with_the_reason(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker)

        def failure(request: object, content: memoryview = ONES) -> str:
            worker.say(request, content)
            return worker.hear(RequestFailed)[0].reason

        assert "there is no table 'x'" in failure(Initialise(3, "x"))
        assert "there is no table 'x'" in failure(AwaitValues(3, "x"))
        assert "there is no table 'x'" in failure(SaveState(3, "x"))
        assert failure(LoadState(3, "w"), memoryview(b"\xff" * 40))
        assert "'bps'" in failure(Declare(3, table("v", 4, "bps")))
        assert "has shape (-1,), expected sizes of 0 or more" in failure(Declare(3, table("v", -1, "bsp")))
        assert "parameter 0 is 'w' (5,) here and 'w' (4,) there" in failure(Declare(3, table("w", 5, "asynchronous")))
        assert "cannot hold table 'v'" in failure(Declare(3, table("v", 2**55, "bsp")))


def test_a_meeting_is_complete_when_all_are_there_however_often_they_say_so(tmp_path: Path) -> None:
    with (
        cluster("memory", tmp_path, num_servers=1) as servers,
        member(servers, 0) as one,
        member(servers, 1) as other,
    ):
        for _ in range(3):
            one.say(Barrier(5, "barrier"))
        with member(servers, 0, connection=1) as again:  # the same worker, after its connection broke
            again.say(Barrier(5, "barrier"))
            again.say(SaveState(6, "nope"))
            assert again.hear(RequestFailed)[0].number == 6, "a worker alone does not make a meeting"

            other.say(Barrier(9, "barrier"))
            assert other.hear(RequestDone)[0].number == 9
            assert again.hear(RequestDone)[0].number == 5
            again.say(Barrier(5, "barrier"))  # the answer was lost on the way
            assert again.hear(RequestDone)[0].number == 5


def test_what_one_of_a_meeting_has_to_tell_is_told_to_all_however_often_they_ask(tmp_path: Path) -> None:
    with (
        cluster("memory", tmp_path, num_workers=3, num_servers=1) as servers,
        member(servers, 0) as one,
        member(servers, 1) as other,
        member(servers, 2) as third,
    ):
        one.say(Barrier(5, "load", "x" * 5000))
        third.say(Barrier(5, "load", needs=0))
        other.say(Barrier(9, "load"))
        told = "worker 0: " + "x" * (2000 - len("worker 0: "))
        assert [worker.hear(RequestFailed)[0].reason for worker in (one, other, third)] == [told] * 3
        other.say(Barrier(9, "load"))
        assert other.hear(RequestFailed)[0].reason == told  # the answer was lost on the way

        servers.servers[0].report_death(0, 0, "it never came back")
        other.say(Barrier(10, "load", needs=0))
        third.say(Barrier(10, "load"))
        assert "worker 0 takes part no more" in other.hear(RequestFailed)[0].reason
        other.say(Barrier(11, "load"))
        assert "worker 0 takes part no more" in third.hear(RequestFailed)[0].reason
        third.say(Barrier(11, "load"))
        assert (other.hear(RequestDone)[0].number, third.hear(RequestDone)[0].number) == (11, 11)


def test_a_meeting_goes_on_without_the_workers_that_are_gone(tmp_path: Path) -> None:
    with (
        cluster("memory", tmp_path, num_workers=3, num_servers=1) as servers,
        member(servers, 0) as one,
        member(servers, 1) as leaving,
    ):
        one.say(Barrier(5, "barrier"))
        leaving.say(Leave(SENDER))
        leaving.hear(Left)
        servers.servers[0].report_death(2, 0, "it never came")

        assert one.hear(RequestDone)[0].number == 5


def test_the_first_of_those_left_is_asked_for_first_values(tmp_path: Path) -> None:
    with (
        cluster("memory", tmp_path, num_workers=3, num_servers=1) as servers,
        member(servers, 1) as second,
        member(servers, 2) as third,
    ):
        for worker in (second, third):
            worker.say(Declare(1, table("w", NUMEL, "bsp")))
            worker.hear(RequestDone)
            worker.say(AwaitValues(2, "w"))
        servers.servers[0].report_death(0, 0, "it died before it gave them")

        assert "worker 1 is the first that takes part" in second.hear(RequestFailed)[0].reason
        second.say(Initialise(3, "w"), ONES)
        assert second.hear(RequestDone)[0].number == 3
        assert third.hear(RequestDone)[0].number == 2


def test_rows_of_a_snapshot_are_loaded_by_one_worker_at_a_time(tmp_path: Path) -> None:
    rows = RowTableSpec("r", 1, "float32", Add(), "bsp", "sum", "reject")
    with (
        cluster("memory", tmp_path, num_workers=3, num_servers=1) as servers,
        member(servers, 1) as second,
        member(servers, 2) as third,
    ):
        for worker in (second, third):
            worker.say(DeclareRows(1, rows))
            worker.hear(RequestDone)
            worker.say(AwaitValues(2, "r"))
        servers.servers[0].report_death(0, 0, "it died before it loaded them")
        assert "worker 1 is the first that takes part" in second.hear(RequestFailed)[0].reason

        with member(servers, 0, incarnation=1) as first:
            first.say(AwaitValues(2, "r"))
            first.say(Declare(3, table("w", NUMEL, "bsp")))
            assert first.hear(RequestDone)[0].number == 3, "it waits, as another one is at it"
            second.say(Initialise(3, "r"))
            assert [each.hear(RequestDone)[0].number for each in (second, first, third)] == [3, 2, 2]
            first.say(AwaitValues(4, "r"))
            assert first.hear(RequestDone)[0].number == 4


def test_rows_of_a_snapshot_are_loaded_by_another_worker_where_the_first_dies_at_it(tmp_path: Path) -> None:
    rows = RowTableSpec("r", 1, "float32", Add(), "bsp", "sum", "reject")
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 0) as one, member(servers, 1) as other:
        for worker in (one, other):
            worker.say(DeclareRows(1, rows))
            worker.hear(RequestDone)
            worker.say(AwaitValues(2, "r"))
        assert "worker 0 is the first that takes part" in one.hear(RequestFailed)[0].reason
        servers.servers[0].report_death(0, 0, "it died while it loaded them")
        assert "worker 1 is the first that takes part" in other.hear(RequestFailed)[0].reason


def test_two_that_declare_a_table_differently_are_told_where(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=2) as servers:
        found: list[str] = []

        def declare(rank: int, numel: int) -> None:
            with servers.joined(rank) as node:
                try:
                    DenseClient.open(node.context, table("w", numel, "bsp"))
                except Refused as error:
                    found.append(str(error))

        run_threads([lambda: declare(0, 4), lambda: declare(1, 5)])

    assert found, "at least one of them comes second to some server"
    assert "parameter 0 is 'w' (" in found[0]
    assert "Every worker must build the same model and the same optimizer" in found[0]
