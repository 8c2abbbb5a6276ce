"""A server is killed at any point, its machine with it: its replica serves, and nothing is lost or doubled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tests.nodes.cluster import Cluster, make_transport
from tests.nodes.test_faults import NUM_CLOCKS, NUM_WORKERS, Ledger
from tests.nodes.test_successors import (
    IDS,
    MOMENTUM,
    PATIENCE_S,
    POLICIES,
    SIZES,
    Fate,
    KillableServer,
    Killed,
    Trained,
)
from torch import Tensor

from paceline.core.settings import ServerSettings
from paceline.job.spec import write_private
from paceline.job.views import FIRST, View, Views
from paceline.observe.trace import Trace
from paceline.server import replica_link
from paceline.server.node import ServerNode
from paceline.server.replica import Follower
from paceline.server.replica_lag import ReplicaLag
from paceline.server.replica_link import ReplicaLink
from paceline.server.replica_place import ReplicaPlace, Superseded
from paceline.server.row_table import ServedRowTable
from paceline.server.served_table import ServedTable
from paceline.transport.base import Listener, Transport
from paceline.update.filters import KeyCache
from paceline.update.named_rules import Add
from paceline.update.named_rules import rule as rule_at
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import RuleSpec
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.state import CacheOptions
from paceline.worker.rows.table import RowTable
from paceline.worker.waits import WorkerOptions


class WatchedServer(KillableServer):
    """Is killed only while it serves and has a replica, and tells what it knows as it ends."""

    pair: Pair

    @property
    def fate(self) -> Fate:  # type: ignore[override]
        return self.pair.fate if self.follows is None and self.replica.is_there else Fate(0)

    def _run_once(self) -> bool:
        if self.pair.repeats and self.follows is None and not self.replica.is_there:
            self.pair.wait_candidate()
        return super()._run_once()

    def _close(self) -> None:
        self.pair.note_state(self)
        super()._close()


@dataclass
class Moves:
    """Has the process that serves leave, each time that it was asked so often whether it is to."""

    stride: int
    num_looks: int = 0
    num_moves: int = 0

    def leaves(self) -> bool:
        self.num_looks += 1
        due = self.stride > 0 and self.num_looks % self.stride == 0
        self.num_moves += due
        return due


@dataclass
class Pair:
    """A server and its replica, each in a thread that stands for a process; `repeats`: one comes for each killed."""

    rank: int
    num_servers: int
    transport: Transport
    folder: Path
    fate: Fate
    repeats: bool = False
    lag: int = 0  # clocks
    moves: Moves | None = None
    told: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # what servers have said of their workers
    errors: list[BaseException] = field(default_factory=list)
    nodes: list[ServerNode] = field(default_factory=list)
    states: list[object] = field(default_factory=list)  # of the head and its replica, as they end
    threads: list[threading.Thread] = field(default_factory=list)
    changed: threading.Condition = field(default_factory=threading.Condition)
    is_over: bool = False

    @property
    def views(self) -> Views:
        return Views(self.folder, self.rank)

    def start(self) -> None:
        self.views.change(FIRST)
        nodes = [self.make(process) for process in range(2)]
        for node in nodes:
            self.launch(node)

    def make(self, process: int) -> ServerNode:
        listener = self.transport.listen("tcp://127.0.0.1:0")
        write_private(self.views.published(process), listener.address.encode())  # whole, as a head may look just then
        place = self.place(1, FIRST.number) if process == FIRST.head else None
        settings = ServerSettings(
            self.rank, self.num_servers, workers=tuple(range(NUM_WORKERS)), lease_s=PATIENCE_S, retry_s=0.05
        )
        node = WatchedServer(
            *(settings, listener, self.transport, self.addresses, Trace(None)),
            checks_memory=True,
            tell=self.lost.append,
            replica=ReplicaLink(
                place,
                self.find if self.repeats else None,
                self.moves.leaves if self.moves else None,
                lag=ReplicaLag(self.lag) if self.lag else None,
            ),
            follows=self.follower(listener) if process else None,
        )
        node.pair = self
        return node

    def follower(self, listener: Listener) -> Follower:
        return Follower(self.rank, self.views, listener, PATIENCE_S, self.told.append, lag=self.lag)

    def launch(self, node: ServerNode) -> None:
        thread = threading.Thread(target=self.run, args=(node,), daemon=True)
        self.nodes.append(node)
        self.threads.append(thread)
        thread.start()

    def place(self, process: int, view: int) -> ReplicaPlace:
        address = self.views.published(process).read_text
        return ReplicaPlace(self.rank, view, self.views, address, self.transport, self.told.append, process=process)

    def find(self) -> list[ReplicaPlace]:
        view = self.views.newest()
        assert view is not None
        return [self.place(process, view.number + 1) for process in self.views.candidates()]

    def wait_candidate(self) -> None:
        """Block until another process has come in the place of one that was killed."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.is_over or self.views.candidates(), PATIENCE_S)

    def run(self, node: ServerNode) -> None:
        try:
            node.run()
        except Killed:
            self.begin_next()
        except Superseded as left:
            if not self.moves:
                self.errors.append(left)
            self.begin_next()
        except BaseException as error:
            self.errors.append(error)

    def begin_next(self) -> None:
        """Have another process come in the place of one that has ended."""
        with self.changed:
            if self.repeats and not self.is_over:
                self.launch(self.make(len(self.nodes)))
            self.changed.notify_all()

    def addresses(self) -> tuple[str, ...]:
        return tuple(Views(self.folder, rank).address() for rank in range(self.num_servers))

    def note_state(self, node: ServerNode) -> None:
        """Note what a process knows as it ends: the head first, which its replica waits for."""
        self.states.append((node._parts().dump(), {name: content(table) for name, table in node._tables.items()}))

    def stop(self) -> None:
        with self.changed:
            self.is_over = True
            self.changed.notify_all()
        for node in self.nodes:
            node.stop()
        for thread in self.threads:
            thread.join(timeout=PATIENCE_S)
        assert not any(thread.is_alive() for thread in self.threads), "a server hangs"


