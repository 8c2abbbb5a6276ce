"""A client that breaks the rules loses its connection or is told why; no other notices, and nothing else changes."""

import math
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tests.attacks.rogue import row_table
from tests.data.service.feeders import until
from tests.nodes.client import NUMEL, ONES, SENDER, WORKER, Client, as_body, client, member, push, serve_table
from tests.nodes.cluster import Cluster, cluster, open_table, read_values, table

from paceline.core.messages import (
    Applied,
    Clock,
    Closed,
    Fetched,
    Follow,
    Held,
    Join,
    Joined,
    Leave,
    Pull,
    PullRefused,
    Push,
    PushId,
    PushRefused,
    Sender,
    Ticked,
    WorkerRefused,
)
from paceline.errors import DeadlineExceeded
from paceline.update.table import Hyper
from paceline.wire.messages import Hello, Keys, PullFrame, PushFrame, RowPushFrame
from paceline.wire.requests import Declare, DeclareRows, Initialise, LoadState, RequestDone


def read(reader: Client, request: int) -> list[float]:
    reader.say(PullFrame(Pull(Sender(1, 0, 0), request, "w", 0, 0), request - 1))
    _, values = reader.hear(Fetched)
    return torch.frombuffer(values, dtype=torch.float32).tolist()


def is_cut_off_after(servers: Cluster, identity: Hello | bytes, say: Callable[[Client], None]) -> bool:
    with client(servers, identity) as rogue:
        if isinstance(identity, Hello) and identity.role == "worker":
            rogue.say(Join(Sender(identity.generation, identity.rank, identity.incarnation)))
        say(rogue)
        return rogue.is_cut_off()


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm"])
def test_forged_and_malformed_messages_cost_the_connection_and_change_nothing(kind: str, tmp_path: Path) -> None:
    with cluster(kind, tmp_path, num_servers=1) as servers, member(servers, 0) as honest:
        serve_table(honest)
        server = Hello("server", 0, 0, 1)

        for identity, say in (
            (WORKER, lambda rogue: rogue.say_bytes(b"\xff garbage")),
            (WORKER, lambda rogue: rogue.say_bytes(os.urandom(500))),
            (WORKER, lambda rogue: rogue.say_bytes(b"\x01\x80")),
            (WORKER, lambda rogue: rogue.say(push(0, worker=0), ONES)),
            (WORKER, lambda rogue: rogue.say(Clock(Sender(1, 0, 0), 9))),
            (WORKER, lambda rogue: rogue.say(Leave(Sender(1, 1, 7)))),
            (WORKER, lambda rogue: rogue.say(PullFrame(Pull(Sender(1, 0, 0), 99, "w", 0, 0), 98))),
            (WORKER, lambda rogue: rogue.say(Joined(3))),
            (WORKER, lambda rogue: rogue.say(Closed(1, "w", 0, ()))),
            (server, lambda rogue: rogue.say(Follow(1, 99, "w", 0))),
            (server, lambda rogue: rogue.say(push(0), ONES)),
            (Hello("server", -1, 0, 1), lambda rogue: rogue.say(Closed(1, "w", 0, ()))),
            (Hello("king", 0, 0, 1), lambda rogue: rogue.say(push(0, worker=0), ONES)),
            (b"no hello", lambda rogue: rogue.say(Join(SENDER))),
            (b"", lambda rogue: rogue.say(Join(SENDER))),
        ):
            assert is_cut_off_after(servers, identity, say), identity

        assert read(honest, 1) == [0.0] * NUMEL
        assert honest_can_push(honest)


def honest_can_push(honest: Client) -> bool:
    honest.say(push(0, worker=0), ONES)
    honest.hear(Applied)
    return read(honest, 2) == [1.0] * NUMEL


def hyper_frame(hyper: tuple[Hyper, ...], absent: tuple[int, ...] = ()) -> PushFrame:
    return PushFrame(Push(PushId(1, 1, 0, 0), "w", 0, 0), 1.0, absent, hyper)


