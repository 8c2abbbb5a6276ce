"""A worker's own side: whatever happens, waiting calls are told, and what broke is made again."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nodes.cluster import CARRIERS, cluster, counts_of, open_table, read_values, table

from paceline.core.effects import ServerEffect
from paceline.core.messages import Fetched, Push, Sender
from paceline.core.server import ServerCore, ServerEvent
from paceline.core.settings import WorkerSettings
from paceline.errors import AuthenticationFailed, DeadlineExceeded, PeerError, ServerLost, UsageError
from paceline.server.connections import Connections
from paceline.transport import Credentials, FaultPlan, TcpTransport
from paceline.transport.base import Frame
from paceline.transport.handshake import TokenHandshake
from paceline.transport.memory import MemoryConnection
from paceline.transport.stream import StreamConnection
from paceline.wire.messages import is_push
from paceline.wire.requests import Barrier
from paceline.worker.dense import DenseClient
from paceline.worker.node import WorkerNode
from paceline.worker.waits import WorkerOptions


def test_a_worker_that_cannot_reach_all_servers_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers:
        settings = WorkerSettings(Sender(1, 0, 0), num_servers=2)
        addresses = (*servers.addresses, "memory://absent")
        node = WorkerNode(settings, servers.transport, addresses, WorkerOptions(reconnect_timeout_s=0.1))

        with pytest.raises(PeerError, match="no listener at memory://absent"):
            node.join()
        node.close()


def test_a_wrong_token_is_named(tmp_path: Path) -> None:
    with cluster("tcp", tmp_path, num_servers=1) as servers:
        stranger = TcpTransport(Credentials(bytes(range(1, 33)), "nodes"))
        node = WorkerNode(WorkerSettings(Sender(1, 0, 0), 1), stranger, servers.addresses)

        with pytest.raises(AuthenticationFailed, match="the token or the job 'nodes' is not the one"):
            node.join()
        node.close()


@pytest.mark.parametrize("kind", CARRIERS)
def test_when_the_servers_are_gone_every_wait_ends_with_the_reason(kind: str, tmp_path: Path) -> None:
    with cluster(kind, tmp_path, num_workers=2, num_servers=1) as servers:
        node = servers.worker(0)
        node.options = WorkerOptions(wait_timeout_s=30.0, reconnect_timeout_s=0.2)
        node.join()
        open_table(node, table("w", 4, "bsp"))
        pushed = node.client("w").push(torch.ones(4), count=1.0)
        node.tick()
        read = node.client("w").start_read().future  # waits for worker 1, which never comes

    for future in (pushed, read):
        with pytest.raises(ServerLost, match=r"lost: the connection to .* did not come back within 0\.2 s"):
            future.result(timeout=30)
    for call in (
        lambda: node.client("w").push(torch.ones(4), count=1.0),
        node.tick,
        node.leave,
        lambda: read_values(node, "w", torch.empty(4)),
        lambda: node.rpc.call(0, lambda number: None, "nothing"),
    ):
        with pytest.raises(ServerLost, match=r"worker 0 \(clock 1\): server 0 is lost: .* can still be read: save"):
            call()
    assert node.is_failing
    node.close()


def test_a_server_that_is_known_to_have_ended_is_not_tried_again(tmp_path: Path) -> None:
    with cluster("tcp", tmp_path, num_workers=2, num_servers=2) as servers:
        node = servers.worker(0)
        node.options = WorkerOptions(reconnect_timeout_s=1000.0, how_ended=lambda rank: f"{rank} was killed")
        node.join()
        assert not node.is_failing
        servers.servers[1].stop()

        with pytest.raises(ServerLost, match=r"server 1 is lost: .* is over: the server 1 was killed"):
            node.rpc.call(1, lambda number: Barrier(number, "a place"), "what never comes")
        node.close()


def test_what_does_not_come_in_time_is_named(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=2) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "ssp:1"))
        node.tick()
        node.tick()
        node.waits.set_timeout(0.2)

        with pytest.raises(
            DeadlineExceeded, match=r"worker 0 \(clock 2\) waited .* s for values of table 'w' at clock 2 \(ssp:1\)"
        ):
            read_values(node, "w", torch.empty(4))
        node.waits.set_timeout(30.0)
        node.client("w").push(torch.ones(4), count=1.0)
        node.settle()


def test_many_pushes_in_one_clock_do_not_wait_for_the_clock_that_comes_after_them(tmp_path: Path) -> None:
    with cluster("shm", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "bsp"))
        values = torch.empty(4)
        for clock in range(1, 4):
            pushed = [node.client("w").push(torch.ones(4), count=1.0) for _ in range(10)]
            with pytest.raises(
                UsageError, match=rf"pushed to table 'w' during clock {clock - 1}.*call clock\(\) first"
            ):
                node.settle()
            node.tick()
            read_values(node, "w", values)

            assert values.tolist() == [10.0 * clock] * 4
            assert all(push.result(timeout=30).applied for push in pushed)
        node.leave()


@pytest.mark.parametrize("deliver", ["on_pull", "on_clock"])
def test_values_that_come_again_together_with_newer_ones_do_not_replace_these(
    deliver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server sends them that answers repeated pulls, or goes on in the place of another."""
    send, last = Connections.send_worker, list[tuple[object, memoryview]]()

    def send_after_the_last(self: Connections, *to: Any) -> None:
        worker, incarnation, message, *rest = to
        if isinstance(message, Fetched):
            for again, body in last:
                send(self, worker, incarnation, again, body)
            last[:] = [(message, memoryview(bytes(rest[0])))]
        send(self, *to)

    monkeypatch.setattr(Connections, "send_worker", send_after_the_last)
    with cluster("tcp", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, f"bound=0,visible=on_clock,deliver={deliver}"))
        values = torch.empty(4)
        for clock in range(1, 20):
            node.client("w").push(torch.ones(4), count=1.0)
            node.tick()
            read_values(node, "w", values)
            assert values.tolist() == [clock] * 4
        node.leave()


