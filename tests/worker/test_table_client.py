"""What a worker may expect of each of its tables, dense or of rows: the promises of `TableClient`.

The core, the node and the clients are the real ones. What they send is recorded, and the test answers for the servers.
"""

from __future__ import annotations

import gc
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.nodes.cluster import table
from tests.worker.rows.tables import rows_of

from paceline.core.consistency import Consistency
from paceline.core.effects import Forget
from paceline.core.events import Arrived, Connected, Timeout, WantClock, WantJoin
from paceline.core.messages import (
    Applied,
    Clock,
    Fetched,
    FromServer,
    Held,
    Joined,
    PushId,
    PushRefused,
    Sender,
    Ticked,
)
from paceline.core.settings import WorkerSettings
from paceline.errors import PeerError
from paceline.transport.base import EMPTY
from paceline.update.placement import spans
from paceline.wire.messages import PullFrame, PushFrame, RowPullFrame, RowPushFrame, decode
from paceline.worker.cache import TableCache
from paceline.worker.dense import DenseClient
from paceline.worker.node import WorkerNode
from paceline.worker.pushes import PushBuffer, Pushes, PushOutcome
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.state import CacheOptions, RowTableState
from paceline.worker.table_client import TableClient
from paceline.worker.waits import WorkerLock

NUM_SERVERS = 2


@dataclass
class Recorder:
    """A connection that keeps what is sent."""

    sent: list[tuple[Any, bytes]] = field(default_factory=list)

    def send(self, header: bytes, body: memoryview = EMPTY, **_: Any) -> None:
        self.sent.append((decode(header), bytes(body)))

    def take(self, *kinds: type) -> list[tuple[Any, bytes]]:
        """Return the frames of these kinds that were sent since the last call."""
        found = [(message, body) for message, body in self.sent if isinstance(message, kinds)]
        self.sent.clear()
        return found

    def close(self) -> None:
        pass


class Stage(ABC):
    """A worker with one table, and the servers that the test plays."""

    client: Any
    part: int  # numbers of each server

    def __init__(self, consistency: str) -> None:
        settings = WorkerSettings(Sender(1, 0, 0), NUM_SERVERS)
        self.node = WorkerNode(settings, None, tuple(map(str, range(NUM_SERVERS))))  # type: ignore[arg-type]
        self.servers = [Recorder() for _ in range(NUM_SERVERS)]
        self.node._connections += self.servers  # type: ignore[arg-type]
        self.handle(WantJoin())
        for server in range(NUM_SERVERS):
            self.answer(server, Joined(0))
        with self.node._changed:
            self.client = self.node._tables["t"] = self.open(consistency)

    def handle(self, event: Any, body: memoryview = EMPTY) -> None:
        with self.node._changed:
            self.node._handle(event, body)

    def answer(self, server: int, message: FromServer, body: memoryview = EMPTY) -> None:
        self.handle(Arrived(server, message), body)

    def pushed(self, server: int) -> list[tuple[PushId, bytes]]:
        """Return identity and body of the pushes sent to a server since the last call."""
        return [(frame.push.id, body) for frame, body in self.servers[server].take(PushFrame, RowPushFrame)]

    def answer_read(self, request: int, clock: int = 0) -> None:
        for server in range(NUM_SERVERS):
            self.answer(server, Fetched(request, "t", clock, 0, 0, ()), self.values(server))

    @abstractmethod
    def open(self, consistency: str) -> TableClient:
        """Open the table "t"."""

    @abstractmethod
    def push(self) -> Future[PushOutcome]:
        """Push ones to both servers."""

    @abstractmethod
    def start_read(self) -> Any:
        """Start a read of values of both servers."""

    @abstractmethod
    def values(self, server: int) -> memoryview:
        """Return a body with values of a server: its rank, everywhere."""

    @abstractmethod
    def finish_read(self, started: Any) -> list[float]:
        """Return the values of a read, in any order."""

    @abstractmethod
    def memory(self) -> list[weakref.ref[Any]]:
        """Return references to the memory of the table."""