@pytest.mark.parametrize(
    ("frame", "content", "reason"),
    [
        (push(0), as_body(torch.ones(NUMEL - 1)), "has 12 bytes, server 0 expects 16 for 'w'"),
        (push(0), memoryview(b""), "has 0 bytes, server 0 expects 16"),
        (push(0, name="x"), ONES, "there is no table 'x' on server 0; tables: w"),
        (push(0), as_body(torch.tensor([1.0, math.nan, math.inf, 1.0])), "2 of its 4 elements .* are NaN or infinite"),
        (push(0, count=math.nan), ONES, "stands for nan samples"),
        (push(0, count=-1.0), ONES, "stands for -1.0 samples"),
        (hyper_frame((), absent=(5,)), ONES, r"leaves out parameters \(5,\), but 'w' has 1"),
        (hyper_frame(({}, {})), ONES, "hyperparameters of 2 groups, 'w' has 1"),
        (hyper_frame(({"lr": math.nan},)), ONES, r"not a number \['lr'\]"),
    ],
)
def test_a_push_that_makes_no_sense_is_refused_with_the_reason(
    frame: PushFrame, content: memoryview, reason: str, tmp_path: Path
) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 0) as reader:
        serve_table(reader)
        with member(servers, 1) as pusher:
            pusher.say(frame, content)
            refused, _ = pusher.hear(PushRefused)
            pusher.say(frame, ONES)  # a refusal is final, whatever comes under the same identity
            again, _ = pusher.hear(PushRefused)

        assert refused == again
        assert pytest.approx(read(reader, 1)) == [0.0] * NUMEL
        assert servers.num_waiting() == 0
        assert re.search(reason, refused.reason)


def test_e8_over_tcp_no_worker_is_believed_that_it_has_looked_for_nan(tmp_path: Path) -> None:
    with cluster("tcp", tmp_path, num_servers=1) as servers, member(servers, 1) as faulty:
        serve_table(faulty)
        invalid = as_body(torch.tensor([1.0, math.nan, 1.0, 1.0]))
        faulty.say(replace(push(0), screened=True), invalid)
        refused, _ = faulty.hear(PushRefused)
        assert "1 of its 4 elements on server 0 are NaN or infinite" in refused.reason
        assert servers.values("w").isfinite().all()


def test_a_push_for_a_closed_clock_is_refused(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker, "bsp")
        worker.say(Clock(SENDER, 1))
        worker.hear(Ticked)

        worker.say(push(0, clock=0), ONES)
        refused, _ = worker.hear(PushRefused)

        assert "clock 0 of table 'w' is closed, the table stands at 1" in refused.reason
        assert servers.num_waiting() == 0


def test_a_bare_copy_of_a_held_push_is_answered_from_what_is_held(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker, "bsp")
        worker.say(push(0), ONES)
        worker.hear(Held)
        worker.say(push(0))  # no tensor beside it
        worker.hear(Held)
        worker.say(Clock(SENDER, 1))
        worker.hear(Applied)
        worker.say(push(0))
        worker.hear(Applied)

        assert servers.values("w").tolist() == [1.0] * NUMEL


def test_a_copy_of_a_held_push_of_rows_counts_once(tmp_path: Path) -> None:
    ids = torch.tensor([1, 2])
    body = memoryview(bytearray(ids.numpy().tobytes() + torch.ones(2, 2).numpy().tobytes()))
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        worker.say(DeclareRows(1, row_table("r", consistency="bsp")))
        worker.hear(RequestDone)
        held = Push(PushId(1, 1, 0, 0), "r", 0, 0)
        for sent in (True, True, False):  # a repetition with its rows, and one without
            frame = RowPushFrame(held, 1.0, (), Keys(2, b"", sent=sent))
            worker.say(frame, body if sent else memoryview(b""))
            worker.hear(Held)
        worker.say(Clock(SENDER, 1))
        worker.hear(Applied)
        rows = servers.servers[0]._tables["r"].store.read(torch.tensor([1, 2, 3]))

    assert rows.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]]


def test_a_pull_of_an_unknown_table_is_refused(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker)
        worker.say(PullFrame(Pull(SENDER, 1, "nope", 0, 0), 0))
        refused, _ = worker.hear(PullRefused)

        assert refused.reason == "there is no table 'nope' on server 0; tables: w"


