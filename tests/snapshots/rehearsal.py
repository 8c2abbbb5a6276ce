"""Jobs that take snapshots in one thread, with drawn faults: real workers, servers, journals, writers and files.

While a snapshot is written, between two steps of its writer and wherever that waits, training goes on, lines are cut,
and workers and servers are killed; a server that is killed has a successor. The disk may be full, and the power may be
cut; then the job goes on from what is there, with another number of servers. `SnapshotHistory` checks all of it.
"""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from tests.nodes import test_successors as successors
from tests.nodes.cluster import table
from tests.snapshots.checks import (
    FIRST_OWN_ROW,
    NUM_BLOCKS,
    NUM_SHARED,
    STATE,
    Content,
    Made,
    SnapshotHistory,
    WrongSnapshotError,
    own_rows,
)
from tests.snapshots.disk import Disk, Killed
from tests.worker.rows.world import NEVER_S, End, Wire, World

from paceline.core.consistency import Consistency, adaptive, asynchronous, backup, bsp, essp, ssp
from paceline.core.events import Died, Timeout
from paceline.core.messages import Join, Push, PushId, Sender
from paceline.core.settings import ServerSettings
from paceline.errors import PacelineError
from paceline.observe.trace import Trace
from paceline.server.connections import Incoming
from paceline.server.node import ServerNode
from paceline.server.recovery import CannotGoOn
from paceline.snapshots.folder import newest
from paceline.snapshots.taking import SavedJob, SnapshotPlan, SnapshotTaker
from paceline.transport.base import EMPTY, Frame
from paceline.transport.lasting_memory import LastingMemory, MemoryHolder
from paceline.update.named_rules import SGD, Add
from paceline.update.rows.spec import RowTableSpec
from paceline.wire.messages import Hello, PushFrame, encode
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.state import CacheOptions
from paceline.worker.table_calls import TableCalls
from paceline.worker.table_opener import TableOpener

POINTS: tuple[Consistency, ...] = (
    bsp(),
    ssp(2),
    essp(2),
    asynchronous(),
    Consistency(2, "on_clock"),
    backup(1),
    adaptive(1, 3),
    backup(1),
)
NUM_WORKERS, NUM_CLOCKS, MOST_LIVES = 3, 30, 3
NUM_SERIALS = 2 * MOST_LIVES * NUM_CLOCKS * NUM_WORKERS
MOST_AHEAD = 3  # clocks that a worker may be ahead of another
CHUNK, PIECE_BYTES = 512, 600  # of pieces of dense tables and of rows
KEEP = 1
NUM_ACTS = 120
MOST_LOOKS = 400
MOST_FRAMES = 30  # on their way, before they are sent again
LATE_STEPS = 3000  # in which a job has come to its end without faults


class JobEnded(BaseException):
    """All processes of the job have ended here: the power was cut, or a server has no successor."""


@dataclass
class DrawnFate(successors.Fate):
    """Kills a server at points that are drawn."""

    rng: Random = field(default_factory=Random)
    chance: float = 0.0

    def pass_point(self) -> None:
        self.num_points += 1
        if self.rng.random() < self.chance:
            self.num_kills += 1
            raise successors.Killed


class Arrivals:
    """What a server in the place of another one takes from: frames that workers send it meanwhile."""

    def __init__(self, get: Callable[[], object | None]) -> None:
        self._get = get

    def get(self, _: float | None) -> object | None:
        return self._get()

    def drop(self, connection: End) -> None:
        connection.close()

    def close(self) -> None:
        """Nothing was opened."""


class Looks:
    """Stands for the time that a server waits for workers that come back: it ends with so many looks at it."""

    def __init__(self) -> None:
        self._num_left = MOST_LOOKS

    def elapsed_s(self) -> float:
        self._num_left -= 1
        return 0.0 if self._num_left > 0 else NEVER_S