class DenseStage(Stage):
    part = 64

    def open(self, consistency: str) -> TableClient:
        spec = table("t", 2 * self.part, consistency)
        cache = TableCache(spec, spans(spec, self.node.settings), reads_own_writes=False)
        held = Consistency.parse(consistency).visible == "on_clock"
        return DenseClient(cache, Pushes(2, held, self.buffer), self.node.context)

    def buffer(self) -> PushBuffer:
        memory = bytearray(2 * 4 * self.part)
        return PushBuffer(memoryview(memory), torch.frombuffer(memory, dtype=torch.float32))

    def push(self) -> Future[PushOutcome]:
        return self.client.push(torch.ones(2 * self.part), count=1.0)

    def start_read(self) -> Any:
        return self.client.start_read()

    def values(self, server: int) -> memoryview:
        return memoryview(torch.full((self.part,), float(server)).numpy()).cast("B")

    def finish_read(self, started: Any) -> list[float]:
        found: list[float] = []
        self.client.wait_read(started, lambda cache: found.extend(cache.memory.tolist()))
        return found

    def memory(self) -> list[weakref.ref[Any]]:
        return [weakref.ref(self.client.cache), *map(weakref.ref, self.client.pushes._free)]


class RowStage(Stage):
    part = 2

    def open(self, consistency: str) -> TableClient:
        spec = rows_of("t", consistency, width=1)
        state = RowTableState.make(
            spec, CacheOptions(keep=True, reads_own_writes=False), self.node.context.row_sharding, 0
        )
        parts = self.node.context.row_sharding.split(torch.arange(64))
        self.ids = torch.cat([places[: self.part] for places in parts])  # of each server
        return RowClient(state, self.node.context)

    def push(self) -> Future[PushOutcome]:
        return self.client.push(self.ids, torch.ones(2 * self.part, 1, dtype=torch.float64), count=1.0, hyper=())

    def start_read(self) -> Any:
        return self.client.start_read(self.ids, self.client.state.consistency.needs(self.node.clock), refresh=True)

    def values(self, server: int) -> memoryview:
        return memoryview(torch.full((self.part,), float(server), dtype=torch.float64).numpy()).cast("B")

    def finish_read(self, started: Any) -> list[float]:
        return self.client.wait_read(started)[0].view(-1).tolist()

    def memory(self) -> list[weakref.ref[Any]]:
        return [weakref.ref(column._map) for column in self.client.state.cache._columns()]