def content(table: ServedTable) -> object:
    """Values and state of a table."""
    if isinstance(table, ServedRowTable):
        piece = table.store.rows(0, 1 << 10)
        return piece.ids.tolist(), {name: column.tolist() for name, column in piece.columns.items()}
    return table.state()


class ReplicatedCluster(Cluster):
    folder: Path
    keeps_pushes: bool = False

    def worker(self, rank: int, incarnation: int = 0, wait_timeout_s: float = PATIENCE_S) -> WorkerNode:
        node = super().worker(rank, incarnation, wait_timeout_s)
        options = WorkerOptions(
            wait_timeout_s,
            reconnect_timeout_s=PATIENCE_S,
            checks_memory=True,
            where=lambda server: Views(self.folder, server).address(),
        )
        settings = replace(node.settings, keeps_pushes=self.keeps_pushes)
        return WorkerNode(settings, self.transport, self.addresses, options)


@contextmanager
def replicated(
    folder: Path,
    kills: tuple[int, ...],
    kind: str = "tcp",
    *,
    repeats: bool = False,
    lag: int = 0,
    moves: Moves | None = None,
) -> Iterator[tuple[ReplicatedCluster, list[Pair]]]:
    """Run a server and its replica for each entry: the point at which the server is killed; 0 for never."""
    folder.mkdir(mode=0o700)
    transport = make_transport(kind, folder)
    pairs = [
        Pair(rank, len(kills), transport, folder, Fate(kill), repeats, lag, moves) for rank, kill in enumerate(kills)
    ]
    for pair in pairs:
        pair.start()
    servers = ReplicatedCluster(transport, [], pairs[0].addresses(), PATIENCE_S)
    servers.folder, servers.keeps_pushes = folder, lag > 0
    try:
        yield servers, pairs
    finally:
        for pair in pairs:
            pair.fate.stride = 0
            if pair.moves:
                pair.moves.stride = 0
            pair.stop()
        errors = [error for pair in pairs for error in pair.errors]
        assert not errors, errors


