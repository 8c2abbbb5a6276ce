"""A thread that waits for an answer reads the connections itself, and leaves them to their threads afterwards."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.data.service.feeders import until
from tests.nodes.cluster import Cluster, cluster, open_table, read_values, run_threads, table

from paceline.errors import DeadlineExceeded, PeerError
from paceline.transport.base import Connection, Frame
from paceline.transport.memory import MemoryTransport
from paceline.transport.poller import receive_all
from paceline.wire.connection import LARGE_BYTES, ReadTurns
from paceline.worker.node import FrameHandler, WorkerNode
from paceline.worker.waits import Waits, WorkerLock

PATIENCE_S = 30.0


class Server:
    """The other end of a connection, and what was heard on this one."""

    def __init__(self, lock: WorkerLock) -> None:
        transport = MemoryTransport()
        listener = transport.listen("memory://server-0")
        self.here: Connection = transport.connect(listener.address, b"worker 3", timeout_s=PATIENCE_S)
        self.there = listener.accept(timeout_s=PATIENCE_S)
        listener.close()
        self.heard: list[bytes] = []
        self.on_frame: Callable[[], None] = lambda: None
        self._lock = lock
        lock.turns.add(self)
        lock.turns.is_enabled = True

    def take_reading(self) -> Connection:
        return self.here

    def read_ready(self) -> None:
        with self._lock.changed:
            for frame in receive_all(self.here, timeout_s=0):
                self.on_frame()
                self.heard.append(frame.header)
            self._lock.changed.notify_all()

    def end_reading(self) -> None: ...

    def say(self, header: bytes) -> None:
        self.there.send(header, timeout_s=PATIENCE_S)

    def close(self) -> None:
        self.here.close()
        self.there.close()


@pytest.fixture
def lock() -> Iterator[WorkerLock]:
    lock = WorkerLock(3, Waits(3, PATIENCE_S, lambda _: pytest.fail("no wait is that long")), lambda: 0)
    yield lock
    lock.turns.close()


@pytest.fixture
def server(lock: WorkerLock) -> Iterator[Server]:
    server = Server(lock)
    yield server
    server.close()


def wait_for(lock: WorkerLock, done: Callable[[], bool]) -> None:
    with lock.changed:
        lock.wait(done, "a test")


def test_a_thread_that_waits_reads(lock: WorkerLock, server: Server) -> None:
    server.say(b"1")
    saying = threading.Timer(0.02, server.say, [b"2"])
    saying.start()
    wait_for(lock, lambda: server.heard == [b"1", b"2"])
    saying.join(PATIENCE_S)


def test_each_of_two_threads_gets_its_answer_whichever_reads(lock: WorkerLock, server: Server) -> None:
    def say() -> None:
        for header in (b"1", b"2", b"3"):
            while lock.turns.num_waiting < 3 - len(server.heard):
                threading.Event().wait(0.001)
            server.say(header)

    run_threads([say, *(lambda num=num: wait_for(lock, lambda: len(server.heard) >= num) for num in (1, 2, 3))])
    assert lock.turns.num_waiting == 0


def test_what_another_thread_changes_ends_the_wait(lock: WorkerLock, server: Server) -> None:
    changed: list[int] = []

    def change() -> None:
        with lock.changed:  # which the waiting thread has released, though it has taken it twice
            changed.append(1)
            lock.changed.notify_all()

    changing = threading.Timer(0.02, change)
    with lock.changed:
        changing.start()
        wait_for(lock, lambda: bool(changed))
    changing.join(PATIENCE_S)
    assert lock.changed.acquire(blocking=False)
    lock.changed.release()


def test_a_wait_that_reads_ends_by_its_deadline(lock: WorkerLock, server: Server) -> None:
    lock.waits.set_timeout(0.05)
    lock.waits.send_report = lambda _: _never()
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.05 s for a test"):
        wait_for(lock, lambda: False)
    lock.waits.set_timeout(PATIENCE_S)
    server.say(b"1")
    wait_for(lock, lambda: server.heard == [b"1"])


def _never() -> object:
    raise DeadlineExceeded("no server answers")


def test_ctrl_c_does_not_interrupt_a_frame_that_is_handled(lock: WorkerLock, server: Server) -> None:
    server.on_frame = lambda: signal.raise_signal(signal.SIGINT)
    server.say(b"1")
    with pytest.raises(KeyboardInterrupt):
        wait_for(lock, lambda: False)
    assert server.heard == [b"1"]
    server.on_frame = lambda: None
    server.say(b"2")
    wait_for(lock, lambda: server.heard == [b"1", b"2"])


def test_ctrl_c_interrupts_the_wait(lock: WorkerLock, server: Server) -> None:
    def interrupt() -> None:
        until(lambda: lock.turns.num_waiting == 1)
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(KeyboardInterrupt):
        wait_for(lock, lambda: False)
    interrupting.join(PATIENCE_S)
    server.say(b"1")
    wait_for(lock, lambda: server.heard == [b"1"])


@pytest.mark.parametrize("name", ["take", "read", "end"])
def test_ctrl_c_around_a_turn_leaves_the_lock_and_the_turn_free(
    lock: WorkerLock, server: Server, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = getattr(ReadTurns, name)

    def interrupted(*args: object) -> object:
        signal.raise_signal(signal.SIGINT)
        result = call(*args)
        signal.raise_signal(signal.SIGINT)
        return result

    server.say(b"1")
    with monkeypatch.context() as patch:
        patch.setattr(ReadTurns, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            wait_for(lock, lambda: False)
    run_threads([lambda: wait_for(lock, lambda: server.heard == [b"1"])])
    server.say(b"2")
    run_threads([lambda: wait_for(lock, lambda: server.heard == [b"1", b"2"])])
    assert lock.turns.num_waiting == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# -- workers and servers ---------------------------------------------------------------------------------------------


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads that have handled frames."""
    names: list[str] = []
    on_frames = FrameHandler.on_frames

    def noted(self: FrameHandler, frames: Sequence[Frame]) -> None:
        names.append(threading.current_thread().name)
        on_frames(self, frames)

    monkeypatch.setattr(FrameHandler, "on_frames", noted)
    return names