class Inline:
    """An executor that makes each call at once, while the world goes on wherever it waits."""

    def __init__(self, *_: object) -> None:
        """Take what a pool of threads takes."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, **_: object) -> None:
        """Nothing is under way."""


@dataclass
class SnapshotWorld(World):
    """One job, which begins anew or goes on from a snapshot; see `World`. `rehearse` runs it."""

    history: SnapshotHistory = field(kw_only=True)
    point: Consistency = field(kw_only=True)
    disk: Disk = field(kw_only=True)
    generation: int = 1
    saved: SavedJob | None = None
    chance: float = 0.0  # that a server is killed at one of the points that it passes
    counts: Counter[str] = field(default_factory=Counter)
    first_clock: int = 0
    killed: dict[int, int] = field(default_factory=dict)  # by worker that is not here: its last incarnation
    holders: list[MemoryHolder] = field(default_factory=list)
    waiting: list[deque[Any]] = field(default_factory=list)
    recovering: set[int] = field(default_factory=set)
    taker: SnapshotTaker | None = None
    is_calm: bool = True
    is_writing: bool = False
    opened: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.first_clock = 0 if self.saved is None else self.saved.resumed.clock
        for _ in range(self.num_servers):
            self.holders.append(self.opened.enter_context(MemoryHolder()))
            self.holders[-1].start()
            self.waiting.append(deque())
        super().__post_init__()
        for rank in range(self.num_workers):
            self.open_tables(rank)
        self.is_calm = False

    # -- processes ---------------------------------------------------------------------------------------------------

    def server_settings(self, rank: int) -> ServerSettings:
        return replace(super().server_settings(rank), generation=self.generation, clock=self.first_clock)

    def make_server(self, rank: int) -> ServerNode:
        server = self.make_process(rank)
        server._restore()
        return server

    def make_process(self, rank: int) -> successors.KillableServer:
        """Make a process for the place of a server, which goes on from the memory that is there."""
        server = successors.KillableServer(
            self.server_settings(rank),
            None,  # type: ignore[arg-type]
            self.carrier,  # type: ignore[arg-type]
            lambda: self.addresses,
            Trace(None),
            memory=LastingMemory.connect(self.holders[rank].theirs),
        )
        server.fate = DrawnFate(0, rng=self.dice)
        server._acceptor = Arrivals(lambda: self.next_item(rank))  # type: ignore[assignment]
        server._peers.drop = server._acceptor.drop
        return server

    def start(self, rank: int, incarnation: int, generation: int = 1) -> WorkerNode:
        del generation
        return super().start(rank, incarnation, self.generation)

    def open_tables(self, rank: int) -> None:
        """Open both tables, with what is in the snapshot that this job goes on from."""
        node = self.workers[rank]
        while not node._joined:
            self.move()
        policy, saved = str(self.point), self.saved
        opener = TableOpener(rank, node, StepMetrics(Trace(None), rank), saved=saved)
        dense = table("w", self.history.num_elements, policy, rule=SGD(lr=1.0, momentum=0.5))
        opener.open_dense(dense, (self.history.num_elements,), torch.Tensor.zero_, read_my_writes=True, live=False)
        rows = RowTableSpec("rows", 2, "float32", Add(), policy, "sum", "reject")
        keep = True if self.point.deliver == "on_clock" else None
        RowClient.open(node.context, rows, CacheOptions(keep))
        if rank == 0 and node.settings.sender.incarnation == 0 and saved is not None:
            for piece in saved.rows_of(rows) or ():
                TableCalls(node, "rows").write(piece)
        if rank == 0:
            plan = SnapshotPlan(self.disk.folder, every_s=1e9, keep=KEEP)
            resumed = None if saved is None else saved.resumed.folder
            self.taker = SnapshotTaker(node, self.num_workers, self.note_failure, plan, resumed)

    def note_failure(self, line: str) -> None:
        self.counts["a snapshot that was not made"] += 1
        if "AssertionError" in line:
            raise WrongSnapshotError(line)

    # -- servers that are killed ---------------------------------------------------------------------------------------

    def serve(self, server: int, item: Any) -> None:
        if server in self.recovering:
            if not isinstance(item, Timeout):
                self.waiting[server].append(item)
            return
        node = self.servers[server]
        is_kept = node._journal is not None
        node.fate.chance = self.chance if is_kept and not self.is_calm and not self.recovering else 0.0  # type: ignore[attr-defined]
        try:
            if isinstance(item, Timeout):
                node._handle(item)
            else:
                node._handle_item(item)
            if node._table_rpc.has_waiting:
                node._table_rpc.advance_idle()
        except successors.Killed:
            if isinstance(item, Died):  # which the launcher tells the next process as well
                self.waiting[server].append(item)
            self.replace_server(server)

    def replace_server(self, server: int) -> None:
        """Have another process go on in the place of a server that was killed."""
        self.counts["a server killed"] += 1
        self.counts["a server killed while a snapshot is written"] += self.is_writing
        self.recovering.add(server)
        self.servers[server]._close()
        self.old = [entry for entry in self.old if entry[0] != server]
        for to, _, wire in self.between:
            wire.is_cut = wire.is_cut or to == server
        self.between = [entry for entry in self.between if entry[0] != server]
        node = self.servers[server] = self.make_process(server)
        try:
            recovery = node._restore()
            for worker in list(self.workers):
                self.reconnect(worker, server)
            if recovery is not None:
                node._recover(recovery)
        except CannotGoOn as error:  # an update that is half made needs a worker that was killed as well
            self.counts["a job lost"] += 1
            self.disk.is_dead = True
            raise JobEnded from error
        self.recovering.discard(server)
        while self.waiting[server]:
            self.serve(server, self.waiting[server].popleft())

    def next_item(self, server: int) -> object | None:
        """Return what arrives at a server that waits for workers; None if that is nothing yet."""
        if self.waiting[server]:
            return self.waiting[server].popleft()
        found = [link for (_, to), link in self.links.items() if to == server and link.up.frames]
        if found:
            link = self.dice.choice(found)
            return Incoming(link.end, link.up.frames.popleft())  # type: ignore[arg-type]
        self.move()
        return None

    def move(self) -> bool:
        """Move a frame as often between servers as elsewhere, as there are fewer lines between them."""
        if any(wire.frames for _, _, wire in self.between) and self.dice.random() < 0.4:
            self.tell()
            return True
        return super().move()

    def remind(self) -> None:
        """Have all say again what is unanswered, unless that is on its way."""
        links = sum(len(link.up.frames) + len(link.down.frames) for link in self.links.values())
        if links + sum(len(wire.frames) for _, _, wire in self.between) < MOST_FRAMES:
            super().remind()

    def step(self, worker: int, server: int, *, up: bool) -> None:
        if not (up and server in self.recovering):
            super().step(worker, server, up=up)

    # -- what happens ------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Have something happen that is no snapshot."""
        what = self.dice.choices(
            (self.train, self.move, self.kill_one, self.restart_one, self.remind), (3, 16, 0.06, 0.6, 0.3)
        )
        what[0]()

    def train(self) -> None:
        """Have a worker push to both tables, and finish a clock, if it need not wait for that."""
        rank = self.dice.choice(list(self.workers))
        node, slowest = self.workers[rank], min(node.clock for node in self.workers.values())
        if node.clock >= min(NUM_CLOCKS, slowest + MOST_AHEAD):
            return
        dense, rows = node._tables["w"], node._tables["rows"]
        has_room = node._core.may_push("w") and dense.pushes.has_slot(node.clock)  # type: ignore[attr-defined]
        if not has_room or rows.num_under_way() >= 6:
            return
        incarnation = node.settings.sender.incarnation
        life = (self.generation - 1) * MOST_LIVES + incarnation
        serial = (life * NUM_CLOCKS + node.clock) * self.num_workers + rank
        shared = tuple(sorted(self.dice.sample(range(NUM_SHARED), 2)))
        self.history.made[serial] = Made(self.generation, rank, incarnation, node.clock, shared)
        marks = torch.zeros(self.history.num_elements)
        marks.view(NUM_BLOCKS, -1)[:, serial] = 1.0
        ids = torch.tensor([*shared, *own_rows(serial)])
        dense.push(marks, count=1.0)  # type: ignore[attr-defined]
        rows.push(ids, torch.ones(len(ids), 2), count=1.0, hyper=())  # type: ignore[attr-defined]
        node.tick()

    def kill_one(self) -> None:
        """Kill a worker; two at least stay."""
        if len(self.workers) > 2 and not self.is_calm and not self.recovering:
            self.kill(self.dice.choice(list(self.workers)))

    def kill(self, worker: int) -> None:
        incarnation = self.workers[worker].settings.sender.incarnation
        self.counts["a worker killed"] += 1
        self.counts["the writer killed"] += worker == 0 and self.is_writing
        self.killed[worker] = incarnation
        self.history.lost.add((self.generation, worker, incarnation))
        super().kill(worker)

    def restart_one(self) -> None:
        """Start a worker again that was killed, unless a snapshot is written: that would stay unwatched meanwhile."""
        again = [rank for rank, incarnation in self.killed.items() if incarnation + 1 < MOST_LIVES]
        if again and not self.is_writing and not self.recovering:
            rank = self.dice.choice(again)
            self.start(rank, self.killed.pop(rank) + 1)
            self.open_tables(rank)

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> None:
        """Have worker 0 take a snapshot, as it does after a clock when one is due."""
        if 0 not in self.workers or self.taker is None:
            return
        clock = self.workers[0].clock
        self.counts["a snapshot begun"] += 1
        self.disk.is_dead, self.is_writing = False, True
        try:
            self.taker.take_planned([{"clock": clock}])
            if self.taker._last is not None:
                found = self.taker._last.result()
                self.history.committed[found.name] = clock
                self.history.check(found)
                self.counts["a snapshot reported"] += 1
                self.counts["one with changed rows"] += bool(newest(found).manifest.base)
        except (Killed, PacelineError) as error:
            if isinstance(error.__context__, JobEnded):  # the writer tidied up on a disk that takes nothing any more
                raise error.__context__ from None
        finally:
            self.disk.is_full = self.is_writing = False

    def go_on(self, node: WorkerNode) -> None:
        """Go on while a snapshot waits; raises Killed in its writer if that has ended."""
        self.act()
        if self.workers.get(0) is not node:
            self.disk.is_dead = True
            raise Killed

    def between_steps(self) -> None:
        """Go on between two steps of the writer."""
        chance = self.dice.random()
        if self.is_calm:
            return
        if chance < 0.008 and len(self.workers) > 2 and not self.recovering:
            self.kill(0)
        elif chance < 0.012:
            self.disk.is_full = True
            self.counts["the disk full"] += 1
        elif chance < 0.016:
            self.counts["power cut while a snapshot is written"] += 1
            self.disk.is_dead = True
            raise JobEnded
        elif chance < 0.3:
            self.act()
        self.disk.is_dead = 0 not in self.workers

    # -- the end -----------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Have no more faults, and let all workers come to the last clock; check what the servers have then."""
        self.is_calm, self.roughness = True, 0.0
        for _ in range(LATE_STEPS):
            self.train()
            for _ in range(4):
                self.move()
            nodes = self.workers.values()
            if all(node.clock == NUM_CLOCKS for node in nodes) and not any(map(self.num_open, nodes)):
                self.settle()
                self.remind()
                self.settle()
                self.history.check_content("the end", self.content(), NUM_CLOCKS)
                return
        raise WrongSnapshotError(f"L1: workers stand at {[node.clock for node in self.workers.values()]}")

    @staticmethod
    def num_open(node: WorkerNode) -> int:
        return sum(each.num_under_way() for each in node._tables.values())

    def content(self) -> Content:
        """Return what the servers have."""
        shards = [server._tables["w"].shard for server in self.servers]  # type: ignore[attr-defined]
        momenta = list[torch.Tensor]()
        for shard in shards:
            state = [value.view(-1) for name, value in shard.state().items() if name.endswith(STATE)]
            momenta.append(torch.cat(state) if state else torch.zeros_like(shard.values))
        found = dict[int, list[float]]()
        for server in self.servers:
            piece = server._tables["rows"].store.rows(0, 1 << 20)  # type: ignore[attr-defined]
            found.update(zip(piece.ids.tolist(), piece.values.tolist(), strict=True))
        values = torch.cat([shard.values for shard in shards])
        return Content(values.numpy().copy(), torch.cat(momenta).numpy().copy(), found)

    def send_late(self) -> None:
        """Have a worker of the job before this one say what it had not sent yet: nothing of it may count (K5)."""
        sender = Sender(self.generation - 1, 1, 0)
        marks = torch.ones(self.history.num_elements)
        for server, node in enumerate(self.servers):
            length = node._tables["w"].shard.values.numel()  # type: ignore[attr-defined]
            end = End(encode(Hello("worker", 1, 0, self.generation - 1)), Wire())
            late = Push(PushId(self.generation - 1, 1, 0, 99), "w", self.first_clock, 0)
            for message, body in (
                (Join(sender), EMPTY),
                (PushFrame(late, 1.0, (), ()), memoryview(marks[:length].numpy())),
            ):
                self.serve(server, Incoming(end, Frame(encode(message), body.cast("B"))))  # type: ignore[arg-type]

    def close(self) -> None:
        for node in self.workers.values():
            self.discard(node)
        for server in self.servers:
            server._close()
        self.opened.close()