@pytest.fixture(params=[DenseStage, RowStage])
def kind(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return what makes stages of one kind; they are closed when the test ends."""
    made: list[Stage] = []

    def make(consistency: str = "asynchronous") -> Stage:
        made.append(request.param(consistency))
        return made[-1]

    yield make
    for stage in made:
        stage.node.close()


def test_a_push_is_sent_to_every_server_and_ends_when_all_have_applied_it(kind: Any) -> None:
    stage = kind()
    future = stage.push()
    first, second = (stage.pushed(server) for server in range(NUM_SERVERS))
    assert [push_id for push_id, _ in first] == [push_id for push_id, _ in second]
    assert all(body for _, body in (*first, *second))
    [(push_id, _)] = first
    stage.answer(0, Applied(push_id))
    assert not future.done()
    assert stage.client.num_under_way() == 1
    stage.answer(0, Applied(push_id))  # a copy
    assert not future.done()
    stage.answer(1, Applied(push_id))
    assert future.result(timeout=0) == PushOutcome(applied=True)
    assert stage.client.num_under_way() == 0


def test_a_part_that_is_refused_is_reported_with_the_servers_that_applied_theirs(kind: Any) -> None:
    stage = kind()
    future = stage.push()
    [(push_id, _)] = stage.pushed(0)
    stage.answer(0, PushRefused(push_id, "it is broken"))
    assert not future.done()
    stage.answer(1, Applied(push_id))
    outcome = future.result(timeout=0)
    assert (outcome.applied, outcome.applied_on) == (False, (1,))
    assert "server 0 refused its part: it is broken" in outcome.reason
    assert stage.client.num_under_way() == 0


def test_a_push_is_repeated_with_its_identity_to_the_servers_that_have_not_answered(kind: Any) -> None:
    stage = kind()
    stage.push()
    [sent] = stage.pushed(0)
    stage.pushed(1)
    stage.answer(1, Applied(sent[0]))
    for server in range(NUM_SERVERS):
        stage.handle(Connected(server))
    assert stage.pushed(0) == [sent]
    assert stage.pushed(1) == []


def test_a_push_that_a_server_holds_is_repeated_over_a_new_connection_with_its_values(kind: Any) -> None:
    stage = kind("bsp")
    stage.push()
    with stage.node._changed:
        stage.client.flush_pushes(0)
    [sent] = stage.pushed(0)
    stage.answer(0, Held(sent[0]))
    stage.handle(Connected(0))
    assert stage.pushed(0) == [sent]


def test_pushes_that_wait_for_a_clock_are_counted_for_that_clock_only(kind: Any) -> None:
    held, at_once = kind("bsp"), kind("asynchronous")
    for stage in (held, at_once):
        stage.push()
    assert (held.client.num_held(0), held.client.num_held(1)) == (1, 0)
    assert at_once.client.num_held(0) == 0


def test_a_read_ends_with_the_values_of_all_servers(kind: Any) -> None:
    stage = kind()
    started = stage.start_read()
    pulls = [stage.servers[server].take(PullFrame, RowPullFrame) for server in range(NUM_SERVERS)]
    assert [len(sent) for sent in pulls] == [1, 1]
    request = pulls[0][0][0].pull.request
    stage.answer(0, Fetched(request, "t", 0, 0, 0, ()), stage.values(0))
    assert not started.future.done()
    stage.answer(1, Fetched(request, "t", 0, 0, 0, ()), stage.values(1))
    assert started.future.done()
    assert Counter(stage.finish_read(started)) == {0.0: stage.part, 1.0: stage.part}


def test_values_of_another_size_than_requested_are_not_installed(kind: Any) -> None:
    stage = kind()
    started = stage.start_read()
    with pytest.raises(PeerError, match="expected"):
        stage.answer(0, Fetched(1, "t", 0, 0, 0, ()), stage.values(0)[:-8])
    assert not started.future.done()


def test_what_is_dropped_is_requested_again_and_read_anew(kind: Any) -> None:
    stage = kind()
    stage.start_read()
    stage.answer_read(1)
    with stage.node._changed:
        stage.client.forget(Forget(0, "t"))
    started = stage.start_read()
    stage.answer_read(2)
    assert Counter(stage.finish_read(started)) == {0.0: stage.part, 1.0: stage.part}


def test_a_tick_follows_what_belongs_to_its_clock(kind: Any) -> None:
    stage = kind("bsp")
    stage.push()
    with stage.node._changed:
        stage.client.flush_pushes(0)
    [(push_id, _)] = stage.pushed(0)
    stage.node.tick()
    assert not stage.servers[0].take(Clock)
    for server in range(NUM_SERVERS):
        stage.answer(server, Held(push_id))
    assert [frame.clock for frame, _ in stage.servers[0].take(Clock)] == [1]
    for server in range(NUM_SERVERS):
        stage.answer(server, Ticked(1))
        for clocked in stage.node._clocked:
            clocked.note_ticked(server, 1)
    stage.handle(WantClock())


def test_when_the_worker_fails_all_futures_end_and_every_call_raises(kind: Any) -> None:
    stage = kind()
    pushed, read = stage.push(), stage.start_read()
    [(push_id, _)] = stage.pushed(0)
    stage.node._fail("the server is gone")
    for future in (pushed, read.future):
        with pytest.raises(PeerError, match="the server is gone"):
            future.result(timeout=0)
    for call in (stage.push, stage.start_read, lambda: stage.finish_read(read), stage.node.tick):
        with pytest.raises(PeerError, match="the server is gone"):
            call()
    assert stage.client.num_under_way() == 0
    stage.answer(0, Applied(push_id))  # that was on its way
    stage.handle(Timeout())
    stage.handle(Connected(0))


def test_a_read_whose_thread_wakes_when_the_worker_has_left_says_so(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = kind()
    started = stage.start_read()

    def wake_late(*_: Any) -> None:
        stage.answer_read(1)
        stage.node.close()

    monkeypatch.setattr(WorkerLock, "wait", wake_late)
    with pytest.raises(PeerError, match="this worker has left the job"):
        stage.finish_read(started)


def test_a_table_is_closed_while_no_thread_uses_it(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, has_lock = kind(), list[bool]()
    monkeypatch.setattr(type(stage.client), "close", lambda _: has_lock.append(stage.node._changed._is_owned()))
    stage.node.close()
    assert has_lock == [True]


def test_a_closed_table_holds_no_memory(kind: Any) -> None:
    stage = kind()
    started = stage.start_read()
    stage.answer_read(1)
    stage.finish_read(started)
    stage.push()
    [(push_id, _)] = stage.pushed(0)
    for server in range(NUM_SERVERS):
        stage.answer(server, Applied(push_id))
    memory = stage.memory()
    assert memory
    assert all(reference() is not None for reference in memory)
    stage.node.close()
    gc.collect()
    assert [reference() for reference in memory] == [None] * len(memory)