@contextmanager
def bsp_worker(kind: str, directory: Path, num_servers: int = 1) -> Iterator[tuple[Cluster, WorkerNode]]:
    """A worker whose waiting thread reads."""
    with cluster(kind, directory, num_servers=num_servers) as servers, servers.joined(0) as node:
        open_table(node, table("w", 4, "bsp"))
        for _ in range(2 * num_servers + 2):  # the thread of a connection stands aside once it has read something
            step(node)
        yield servers, node


def step(node: WorkerNode) -> float:
    """Push, finish the clock and read; return what the values have grown to."""
    node.client("w").push(torch.ones(4), count=1.0)
    node.tick()
    node.settle()
    values = torch.empty(4)
    read_values(node, "w", values)
    return values[0].item()


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm"])
@pytest.mark.parametrize("num_servers", [1, 2])
def test_in_lockstep_the_waiting_thread_handles_the_answers(
    kind: str, num_servers: int, readers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.wire.connection.ASIDE_S", PATIENCE_S)
    with bsp_worker(kind, tmp_path, num_servers) as (_, node):
        before = step(node)
        readers.clear()
        assert [step(node) for _ in range(5)] == [before + num for num in range(1, 6)]
        assert set(readers) == {threading.current_thread().name}


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm"])
def test_what_comes_while_no_thread_waits_is_read_as_well(kind: str, readers: list[str], tmp_path: Path) -> None:
    with bsp_worker(kind, tmp_path) as (servers, node):
        readers.clear()
        pushed = node.client("w").push(torch.ones(4), count=1.0)
        node.tick()
        assert pushed.result(timeout=PATIENCE_S).applied
        assert set(readers) == {f"paceline-link-{servers.addresses[0]}"}
        step(node)


def test_after_large_values_the_waiting_thread_reads_again(
    readers: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.wire.connection.ASIDE_S", PATIENCE_S)
    with bsp_worker("tcp", tmp_path) as (servers, node):
        open_table(node, table("v", LARGE_BYTES, "bsp"))
        read_values(node, "v", torch.empty(LARGE_BYTES))
        reader, waiting = f"paceline-link-{servers.addresses[0]}", threading.current_thread().name
        readers.clear()
        step(node)
        assert set(readers) == {reader}
        for _ in range(1000):  # no thread may wait when the last frame has come that the thread of the connection reads
            readers.clear()
            step(node)
            if set(readers) == {waiting}:
                return
        pytest.fail("the thread of the connection goes on to read")


def test_where_others_wait_for_what_comes_it_is_read_at_once(readers: list[str], tmp_path: Path) -> None:
    with bsp_worker("shm", tmp_path) as (servers, node):
        open_table(node, table("v", 4, "ssp:1"))
        step(node)
        readers.clear()
        step(node)
        assert set(readers) == {f"paceline-link-{servers.addresses[0]}"}


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm"])
def test_a_connection_that_breaks_in_a_wait_is_made_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.wire.connection.ASIDE_S", PATIENCE_S)
    with bsp_worker(kind, tmp_path) as (servers, node):
        before = step(node)
        acceptor = servers.servers[0]._acceptor
        for num in range(1, 4):
            servers.servers[0].do(lambda _: [acceptor.drop(each) for each in acceptor.connections()])
            assert step(node) == before + num


def test_a_worker_that_is_closed_in_a_wait_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.wire.connection.ASIDE_S", PATIENCE_S)
    with bsp_worker("shm", tmp_path) as (_, node):
        closing = threading.Timer(0.05, node.close)
        closing.start()
        with pytest.raises(PeerError, match="its session is closed"), node._changed:
            node._lock.wait(lambda: False, "a test")
        closing.join(PATIENCE_S)