def test_a_worker_that_was_given_up_is_told_so(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker)
        servers.servers[0].report_death(1, 0, "the test says so")
        is_gone = threading.Event()
        servers.servers[0].do(lambda _: is_gone.set())
        assert is_gone.wait(120)  # a frame may come before a death
        worker.say(push(0), ONES)
        refused, _ = worker.hear(WorkerRefused)

        assert "worker 1 has ended since it joined (incarnation 0 is over)" in refused.reason
        with member(servers, 1, incarnation=1) as restarted:
            restarted.say(PushFrame(Push(PushId(1, 1, 1, 0), "w", 0, 0), 1.0, (), ()), ONES)
            restarted.hear(Applied)
        assert servers.values("w").tolist() == [1.0] * NUMEL


def test_what_comes_late_over_an_old_connection_does_not_take_the_place_of_the_new_one(tmp_path: Path) -> None:
    with (
        cluster("memory", tmp_path, num_servers=1, lease_s=0.2) as servers,
        member(servers, 1, connection=1) as new,
    ):
        serve_table(new)
        with client(servers, Hello("worker", 1, 0, 1, connection=0)) as old:
            old.say(Join(SENDER))
            new.hear(Joined)  # the answer goes where the worker listens
            old.say(LoadState(9, "w"), ONES)  # a request counts only over the newest connection
        with pytest.raises(DeadlineExceeded):  # longer than a lease, which the end of the old connection must not start
            new.connection.receive(timeout_s=0.5)

        new.say(push(0), ONES)
        new.hear(Applied)
        assert servers.values("w").tolist() == [1.0] * NUMEL


def test_values_under_way_are_not_overwritten_by_what_is_sent_again(tmp_path: Path) -> None:
    with cluster("shm", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        serve_table(worker)
        pull = PullFrame(Pull(SENDER, 1, "w", 0, 0), 0)
        worker.say(pull)
        _, first = worker.hear(Fetched)
        worker.say(push(0), ONES)
        worker.hear(Applied)
        worker.say(pull)  # a retry: its first answer may still be unread
        _, second = worker.hear(Fetched)
        worker.say(push(1), ONES)
        worker.hear(Applied)
        worker.say(PullFrame(Pull(SENDER, 2, "w", 0, 0), 1))  # now the memory is free again
        _, third = worker.hear(Fetched)

        assert [torch.frombuffer(m, dtype=torch.float32)[0].item() for m in (second, third)] == [1.0, 2.0]
        assert torch.frombuffer(first, dtype=torch.float32)[0] == 2.0, "the third answer uses the memory of the first"


def test_a_reader_that_does_not_read_is_dropped_and_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.wire.send_queue._TIMEOUT_S", 0.3)
    monkeypatch.setattr("paceline.wire.send_queue._LEAST_BYTES_PER_S", 1e12)
    monkeypatch.setattr("paceline.wire.send_queue._MOST_WAITING_BYTES", 64 << 20)
    numel = 4_000_000
    with cluster("tcp", tmp_path, num_servers=1) as servers, member(servers, 1) as slow:
        slow.say(Declare(1, table("w", numel, "asynchronous")))
        slow.hear(RequestDone)
        slow.say(Initialise(2, "w"), as_body(torch.zeros(numel)))
        slow.hear(RequestDone)
        for request in range(1, 10):  # 16 MB each, and they are not read
            slow.say(PullFrame(Pull(SENDER, request, "w", 0, 0), request - 1))

        with servers.joined(0) as node:
            open_table(node, table("w", numel, "asynchronous"))
            read_values(node, "w", torch.empty(numel))
            node.leave()

        peers = servers.servers[0]._peers
        until(lambda: peers.connection_of(1, 0) is None)
        assert slow.is_cut_off()


def test_a_worker_that_cannot_be_answered_does_not_disturb_the_one_whose_tick_answers_it(tmp_path: Path) -> None:
    spec = table("w", NUMEL, "bsp")
    with cluster("shm", tmp_path, num_workers=2, num_servers=1, lease_s=0.3) as servers:
        with servers.joined(0) as node, member(servers, 1) as dying:
            open_table(node, spec)
            dying.say(Clock(SENDER, 1))
            dying.say(PullFrame(Pull(SENDER, 1, "w", 1, 1), 0))  # waits for worker 0, and dies meanwhile
            dying.hear(Ticked)
            dying.connection.close()
            for _ in range(3):
                node.client("w").push(torch.ones(NUMEL), count=1.0)
                node.tick()
                read_values(node, "w", torch.empty(NUMEL))
            node.leave()
        assert servers.values("w").tolist() == [3.0] * NUMEL