def test_a_held_push_holds_up_no_push_of_another_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("paceline.core.exactly_once.WINDOW", "paceline.core.worker.WINDOW"):
        monkeypatch.setattr(place, 20)
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        open_table(node, table("held", 4, "bsp"))
        open_table(node, table("free", 4, "asynchronous"))
        pushed = node.client("held").push(torch.ones(4), count=1.0)
        for _ in range(60):
            assert node.client("free").push(torch.ones(4), count=1.0).result(timeout=30).applied
        for _ in range(19):
            node.client("held").push(torch.ones(4), count=1.0)
        with pytest.raises(UsageError, match=r"has made .* pushes of table 'held' in clock 0"):
            node.client("held").push(torch.ones(4), count=1.0)
        node.tick()
        assert pushed.result(timeout=30).applied


def test_a_script_is_told_where_a_push_is_applied_that_another_server_refused(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1, num_servers=3) as servers, servers.joined(0) as node:
        for name, policy in (("a", "asynchronous"), ("b", "bsp")):
            open_table(node, table(name, 192, policy))
            servers.servers[1]._tables[name].broken = "it is broken"
            pushed = node.client(name).push(torch.ones(192), count=1.0)
            node.tick()
            outcome = pushed.result(timeout=30)
            assert not outcome.applied
            if policy == "bsp":
                assert (outcome.reason, outcome.applied_on) == ("it is broken", ())
                assert not servers.values(name).any()
            else:
                told = "server 1 refused its part: it is broken; it is applied on server 0, 2, and stays there"
                assert (outcome.reason, outcome.applied_on) == (told, (0, 2))
                assert [server._tables[name].shard.values.sum() for server in servers.servers] == [64, 0, 64]


def test_an_own_push_that_was_refused_is_no_longer_shown(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1, num_servers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "asynchronous"))
        values = torch.empty(4)
        read_values(node, "w", values)
        servers.servers[0]._tables["w"].broken = "it is broken"
        assert not node.client("w").push(torch.ones(4), count=1.0).result(timeout=30).applied
        read_values(node, "w", values, refresh=False)
        assert not values.any()


def test_a_table_that_was_not_opened_is_the_callers_mistake(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "bsp"))
        for call in (
            lambda: node.client("v").push(torch.ones(4), count=1.0),
            lambda: node.client("v").start_read(),
            lambda: read_values(node, "v", torch.empty(4)),
        ):
            with pytest.raises(UsageError, match="worker 0 has not opened table 'v'; it has opened: w"):
                call()
        node.leave()


def test_reads_of_several_tables_end_in_any_order(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=2) as servers:
        ahead = threading.Event()

        def one(node: WorkerNode) -> None:
            for name, policy in (("late", "bsp"), ("soon", "asynchronous")):
                open_table(node, table(name, 4, policy))
            if node.settings.sender.worker == 1:
                assert ahead.wait(timeout=30)
                node.tick()
                return
            node.tick()
            late = node.client("late").start_read().future
            read_values(node, "soon", torch.empty(4))
            assert not late.done()
            ahead.set()
            assert late.result(timeout=30).clock == 1

        servers.run(2, one)


def test_a_future_of_a_push_cannot_be_cancelled(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "bsp"))
        pushed = node.client("w").push(torch.ones(4), count=1.0)

        assert not pushed.cancel()
        node.tick()
        assert pushed.result(timeout=30).applied
        node.leave()


@pytest.mark.parametrize("kind", CARRIERS)
def test_a_link_that_breaks_at_every_other_message_only_costs_time(kind: str, tmp_path: Path) -> None:
    plan = FaultPlan(cut=0.25)
    with cluster(kind, tmp_path, num_workers=2, num_servers=1, plan=plan, seed=3) as servers:

        def work(node: WorkerNode) -> None:
            open_table(node, table("w", 4, "ssp:1"))
            for _ in range(8):
                node.client("w").push(torch.ones(4), count=1.0)
                node.tick()
                read_values(node, "w", torch.empty(4))

        servers.run(2, work)

        assert servers.values("w").tolist() == [16.0] * 4
        assert counts_of(servers.transport).cut >= 10