def trained(
    folder: Path, policy: str, kills: tuple[int, ...], rule: RuleSpec = MOMENTUM, kind: str = "tcp", lag: int = 0
) -> tuple[Trained, list[Pair]]:
    job = Trained(Ledger(policy), rule)
    with replicated(folder, kills, kind, lag=lag) as (servers, pairs):
        servers.run(NUM_WORKERS, job.work)
    return job, pairs


def check(folder: Path, calm: Path, policy: str, kills: tuple[int, ...], kind: str = "tcp", lag: int = 0) -> None:
    """Kill each server at its point, and compare with what is promised."""
    job, pairs = trained(folder / "killed", policy, kills, kind=kind, lag=lag)
    assert [pair.fate.num_kills for pair in pairs] == [1] * len(kills)
    for pair in pairs:
        [line] = pair.told
        assert line.startswith(f"server {pair.rank} is served by its replica from now on: "), line
        assert pair.lost == []
    outcomes = job.ledger.expected()
    if job.ledger.consistency.backups:
        return
    assert outcomes.sum() == NUM_WORKERS * NUM_CLOCKS
    assert sorted(job.claimed) == [(home, index) for home, size in enumerate(SIZES) for index in range(size)]
    counts = torch.tensor([min(place + 1, 3) for place in range(len(IDS))])
    assert all(torch.equal(rows, counts[:, None].expand(-1, NUM_WORKERS).float()) for rows in job.rows.values())
    if policy == "bsp":
        for rank, values in undisturbed(calm / str(len(kills)), len(kills)).items():
            assert torch.equal(job.values[rank], values)


