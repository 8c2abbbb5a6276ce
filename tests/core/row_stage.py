"""Cores with row tables, a store and a cache in plain Python around them, and what a read may then show.

A row is the set of the pushes that it contains, so every promise can be asked of it directly. What is on its way may
be late, lost, doubled or overtaken.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from tests.core.cores import of, sender

from paceline.core.consistency import Consistency
from paceline.core.effects import Apply, Fail, Forget, Install, ReadDone, Release, Reply, Send, Serve, Tell
from paceline.core.events import Arrived, Connected, Declared, Opened, Timeout, WantClock, WantJoin, WantPush, WantRows
from paceline.core.messages import Delivered, Fetched, Pull, Push, PushId
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.core.worker import WorkerCore

TABLE = "r"
Row = frozenset[PushId]
Rows = dict[int, Row]


@dataclass
class RowServer:
    """A server core and its store: which readers are subscribed to which rows, and which have changed since."""

    core: ServerCore
    rows: dict[int, set[PushId]] = field(default_factory=lambda: defaultdict(set))
    bodies: dict[PushId, set[int]] = field(default_factory=dict)
    asked: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    subscribed: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    changed: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def apply(self, ids: tuple[PushId, ...]) -> None:
        for push_id in ids:
            for row in self.bodies[push_id]:
                assert push_id not in self.rows[row], f"{push_id} is applied twice"
                self.rows[row].add(push_id)
                for worker, mine in self.subscribed.items():
                    self.changed[worker] |= {row} & mine

    def body(self, worker: int, message: Fetched | Delivered, *, delivers: bool) -> Rows | None:
        """Return the rows that go with a message; those that are asked for are subscribed to from this moment."""
        if isinstance(message, Fetched):
            wanted = self.asked.pop((worker, message.request), None)
            if wanted is not None and delivers:
                self.subscribed[worker] |= wanted
        else:
            wanted = self.changed.pop(worker, set())
        return None if wanted is None else {row: frozenset(self.rows[row]) for row in wanted}


@dataclass(eq=False)
class RowRead:
    """One read: its rows by server, and what the reader may expect."""

    clock: int
    needs: int
    rows: set[int]
    asked: dict[int, set[int]]
    own: set[PushId]  # of the reader, made before


@dataclass
class RowPeer:
    """A worker core, the rows that it keeps with the clock of each, and what is on its way from and to each server."""

    core: WorkerCore
    kept: dict[int, tuple[int, Row]] = field(default_factory=dict)
    made: dict[PushId, set[int]] = field(default_factory=dict)
    own: dict[PushId, set[int]] = field(default_factory=dict)  # -> the servers whose rows may lack it
    reads: dict[int, RowRead] = field(default_factory=dict)
    out: dict[int, list[tuple[Any, set[int]]]] = field(default_factory=lambda: defaultdict(list))
    back: dict[int, list[tuple[Any, Rows]]] = field(default_factory=lambda: defaultdict(list))


class RowStage:
    """All of them. Each call may raise AssertionError: a promise is broken."""

    def __init__(self, point: Consistency, num_workers: int, num_servers: int) -> None:
        self.point, self.num_servers, self.now = point, num_servers, 0.0
        self.num_done = self.num_again = 0
        self.clock_of: dict[PushId, int] = {}
        ranks = tuple(range(num_workers))
        self.servers = [
            RowServer(ServerCore(ServerSettings(rank, num_servers, workers=ranks, join_timeout_s=1e9), started=0.0))
            for rank in range(num_servers)
        ]
        for server in range(num_servers):
            self.tell(server, Declared(TABLE, point, keyed=True))
        self.peers: list[RowPeer] = []
        for rank in ranks:
            settings = WorkerSettings(sender(rank), num_servers, retry_s=1.0, max_attempts=10**6)
            self.peers.append(RowPeer(WorkerCore(settings)))
            self.wish(rank, Opened(TABLE, point, tuple(range(num_servers)), keyed=True))
            self.wish(rank, WantJoin())
            self.settle()

    # -- what users do -----------------------------------------------------------------------------------------------

    def push(self, rank: int, rows: set[int]) -> None:
        peer = self.peers[rank]
        servers = tuple(sorted({row % self.num_servers for row in rows}))
        if not servers or peer.core.num_unsettled(TABLE) > 4:
            return
        push_id = PushId(1, rank, 0, peer.core.next_seq)
        peer.made[push_id], self.clock_of[push_id] = rows, peer.core.clock
        if self.point.visible == "on_arrival":
            peer.own[push_id] = set(servers)
            for row in rows & peer.kept.keys():
                clock, value = peer.kept[row]
                peer.kept[row] = clock, value | {push_id}
        self.wish(rank, WantPush(TABLE, servers))

    def tick(self, rank: int) -> None:
        """Finish a clock; a reader that waits does not."""
        if not self.peers[rank].reads:
            self.wish(rank, WantClock())

    def read(self, rank: int, rows: set[int], *, refresh: bool) -> None:
        peer = self.peers[rank]
        own = {push_id for push_id, of_rows in peer.made.items() if of_rows & rows}
        self.begin(rank, RowRead(peer.core.clock, self.point.needs(peer.core.clock), rows, {}, own), refresh=refresh)

    def begin(self, rank: int, read: RowRead, *, refresh: bool) -> None:
        """Ask for the rows that are not kept, or not fresh enough, as the node does."""
        peer, fetch, deliver = self.peers[rank], list[int](), list[int]()
        for server in range(self.num_servers):
            mine = {row for row in read.rows if row % self.num_servers == server}
            lacking = {row for row in mine if refresh or self.clock_of_row(peer, row) < read.needs}
            read.asked[server] = lacking
            if lacking:
                is_brought = not refresh and self.point.deliver == "on_clock" and lacking <= peer.kept.keys()
                (deliver if is_brought else fetch).append(server)
        peer.reads[peer.core.next_request] = read
        self.wish(rank, WantRows(TABLE, read.needs, tuple(fetch), tuple(deliver)))

    def evict(self, rank: int, rows: set[int]) -> None:
        """Keep rows no longer; those that are on their way stay subscribed."""
        peer = self.peers[rank]
        gone = rows & peer.kept.keys()
        for row in gone:
            del peer.kept[row]

    def clock_of_row(self, peer: RowPeer, row: int) -> int:
        if row not in peer.kept:
            return -1
        return max(peer.kept[row][0], peer.core.reads(TABLE).reached(row % self.num_servers))

    # -- what the network and fate do --------------------------------------------------------------------------------

    def to_server(self, rank: int, server: int, *, copy: bool = False) -> None:
        queue = self.peers[rank].out[server]
        if queue:
            message, rows = queue[0] if copy else queue.pop(0)
            here = self.servers[server]
            if isinstance(message, Push):
                here.bodies.setdefault(message.id, rows)
            elif isinstance(message, Pull):
                here.asked[rank, message.request] = rows
            self.tell(server, message)

    def to_worker(self, rank: int, server: int, *, copy: bool = False) -> None:
        queue = self.peers[rank].back[server]
        if queue:
            message, rows = queue[0] if copy else queue.pop(0)
            self.wish(rank, Arrived(server, message), rows)

    def lose(self, rank: int, server: int, *, reconnects: bool) -> None:
        """Lose what is on its way, or one message of it."""
        peer = self.peers[rank]
        if reconnects:
            peer.out[server], peer.back[server] = [], []
            self.wish(rank, Connected(server))
        elif peer.back[server]:
            peer.back[server].pop(0)

    def overtake(self, rank: int, server: int) -> None:
        for queue in (self.peers[rank].out[server], self.peers[rank].back[server]):
            if queue:
                queue.append(queue.pop(0))

    def wait(self) -> None:
        self.now += 100.0
        for rank in range(len(self.peers)):
            self.wish(rank, Timeout())
        for server in range(self.num_servers):
            self.tell(server, Timeout())

    def settle(self) -> None:
        """Move all that is on its way."""
        pairs = [(rank, server) for rank in range(len(self.peers)) for server in range(self.num_servers)]
        while any(self.peers[rank].out[server] or self.peers[rank].back[server] for rank, server in pairs):
            for rank, server in pairs:
                self.to_server(rank, server)
                self.to_worker(rank, server)

    def finish(self) -> None:
        """Let all come to the same clock: then none may be left waiting, and all rows are whole."""
        last = 1 + max(peer.core.clock for peer in self.peers)
        for _ in range(40 * last):
            for rank, peer in enumerate(self.peers):
                if peer.core.clock < last:
                    self.tick(rank)
            self.settle()
            self.wait()
        self.settle()
        assert all(peer.core.clock == last and not peer.reads for peer in self.peers), "a worker is left waiting"
        for peer in self.peers:
            for push_id, rows in peer.made.items():
                assert all(push_id in self.servers[row % self.num_servers].rows[row] for row in rows)

    # -- carrying it out ---------------------------------------------------------------------------------------------

    def wish(self, rank: int, event: Any, rows: Rows | None = None) -> None:
        peer = self.peers[rank]
        effects = peer.core.handle(event, self.now)
        assert not of(effects, Fail), effects
        for effect in effects:
            match effect:
                case Send(server=server, message=message):
                    peer.out[server].append((message, self.payload(peer, server, message)))
                case Install():
                    self.install(peer, effect, rows or {})
                case Forget():
                    peer.kept = {row: k for row, k in peer.kept.items() if row % self.num_servers != effect.server}
                case Release():
                    self.note_answered(peer, effect.id)
                case ReadDone():
                    self.take(rank, peer.reads.pop(effect.request))
                case _:
                    pass

    def payload(self, peer: RowPeer, server: int, message: Any) -> set[int]:
        if isinstance(message, Push):
            return {row for row in peer.made[message.id] if row % self.num_servers == server}
        if isinstance(message, Pull) and message.request in peer.reads:
            return peer.reads[message.request].asked[server]
        return set()

    def install(self, peer: RowPeer, effect: Install, rows: Rows) -> None:
        """Take in rows, with the own pushes that they may lack on top."""
        for push_id, missing in list(peer.own.items()):
            if push_id.seq < effect.settled or push_id.seq in effect.includes:
                missing.discard(effect.server)
            if not missing:
                del peer.own[push_id]
        for row, value in rows.items():
            if effect.request >= 0 or row in peer.kept:
                mine = {p for p, missing in peer.own.items() if effect.server in missing and row in peer.made[p]}
                peer.kept[row] = effect.clock, value | mine

    def note_answered(self, peer: RowPeer, push_id: PushId) -> None:
        """Forget an own push when all have applied it, but where rows may come that were made before."""
        if peer.core._pushed.get(push_id.seq) is not None or push_id not in peer.own:
            return
        awaited = peer.core.reads(TABLE).awaited()
        awaited |= {s for s in range(self.num_servers) if peer.core.reads(TABLE).reached(s) >= 0}
        peer.own[push_id] &= awaited
        if not peer.own[push_id]:
            del peer.own[push_id]

    def take(self, rank: int, read: RowRead) -> None:
        """Use the rows of a read; where some went meanwhile it begins anew."""
        peer = self.peers[rank]
        if any(self.clock_of_row(peer, row) < read.needs for row in read.rows):
            self.num_again += 1
            self.begin(rank, read, refresh=False)
            return
        self.num_done += 1
        for row in read.rows:
            self.check(rank, read, row, peer.kept[row][1], self.clock_of_row(peer, row))

    def check(self, rank: int, read: RowRead, row: int, value: Row, clock: int) -> None:
        touching = {p for peer in self.peers for p, rows in peer.made.items() if row in rows}
        assert value <= touching
        missing = {p for p in touching - value if self.clock_of[p] < clock}
        assert not missing, f"row {row}, said to be of clock {clock}, lacks {missing}"
        if self.point.visible == "on_clock":
            assert {self.clock_of[p] for p in value} <= set(range(clock)), (
                "an update shows before its clock is complete"
            )
        if self.point.visible == "on_clock" and self.point.bound == 0:
            assert value == {p for p in touching if self.clock_of[p] < read.clock}
        if self.point.visible == "on_arrival":
            assert {p for p in read.own if row in self.peers[rank].made[p]} <= value, "an own push is lost"

    def tell(self, server: int, event: Any) -> None:
        here = self.servers[server]
        for effect in here.core.handle(event, self.now):
            match effect:
                case Apply(ids=ids):
                    here.apply(ids)
                case Reply(worker=worker, message=message):
                    self.peers[worker].back[server].append((message, {}))
                case Serve(worker=worker, message=message):
                    rows = here.body(worker, message, delivers=self.point.deliver == "on_clock")
                    if rows is not None:
                        self.peers[worker].back[server].append((message, rows))
                case Tell(server=other, message=message):
                    self.tell(other, message)
                case _:
                    pass