@pytest.mark.parametrize("kind", CARRIERS)
def test_e7_a_push_made_while_a_connection_comes_back_follows_those_that_are_repeated(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, arrived = ServerCore.handle, list[int]()

    def note(core: ServerCore, event: ServerEvent, now: float) -> list[ServerEffect]:
        if isinstance(event, Push):
            arrived.append(event.id.seq)
        return handle(core, event, now)

    monkeypatch.setattr(ServerCore, "handle", note)
    with cluster(kind, tmp_path, num_workers=1, num_servers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "asynchronous"))
        [link] = node._connections
        with node._changed:
            link._post.connection.close()
            node.client("w").push(torch.ones(4), count=1.0)  # lost
            until_s = time.monotonic() + 30
            while link.hello.connection < 2 and time.monotonic() < until_s:
                threading.Event().wait(0.01)
            threading.Event().wait(0.02)  # the reader has the new connection, and waits for the lock
            node.client("w").push(torch.ones(4), count=1.0)
        node.settle()
    assert arrived[:2] == [0, 1]


def test_a_cut_while_a_connection_is_made_again_is_no_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, num_checked = TokenHandshake._token_behind, [0]

    def cut_the_second(handshake: TokenHandshake, proof: bytes, transcript: bytes) -> bytes | None:
        num_checked[0] += 1
        if num_checked[0] == 2:
            raise EOFError  # as when the line breaks before the server has proven itself
        return check(handshake, proof, transcript)

    monkeypatch.setattr(TokenHandshake, "_token_behind", cut_the_second)
    with cluster("tcp", tmp_path, num_workers=1, num_servers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "asynchronous"))
        node._connections[0]._post.connection.close()
        assert node.client("w").push(torch.ones(4), count=1.0).result(timeout=30).applied
    assert num_checked == [3]


def test_a_closed_worker_refuses_to_go_on_and_may_be_closed_again(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_workers=1) as servers:
        with servers.joined(0) as node:
            open_table(node, table("w", 4, "bsp"))
            pushed = node.client("w").push(torch.ones(4), count=1.0)
        node.close()

        with pytest.raises(PeerError, match="its session is closed"):
            pushed.result(timeout=0)
        with pytest.raises(PeerError, match="its session is closed"):
            node.tick()


def test_a_worker_that_stays_away_longer_than_its_lease_is_not_waited_for(tmp_path: Path) -> None:
    spec = table("w", 4, "bsp")
    with cluster("memory", tmp_path, num_workers=2, lease_s=0.2) as servers:
        with servers.joined(1) as lost:
            DenseClient.open(lost.context, spec)
        with servers.joined(0) as node:
            open_table(node, spec)
            node.client("w").push(torch.ones(4), count=1.0)
            node.tick()
            read_values(node, "w", torch.empty(4))
            node.leave()

        assert servers.values("w").tolist() == [1.0] * 4


def test_a_worker_whose_large_frames_never_arrive_ends_with_their_size_and_the_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4096, "asynchronous"))
        node._connections[0]._progress.patience_s = 0.2
        try_send = MemoryConnection.try_send

        def drop_large(self: MemoryConnection, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
            if all(len(body) < 1500 for _, body in frames):
                return try_send(self, frames, timeout_s=timeout_s)
            self.close()  # as the kernel does, after 10 s in which a packet is not acknowledged
            return True

        monkeypatch.setattr(MemoryConnection, "try_send", drop_large)

        with pytest.raises(
            ServerLost, match=r"memory://.* was accepted \d+ times, and broke each .* frame of 16,\d+ bytes .* MTU"
        ):
            node.client("w").push(torch.ones(4096), count=1.0).result(timeout=30)


def test_a_push_that_a_server_has_no_memory_for_is_said_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    receive, failed = StreamConnection.receive, threading.Event()

    def receive_without_memory(self: StreamConnection, **options: Any) -> Frame:
        frame = receive(self, **options)
        if is_push(frame.header) and not failed.is_set():  # on the server
            failed.set()
            raise MemoryError
        return frame

    monkeypatch.setattr(StreamConnection, "receive", receive_without_memory)
    with cluster("tcp", tmp_path, num_servers=1) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "asynchronous"))
        assert node.client("w").push(torch.ones(4), count=1.0).result(timeout=30).applied
        assert failed.is_set()
        assert servers.values("w").tolist() == [1.0] * 4


def test_a_worker_whose_timers_fail_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    has_joined = threading.Event()

    def where(_server: int) -> str:
        if has_joined.is_set():
            raise LookupError
        return ""

    with cluster("memory", tmp_path, num_workers=2, num_servers=1) as servers:
        node = servers.worker(0)
        node.options = WorkerOptions(wait_timeout_s=30.0, where=where)
        node.join()
        has_joined.set()
        with pytest.raises(PeerError, match="the thread that repeats what is not answered failed"):
            node.rpc.call(0, lambda number: Barrier(number, "a place"), "what never comes")
        node.close()
    assert [each.exc_type for each in raised] == [LookupError]