@cache
def undisturbed(folder: Path, num_servers: int) -> dict[int, Tensor]:
    """The values that workers see at the end of a run in which no server is killed."""
    job, pairs = trained(folder, "bsp", (0,) * num_servers)
    assert [pair.told for pair in pairs] == [[]] * num_servers
    return job.values


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the undisturbed runs are made, once for all tests."""
    return tmp_path_factory.mktemp("calm")


@pytest.mark.parametrize("point", [1, 3, 20, 61, 117, 203, 271, 401])
def test_under_bsp_the_bytes_are_those_of_an_undisturbed_run_wherever_the_server_is_killed(
    point: int, tmp_path: Path, calm: Path
) -> None:
    check(tmp_path, calm, "bsp", (point,))


@pytest.mark.parametrize("policy", POLICIES[1:])
@pytest.mark.parametrize("point", [47, pytest.param(120, marks=pytest.mark.campaign)])
def test_nothing_is_lost_or_doubled_under_any_policy(policy: str, point: int, tmp_path: Path, calm: Path) -> None:
    check(tmp_path, calm, policy, (point, point + 33))


@pytest.mark.parametrize("kind", ["tls"])
def test_both_servers_of_a_job_may_be_killed(kind: str, tmp_path: Path, calm: Path) -> None:
    check(tmp_path, calm, "bsp", (101, 57), kind=kind)


@pytest.mark.parametrize(("policy", "points"), [("bsp", (203,)), ("asynchronous", (150, 183))])
def test_nothing_is_lost_or_doubled_where_the_replica_may_lag(
    policy: str, points: tuple[int, ...], tmp_path: Path, calm: Path
) -> None:
    check(tmp_path, calm, policy, points, kind="tls", lag=2)


@pytest.mark.campaign
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("point", range(2, 400, 7))
def test_nothing_is_lost_or_doubled_at_any_point(policy: str, point: int, tmp_path: Path, calm: Path) -> None:
    check(tmp_path, calm, policy, (point,))


class WithKeyCache(Trained):
    """Rows whose ids travel once: later frames name them by a digest, of which a replica has not heard."""

    def push_rows(self, node: WorkerNode) -> RowTable:
        spec = RowTableSpec("rows", NUM_WORKERS, "float32", Add(), "bsp", "sum", "reject", filters=(KeyCache(),))
        table = RowTable(spec, RowClient.open(node.context, spec, CacheOptions()), node, StepMetrics(Trace(None), 0))
        for _ in range(4):
            table.push(IDS, torch.ones(len(IDS), NUM_WORKERS))
            node.tick()
        return table


@pytest.mark.parametrize("kind", [Trained, WithKeyCache])
def test_a_replica_knows_what_its_head_knows_when_that_ends(kind: type[Trained], tmp_path: Path) -> None:
    job = kind(Ledger("bsp"), rule_at("tests.update.own_rules:Decaying", lr=0.1))
    with replicated(tmp_path / "job", (0,)) as (servers, [pair]):
        servers.run(NUM_WORKERS, job.work)
    head, other = pair.states
    assert head == other
    assert pair.told == []


@pytest.mark.parametrize("kind", [Trained, WithKeyCache])
def test_a_server_that_is_killed_again_and_again_has_a_new_replica_each_time(
    kind: type[Trained], tmp_path: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_link, "_IDLE_LOOK_S", 0.0)
    job = kind(Ledger("bsp"), MOMENTUM)
    with replicated(tmp_path / "job", (89,), repeats=True) as (servers, [pair]):
        servers.run(NUM_WORKERS, job.work)
        assert job.ledger.expected().sum() == NUM_WORKERS * NUM_CLOCKS
        assert sorted(job.claimed) == [(home, index) for home, size in enumerate(SIZES) for index in range(size)]
    assert pair.fate.num_kills > 1
    assert pair.told.count("server 0 has a replica again") >= pair.fate.num_kills - 1
    for rank, values in undisturbed(calm / "1", 1).items():
        assert torch.equal(job.values[rank], values)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_server_that_leaves_again_and_again_loses_and_doubles_nothing(
    lag: int, tmp_path: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_link, "_IDLE_LOOK_S", 0.0)
    job, moves = Trained(Ledger("bsp"), MOMENTUM), Moves(stride=60)
    with replicated(tmp_path / "job", (0,), repeats=True, lag=lag, moves=moves) as (servers, [pair]):
        servers.run(NUM_WORKERS, job.work)
        assert job.ledger.expected().sum() == NUM_WORKERS * NUM_CLOCKS
        assert sorted(job.claimed) == [(home, index) for home, size in enumerate(SIZES) for index in range(size)]
    assert moves.num_moves > 1
    said = "server 0 is served by its replica from now on: the process before it has handed over"
    assert pair.told.count(said) == moves.num_moves
    for rank, values in undisturbed(calm / "1", 1).items():
        assert torch.equal(job.values[rank], values)


def test_a_replica_is_replaced_and_the_one_that_came_last_serves(
    tmp_path: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place of a replica moves while the replica is there, and the head is killed after that."""
    monkeypatch.setattr(replica_link, "_IDLE_LOOK_S", 0.0)
    job = Trained(Ledger("bsp"), MOMENTUM)
    with replicated(tmp_path / "job", (203,), repeats=True) as (servers, [pair]):
        pair.nodes.append(pair.nodes[0])  # processes are counted by them: that of number 2 never was
        pair.launch(pair.make(3))
        servers.run(NUM_WORKERS, job.work)
    assert pair.fate.num_kills > 0
    assert pair.told[0] == "server 0 has another replica"
    views = [pair.views._read(f"server-0.view-{number}") for number in range(1, 4)]
    assert views == [FIRST, View(2, head=0, replica=3), View(3, head=3)]
    assert pair.told[1].startswith("server 0 is served by its replica from now on: ")
    for rank, values in undisturbed(calm / "1", 1).items():
        assert torch.equal(job.values[rank], values)