def rehearse(seed: int) -> tuple[SnapshotHistory, Counter[str]]:
    """Run one job, cut its power, and go on with what is on the disk; raises WrongSnapshotError."""
    rng, point = Random(seed), POINTS[seed % len(POINTS)]
    exact, bounded = point.visible == "on_clock", point.visible == "on_clock" or point.bound is not None
    history = SnapshotHistory(NUM_SERIALS, exact, bounded, bool(point.backups))
    counts = Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        disk = Disk(Path(place) / "snapshots", rng)
        disk.folder.mkdir()
        _run_job(SnapshotWorld, rng, point, history, disk, counts, None)
        disk.cut_power()
        if history.check_folder(disk.folder) < 0:
            return history, counts
        saved = newest(disk.folder)
        saved.verify()
        counts["a job resumed"] += 1
        has = history.content_of(saved.folder)
        _keep_only(history, has)
        _run_job(SnapshotWorld, rng, point, history, disk, counts, SavedJob(saved))
        history.check_folder(disk.folder)
    return history, counts


def _keep_only(history: SnapshotHistory, has: Content) -> None:
    """Forget the pushes that are lost with their job: those that no part of the snapshot has."""
    blocks = has.momentum.reshape(NUM_BLOCKS, history.num_serials)
    in_rows = {(each - FIRST_OWN_ROW) // NUM_BLOCKS for each in has.rows if each >= FIRST_OWN_ROW}
    history.made = {s: made for s, made in history.made.items() if blocks[:, s].any() or s in in_rows}
    history.lost |= {(made.generation, made.rank, made.incarnation) for made in history.made.values()}


def _run_job(
    make: type[SnapshotWorld],
    rng: Random,
    point: Consistency,
    history: SnapshotHistory,
    disk: Disk,
    counts: Counter[str],
    saved: SavedJob | None,
) -> None:
    world = make(
        NUM_WORKERS,
        rng.randint(1, 3),
        rng,
        rng.choice((0.0, 0.0, 0.02)),
        history=history,
        point=point,
        disk=disk,
        generation=1 if saved is None else 2,
        saved=saved,
        chance=rng.choice((0.0, 0.002, 0.01)),
        counts=counts,
    )
    disk.between, disk.is_dead = world.between_steps, False
    try:
        with going_on(world), disk.watched():
            if saved is not None:
                world.send_late()
            for _ in range(NUM_ACTS if saved is not None else rng.randint(NUM_ACTS // 2, 2 * NUM_ACTS)):
                world.snapshot() if rng.random() < 0.06 else world.act()
            if saved is not None or rng.random() < 0.3:
                world.finish()
                world.snapshot()
    except JobEnded:
        disk.cut_power()
    finally:
        disk.between = lambda: None
        world.close()


@contextmanager
def going_on(world: SnapshotWorld) -> Iterator[None]:
    """Have pieces be small, and the world go on where the writer of a snapshot waits."""

    def wait(reader: Any, future: Future[memoryview], what: str) -> memoryview:
        for _ in range(LATE_STEPS):
            if future.done():
                return future.result(0)
            world.go_on(reader.node)
        raise WrongSnapshotError(f"L1: {what} do not answer")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.update.cuts.CHUNK", CHUNK)
        patch.setattr("paceline.update.rows.cuts.PIECE_BYTES", PIECE_BYTES)
        patch.setattr("paceline.snapshots.increments.WHOLE_EVERY", 3)  # chains of few
        patch.setattr("paceline.snapshots.increments.MOST_CHANGED", 9.0)
        patch.setattr("paceline.snapshots.writing.ROWS_FILE_BYTES", 4 * PIECE_BYTES)
        patch.setattr("paceline.server.node.Stopwatch", Looks)
        patch.setattr("paceline.snapshots.taking.ThreadPoolExecutor", Inline)
        patch.setattr("paceline.worker.cuts.CutReader._wait", wait)
        yield
