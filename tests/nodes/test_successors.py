"""A server is killed at any point, again and again: another goes on in its place, and nothing is lost or doubled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distant import make_distant, push_to_read
from tests.nodes.cluster import CARRIERS, Cluster, address_of, make_transport, open_table, read_values, table
from tests.nodes.test_faults import NUM_CLOCKS, NUM_WORKERS, Ledger
from torch import Tensor

from paceline.core.events import Died, Timeout
from paceline.core.messages import Clock, Closed, Join, Push, PushId, Sender
from paceline.core.settings import ServerSettings
from paceline.observe.trace import Trace
from paceline.server import node
from paceline.server.journal import COLD, COLD_BYTES, JOURNAL, JOURNAL_BYTES, Asked, Journal
from paceline.server.node import ServerNode
from paceline.server.recovery import CannotGoOn
from paceline.server.replica_link import ReplicaLink
from paceline.transport import MemoryTransport
from paceline.transport.base import EMPTY, Transport
from paceline.transport.lasting_memory import LastingMemory, MemoryHolder
from paceline.update.named_rules import SGD, Add
from paceline.update.named_rules import rule as rule_at
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import RuleSpec
from paceline.update.shard import Shard
from paceline.update.torch_rule import torch_optim
from paceline.wire.messages import PushFrame, encode
from paceline.wire.requests import Barrier, ClaimWork, Declare, DeclareRows, Initialise, read_work_answer
from paceline.worker.dense import DenseClient
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.state import CacheOptions
from paceline.worker.rows.table import RowTable
from paceline.worker.waits import WorkerOptions

PATIENCE_S = 60.0
IDS = torch.arange(9) * 7919 - 20000
SIZES = (3, 4, 2)  # pieces of work in the share of each worker
MOMENTUM = SGD(lr=0.1, momentum=0.9)
POLICIES = ("bsp", "ssp:2", "essp:2", "asynchronous", "backup:1", "bound=0,visible=on_clock,deliver=on_clock")


class Killed(BaseException):
    """Ends the thread of a server as SIGKILL ends a process, but that its connections are closed politely."""


@dataclass
class Fate:
    """Kills a server at every so many points: before and after it writes something down, and before each effect.

    Where it may not be killed there, as nothing would be lost with it, it is at the next point at which it may.
    """

    stride: int
    num_points: int = 0
    num_kills: int = 0
    is_due: bool = False

    @staticmethod
    def may_kill() -> bool:
        return True

    def pass_point(self) -> None:
        self.num_points += 1
        self.is_due = bool(self.stride) and (self.is_due or self.num_points % self.stride == 0)
        if self.is_due and self.may_kill():
            self.is_due = False
            self.num_kills += 1
            raise Killed


class KillableServer(ServerNode):
    fate: Fate
    written: Any = None  # last, if nothing has followed from it yet

    def _write_down(self, written: Any, now: float) -> None:
        self.fate.pass_point()
        super()._write_down(written, now)
        self.written = written
        self.fate.pass_point()
        self.written = None

    def _on_piece(self, *piece: Any) -> None:
        self.fate.pass_point()
        super()._on_piece(*piece)
        self.fate.pass_point()

    def _perform(self, effects: list[Any]) -> set[PushId]:
        held: set[PushId] = set()
        for effect in effects:
            self.fate.pass_point()
            held |= super()._perform([effect])
        return held


@dataclass
class ServerPlace:
    """The place of one server, whose processes come and go."""

    rank: int
    num_servers: int
    transport: Transport
    address: str
    addresses: tuple[str, ...]
    fate: Fate
    holder: MemoryHolder
    link: Callable[[int], ReplicaLink] = lambda _: ReplicaLink()
    num_workers: int = NUM_WORKERS
    server: KillableServer | None = None
    is_over: bool = False
    errors: list[BaseException] = field(default_factory=list)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def run(self) -> None:
        """Serve until an orderly end: one that is killed has a successor, also if it is told to stop meanwhile."""
        while True:
            settings = ServerSettings(
                self.rank, self.num_servers, workers=tuple(range(self.num_workers)), lease_s=PATIENCE_S, retry_s=0.05
            )
            server = KillableServer(
                settings,
                self.transport.listen(self.address),
                self.transport,
                lambda: self.addresses,
                Trace(None),
                checks_memory=True,
                memory=LastingMemory.connect(self.holder.theirs),
                replica=self.link(self.rank),
            )
            server.fate = self.fate
            with self._changed:
                self.server = server
                if self.is_over:
                    server.stop()
            try:
                server.run()
            except Killed:
                continue
            except BaseException as error:
                self.errors.append(error)
                raise
            return

    def stop(self) -> None:
        with self._changed:
            self.is_over = True
            if self.server is not None:
                self.server.stop()


@contextmanager
def killable(
    kind: str, directory: Path, strides: tuple[int, ...], link: Callable[[int], ReplicaLink] = lambda _: ReplicaLink()
) -> Iterator[tuple[Cluster, list[ServerPlace]]]:
    """Run a server for each stride, which is killed at every so many points; 0: at none."""
    transport = make_transport(kind, directory)
    listeners = [transport.listen(address_of(kind, directory, rank)) for rank in range(len(strides))]
    addresses = tuple(listener.address for listener in listeners)
    for listener in listeners:
        listener.close()
    with ExitStack() as stack:
        places = [
            ServerPlace(
                rank,
                len(strides),
                transport,
                addresses[rank],
                addresses,
                Fate(stride),
                stack.enter_context(MemoryHolder()),
                link,
            )
            for rank, stride in enumerate(strides)
        ]
        threads = [threading.Thread(target=place.run, daemon=True) for place in places]
        for place, thread in zip(places, threads, strict=True):
            place.holder.start()
            thread.start()
        try:
            yield KillableCluster(transport, [], addresses, PATIENCE_S), places
        finally:
            for place in places:
                place.fate.stride = 0
                place.stop()
            for thread in threads:
                thread.join(timeout=PATIENCE_S)
            assert not any(thread.is_alive() for thread in threads), "a server hangs"
            assert not any(place.errors for place in places), [place.errors for place in places]


class KillableCluster(Cluster):
    def worker(self, rank: int, incarnation: int = 0, wait_timeout_s: float = PATIENCE_S) -> WorkerNode:
        node = super().worker(rank, incarnation, wait_timeout_s)
        options = WorkerOptions(wait_timeout_s, reconnect_timeout_s=PATIENCE_S, checks_memory=True)
        return WorkerNode(node.settings, self.transport, self.addresses, options)


@dataclass
class Trained:
    """A ledger, a table whose values depend on every push and its order, rows, and work to be dealt out."""

    ledger: Ledger
    rule: RuleSpec = MOMENTUM
    claimed: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    rows: dict[int, Tensor] = field(default_factory=dict[int, Tensor])
    values: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def work(self, node: WorkerNode) -> None:
        if self.ledger.consistency.backups:  # a worker that is left behind jumps, and would miss a barrier
            self.ledger.work(node)
            return
        spec = table("model", 257, str(self.ledger.consistency), rule=self.rule)
        open_table(node, spec, torch.linspace(-1, 1, 257))
        rank, seen = node.settings.sender.worker, torch.empty(257)
        rng = torch.Generator().manual_seed(rank)
        for _ in range(3):
            read_values(node, "model", seen, refresh=True)
            node.client("model").push(seen * 0.5 + torch.randn(257, generator=rng), count=1.0)
            node.tick()
        node.rpc.call_all(lambda number: Barrier(number, "begun"), "all workers to have begun")
        self.claim(node)
        self.ledger.work(node)
        rows = self.push_rows(node)
        node.settle()
        node.rpc.call_all(lambda number: Barrier(number, "done"), "all workers to be done")
        self.values[rank] = torch.empty(257)
        read_values(node, "model", self.values[rank], refresh=True)
        self.rows[rank] = rows.pull(IDS)

    def claim(self, node: WorkerNode) -> None:
        """Take pieces of work until none is left."""
        while True:
            body = node.rpc.call(0, lambda number: ClaimWork(number, "work", 0, 0, SIZES, (1,)), "a piece of work")
            answer = read_work_answer(body).answer
            if answer.word != "piece":
                return
            self.claimed.append((answer.home, answer.index))

    def push_rows(self, node: WorkerNode) -> RowTable:
        """Add 1 to some rows at each of a few clocks, in a column of this worker."""
        spec = RowTableSpec("rows", NUM_WORKERS, "float32", Add(), "bsp", "sum", "reject")
        table = RowTable(spec, RowClient.open(node.context, spec, CacheOptions()), node, StepMetrics(Trace(None), 0))
        for clock in range(3):
            rows = torch.zeros(len(IDS) - clock, NUM_WORKERS)
            rows[:, node.settings.sender.worker] = 1.0
            table.push(IDS[clock:], rows)
            node.tick()
        return table


def trained(
    kind: str, policy: str, directory: Path, strides: tuple[int, ...], rule: RuleSpec = MOMENTUM
) -> tuple[Trained, list[ServerPlace]]:
    directory.mkdir(mode=0o700)
    job = Trained(Ledger(policy), rule)
    with killable(kind, directory, strides) as (servers, places):
        servers.run(NUM_WORKERS, job.work)
    return job, places


def check(kind: str, policy: str, directory: Path, strides: tuple[int, ...], rule: RuleSpec = MOMENTUM) -> None:
    """Kill at every so many points, and compare with what is promised."""
    job, places = trained(kind, policy, directory / "killed", strides, rule)
    assert all(place.fate.num_kills > 1 for place in places)
    outcomes = job.ledger.expected()
    if not job.ledger.consistency.backups:
        assert sorted(job.claimed) == [(home, index) for home, size in enumerate(SIZES) for index in range(size)]
    if not job.ledger.consistency.backups:
        assert outcomes.sum() == NUM_WORKERS * NUM_CLOCKS
        counts = torch.tensor([min(place + 1, 3) for place in range(len(IDS))])
        assert all(torch.equal(rows, counts[:, None].expand(-1, NUM_WORKERS).float()) for rows in job.rows.values())
    if policy == "bsp":
        undisturbed, _ = trained(kind, policy, directory / "undisturbed", (0,) * len(strides), rule)
        for rank in range(NUM_WORKERS):
            assert torch.equal(job.values[rank], undisturbed.values[rank])


@pytest.mark.parametrize(
    ("kind", "policy"), [*(("shm", policy) for policy in POLICIES if policy != "bsp"), ("tcp", "bsp")]
)
def test_nothing_is_lost_or_doubled_wherever_servers_are_killed(kind: str, policy: str, tmp_path: Path) -> None:
    check(kind, policy, tmp_path, (83, 149))


@pytest.mark.parametrize("strides", [(97,), pytest.param((83, 149), marks=pytest.mark.campaign)])
def test_nothing_is_lost_or_doubled_where_values_leave_ahead_of_their_clock(
    strides: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_distant(monkeypatch)
    monkeypatch.setattr(DenseClient, "push", push_to_read)
    check("tcp", "bsp", tmp_path, strides)


@pytest.mark.parametrize(
    "rule",
    [
        rule_at("tests.update.own_rules:Decaying", lr=0.1),
        pytest.param(torch_optim("NAdam", lr=0.1), marks=pytest.mark.campaign),
    ],
)
def test_the_state_of_a_rule_that_keeps_its_own_goes_on_as_well(rule: RuleSpec, tmp_path: Path) -> None:
    check("shm", "bsp", tmp_path, (67,), rule)


@pytest.mark.parametrize("stride", [71, 79])
def test_a_successor_goes_on_from_a_snapshot_as_well(
    stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "Journal", partial(Journal, size_bytes=1 << 13))  # a snapshot every few dozen entries
    check("shm", "bsp", tmp_path, (stride,))


@pytest.mark.campaign
@pytest.mark.parametrize("strides", [(37,), (41, 43), (47, 101), (61,), (53, 59, 67)])
@pytest.mark.parametrize("kind", CARRIERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_lost_or_doubled_however_often_servers_are_killed(
    kind: str, policy: str, strides: tuple[int, ...], tmp_path: Path
) -> None:
    check(kind, policy, tmp_path, strides)


def bare_server(holder: MemoryHolder, told: list[str], rank: int = 0) -> ServerNode:
    """A server that does not run, in the place of the one before, of as many as are needed for its rank."""
    memory, transport = LastingMemory.connect(holder.theirs), MemoryTransport()
    settings, listener = ServerSettings(rank, rank + 1, workers=(0,)), transport.listen("memory://server")
    others = ("memory://gone",) * rank
    return ServerNode(settings, listener, transport, lambda: others, Trace(None), memory=memory, tell=told.append)


def test_a_server_that_was_killed_while_a_function_ran_is_given_up_and_one_after_that_is_not() -> None:
    with MemoryHolder() as holder:
        holder.start()
        told: list[str] = []
        server = bare_server(holder, told)
        assert server._restore() is None
        server._note_began("w", "a CallFunction")
        with pytest.raises(CannotGoOn, match="killed during a CallFunction of table 'w'"):
            bare_server(holder, told)._restore()
        assert server._journal is not None
        server._keep_up(server._journal)
        assert bare_server(holder, told)._restore() is not None
        assert told == []


def test_a_table_is_known_to_every_successor_of_a_server_that_was_killed_while_it_was_declared() -> None:
    sender, push = Sender(1, 0, 0), Push(PushId(1, 0, 0, 0), "w", 0, 0)
    with MemoryHolder() as holder:
        holder.start()
        server = bare_server(holder, [])
        server._restore()
        server._write_down(Asked(0, 0, encode(Declare(1, table("w", 4, "bsp")))), 0.0)
        server = bare_server(holder, [])
        assert server._restore() is not None
        server._handle(Join(sender))
        assert server._handle(push) == {push.id}
        recovery = bare_server(holder, [])._restore()
        assert recovery is not None
        assert recovery.wanted == {push.id}


@pytest.mark.parametrize("has_snapshot", [False, True])
def test_a_table_whose_update_has_failed_stays_closed_under_a_successor_and_waits_for_no_push(
    has_snapshot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no step")

    push = Push(PushId(1, 0, 0, 0), "w", 0, 0)
    with MemoryHolder() as holder:
        holder.start()
        server = bare_server(holder, [])
        server._restore()
        server._do_request((0, 0), Declare(1, table("w", 4, "asynchronous")), EMPTY)
        server._handle(Join(Sender(1, 0, 0)))
        server._tables["w"].accept(PushFrame(push, 1.0, (), ()), memoryview(bytearray(16)), None)
        with monkeypatch.context() as failing:
            failing.setattr(Shard, "apply", fail)
            server._handle(push)
        if has_snapshot:
            assert server._journal is not None
            server._write_snapshot(server._journal)
        successor = bare_server(holder, [])
        recovery = successor._restore()
        assert recovery is not None
        assert recovery.unfinished == []
        assert recovery.wanted == set()
        assert "no step" in successor._tables["w"].broken


def test_a_clock_that_others_complete_does_without_the_push_of_a_worker_that_has_ended_with_the_server() -> None:
    sender, push = Sender(1, 0, 0), Push(PushId(1, 0, 0, 0), "w", 0, 0)
    other = Sender(1, 1, 0)
    with MemoryHolder() as holder:
        holder.start()
        server = bare_server(holder, [])
        server._restore()
        server._do_request((0, 0), Declare(1, table("w", 4, "bsp")), EMPTY)
        for event in (Join(sender), Join(other), push, Clock(sender, 1)):
            server._handle(event)
        successor = bare_server(holder, [])
        recovery = successor._restore()
        assert recovery is not None
        assert recovery.wanted == {push.id}
        successor.do(lambda _: successor._handle(Clock(other, 1)) and None)  # heard of before the death
        successor.report_death(0, 0, "it was killed")
        assert successor._recover(recovery)
        assert successor._core.clock_of("w") == 1
        assert successor._core.held_pushes() == []
        successor._close()


def test_a_clock_that_server_0_has_completed_with_the_push_of_a_worker_that_has_ended_ends_the_run() -> None:
    sender, push = Sender(1, 0, 0), Push(PushId(1, 0, 0, 0), "w", 0, 0)
    with MemoryHolder() as holder:
        holder.start()
        server = bare_server(holder, [], rank=1)
        server._restore()
        server._do_request((0, 0), Declare(1, table("w", 4, "bsp")), EMPTY)
        server._handle(Join(sender))
        server._handle(push)
        successor = bare_server(holder, [], rank=1)
        recovery = successor._restore()
        assert recovery is not None
        successor.report_death(0, 0, "it was killed")
        assert successor._recover(recovery)
        with pytest.raises(CannotGoOn, match="clock 0 of table 'w' needs pushes of workers that did not come back"):
            successor._handle(Closed(1, "w", 0, ((0, 0),)))
        successor._close()


def test_that_rows_of_a_snapshot_are_loaded_is_known_to_every_successor() -> None:
    rows = RowTableSpec("rows", 1, "float32", Add(), "bsp", "sum", "reject")
    with MemoryHolder() as holder:
        holder.start()
        server = bare_server(holder, [])
        server._restore()
        server._do_request((0, 0), DeclareRows(1, rows), EMPTY)
        server._do_request((0, 0), Initialise(2, "rows"), EMPTY)
        for _ in range(2):
            server = bare_server(holder, [])
            assert server._restore() is not None
            assert server._request_handler._has_values("rows")


def test_an_update_that_was_half_made_and_its_worker_ended_with_the_server_ends_the_run_and_is_told() -> None:
    sender, push = Sender(1, 0, 0), Push(PushId(1, 0, 0, 0), "w", 0, 0)
    with MemoryHolder() as holder:
        holder.start()
        server = bare_server(holder, [])
        server._restore()
        server._write_down(Asked(0, 0, encode(Declare(1, table("w", 4, "asynchronous")))), 0.0)
        server = bare_server(holder, [])
        assert server._restore() is not None
        server._handle(Join(sender))
        server._write_down(push, 0.0)  # decided, and killed before it was made
        recovery = bare_server(holder, [])._restore()
        assert recovery is not None
        assert recovery.wanted == {push.id}
        with pytest.raises(CannotGoOn, match="an update was half made, and worker 0 did not come back to repeat its"):
            recovery.note_death(Died(0, 0, "it was killed"))


def test_a_server_without_room_for_what_it_is_told_goes_on_and_says_that_it_is_lost_if_it_is_killed() -> None:
    with MemoryHolder() as holder:
        holder.start()
        told: list[str] = []
        server = bare_server(holder, told)
        server._restore()
        server._write_down(Died(0, 0, "x" * JOURNAL_BYTES), 0.0)
        server._write_down(Timeout(), 0.0)  # without a journal
        [line] = told
        assert line.startswith("the run ends if server 0 is killed: ")
        assert line.removeprefix("the run ends if server 0 is killed: ").encode() in holder.read(COLD, COLD_BYTES)
        assert holder.read(JOURNAL, 8) == b""
