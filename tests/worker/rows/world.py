"""Servers and workers of row tables without threads or sockets: each frame moves when the test says so.

The nodes are the real ones. Only what carries frames is not: a frame may be late, lost, doubled or overtaken, and a
connection may be cut with all that is on it.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from paceline.core.events import Died, Timeout, WantJoin
from paceline.core.messages import Sender
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.errors import ConnectionLost
from paceline.observe.trace import Trace
from paceline.server.connections import Incoming
from paceline.server.node import ServerNode
from paceline.transport.base import EMPTY, NO_IDENTITY, Frame, PeerIdentity
from paceline.wire.messages import Hello, encode
from paceline.worker.node import FrameHandler, WorkerNode
from paceline.worker.waits import WorkerOptions

NEVER_S = 1e6


@dataclass(slots=True)
class Wire:
    """Frames on their way in one direction of one connection."""

    frames: deque[Frame] = field(default_factory=deque[Frame])
    is_cut: bool = False

    def put(self, header: bytes, body: memoryview) -> None:
        if not self.is_cut:
            self.frames.append(Frame(header, memoryview(bytearray(body))))


@dataclass(slots=True, eq=False)  # a connection is itself alone
class End:
    """One end of a connection as a node sees it."""

    identity: bytes
    out: Wire
    peer: str = "peer"
    peer_identity: PeerIdentity = NO_IDENTITY

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float = 0.0) -> None:
        if self.out.is_cut:
            raise ConnectionLost("cut")
        self.out.put(header, body)

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float = 0.0) -> bool:
        for header, body in frames:
            self.send(header, body)
        return True

    def close(self) -> None:
        self.out.is_cut = True


@dataclass(slots=True)
class Link:
    """The connection of a worker to a server, made again when it is cut."""

    hello: Hello
    up: Wire
    down: Wire
    end: End  # the server's

    @staticmethod
    def make(hello: Hello) -> Link:
        up, down = Wire(), Wire()
        return Link(hello, up, down, End(encode(hello), down))

    def send(self, header: bytes, body: memoryview = EMPTY, **_: object) -> None:
        self.up.put(header, body)


class Pump(threading.Condition):
    """The lock of a worker whose wait is not for other threads: it moves frames."""

    def __init__(self, world: World) -> None:
        super().__init__(threading.RLock())
        self.world, self.left = world, 100_000

    def wait(self, timeout: float | None = None) -> bool:
        self.left -= 1
        assert self.left > 0, "a worker waits for what does not come"
        self.world.move()
        return True


class Carrier:
    """What servers reach each other by."""

    name, maps_memory = "world", False

    def __init__(self, world: World) -> None:
        self.world = world

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> End:
        wire = Wire()
        self.world.between.append((int(address), End(identity, wire), wire))
        return End(identity, wire)

    def allocate(self, size_bytes: int) -> memoryview:
        return memoryview(bytearray(size_bytes))


@dataclass
class World:
    """All members of a job, and all frames on their way.

    `roughness` is the chance of each fault for a frame that moves; `faults` counts those that happened.
    """

    num_workers: int
    num_servers: int
    dice: random.Random
    roughness: float = 0.0
    servers: list[ServerNode] = field(default_factory=list)
    workers: dict[int, WorkerNode] = field(default_factory=dict)
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    between: list[tuple[int, End, Wire]] = field(default_factory=list)
    old: list[tuple[int, Link]] = field(default_factory=list)  # connections that were cut: (server, what it yet reads)
    faults: Counter[str] = field(default_factory=Counter)
    addresses: tuple[str, ...] = ()
    carrier: Carrier = field(init=False)

    def __post_init__(self) -> None:
        self.addresses, self.carrier = tuple(map(str, range(self.num_servers))), Carrier(self)
        for rank in range(self.num_servers):
            self.servers.append(self.make_server(rank))
        for rank in range(self.num_workers):
            self.start(rank, 0)
        roughness, self.roughness = self.roughness, 0.0
        self.settle()
        self.roughness = roughness

    def make_server(self, rank: int) -> ServerNode:
        return ServerNode(self.server_settings(rank), None, self.carrier, lambda: self.addresses, Trace(None))  # type: ignore[arg-type]

    def server_settings(self, rank: int) -> ServerSettings:
        workers = tuple(range(self.num_workers))
        return ServerSettings(
            rank, self.num_servers, workers=workers, join_timeout_s=NEVER_S, lease_s=NEVER_S, retry_s=0.0
        )

    def start(self, rank: int, incarnation: int, generation: int = 1) -> WorkerNode:
        """Start one life of a worker, which asks to join."""
        sender = Sender(generation, rank, incarnation)
        settings = WorkerSettings(sender, self.num_servers, retry_s=0.0, max_attempts=10**9)
        node = WorkerNode(settings, self.carrier, self.addresses, WorkerOptions(NEVER_S))  # type: ignore[arg-type]
        node._lock.changed = node._changed = Pump(self)
        self.workers[rank] = node
        for server in range(self.num_servers):
            self.links[rank, server] = Link.make(Hello("worker", rank, incarnation, generation))
            node._connections.append(self.links[rank, server])  # type: ignore[arg-type]
        with node._changed:
            node._handle(WantJoin())
        return node

    # -- moving ------------------------------------------------------------------------------------------------------

    def move(self) -> bool:
        """Move some frame, or have a member say again what is unanswered; say whether there was a frame."""
        queues = [
            (key, call_queue)
            for key, call_queue in self.links.items()
            if call_queue.up.frames or call_queue.down.frames
        ]
        num_other = bool(self.old) + any(wire.frames for _, _, wire in self.between)
        chosen = self.dice.randrange(len(queues) + num_other) if queues or num_other else -1
        if chosen < 0:
            self.remind()
        elif chosen < len(queues):
            (worker, server), call_queue = queues[chosen]
            self.step(
                worker,
                server,
                up=bool(call_queue.up.frames) and (not call_queue.down.frames or self.dice.random() < 0.5),
            )
        elif self.old and (chosen == len(queues)):
            self.late()
        else:
            self.tell()
        return chosen >= 0

    def step(self, worker: int, server: int, *, up: bool) -> None:
        """Move the next frame of a connection; fate may have it otherwise."""
        call_queue = self.links[worker, server]
        wire = call_queue.up if up else call_queue.down
        if not wire.frames:
            return
        fate = self.dice.random()
        for fault in ("cut", "lost", "doubled", "overtaken"):
            fate -= self.roughness
            if fate < 0:
                self.faults[fault] += 1
                break
        else:
            fault = ""
        if fault == "cut":
            self.cut(worker, server)
        elif fault == "lost":
            wire.frames.popleft()
        elif fault == "overtaken":
            wire.frames.rotate(-1)
        else:
            frame = wire.frames[0] if fault == "doubled" else wire.frames.popleft()
            self.receive(worker, server, call_queue, frame, up=up)

    def receive(self, worker: int, server: int, call_queue: Link, frame: Frame, *, up: bool) -> None:
        node = self.workers.get(worker)
        if up:
            self.serve(server, Incoming(call_queue.end, frame))  # type: ignore[arg-type]
        elif node is not None:
            self.arrivals(node, server).on_frames([frame])

    def cut(self, worker: int, server: int) -> None:
        """Cut a connection; what the server has received but not read yet it reads later, or never."""
        self.old.append((server, self.links[worker, server]))
        self.reconnect(worker, server)

    def reconnect(self, worker: int, server: int) -> None:
        """Have a worker connect anew; nothing more comes over the connection before."""
        call_queue, node = self.links[worker, server], self.workers[worker]
        call_queue.up.is_cut = call_queue.down.is_cut = True
        hello = replace(call_queue.hello, connection=call_queue.hello.connection + 1)
        self.links[worker, server] = node._connections[server] = Link.make(hello)  # type: ignore[call-overload]
        self.arrivals(node, server).on_reconnected(lambda: None)

    def late(self) -> None:
        """Have a server read what was left of a connection that was cut, or find that it is over."""
        server, call_queue = self.old[self.dice.randrange(len(self.old))]
        frame = call_queue.up.frames.popleft() if call_queue.up.frames else None
        if frame is None:
            self.old.remove((server, call_queue))
        self.serve(server, Incoming(call_queue.end, frame))  # type: ignore[arg-type]

    def tell(self) -> None:
        """Move a frame from server to server."""
        server, end, wire = self.dice.choice([entry for entry in self.between if entry[2].frames])
        self.serve(server, Incoming(end, wire.frames.popleft()))  # type: ignore[arg-type]

    def serve(self, server: int, item: Incoming | Died | Timeout) -> None:
        """Have a server handle a frame or an event."""
        if isinstance(item, Incoming):
            self.servers[server]._on_incoming(item)
        else:
            self.servers[server]._handle(item)

    def remind(self) -> None:
        """Let all workers say again what is unanswered."""
        for node in self.workers.values():
            with node._changed:
                node._handle(Timeout())
                node.rpc.repeat_due()
        for server in range(self.num_servers):
            self.serve(server, Timeout())

    def settle(self) -> None:
        """Move frames, without faults, until nothing is on its way."""
        roughness, self.roughness = self.roughness, 0.0
        while self.is_busy():
            self.move()
        self.roughness = roughness

    def is_busy(self) -> bool:
        links = any(call_queue.up.frames or call_queue.down.frames for call_queue in self.links.values())
        return links or bool(self.old) or any(wire.frames for _, _, wire in self.between)

    def arrivals(self, node: WorkerNode, server: int) -> FrameHandler:
        return FrameHandler(server, node._lock, node.rpc, node._tables, node._handle, node._clocked)

    # -- lives -------------------------------------------------------------------------------------------------------

    def kill(self, worker: int) -> None:
        """End a worker where it stands, and tell every server."""
        node = self.workers.pop(worker)
        for server in range(self.num_servers):
            call_queue = self.links.pop((worker, server))
            call_queue.up.is_cut = call_queue.down.is_cut = True
            self.old.append((server, call_queue))
        for server in range(self.num_servers):
            self.serve(server, Died(worker, node.settings.sender.incarnation, "killed"))
        self.discard(node)

    def close(self) -> None:
        for node in self.workers.values():
            self.discard(node)
        for server in self.servers:
            server._tables.close()

    @staticmethod
    def discard(node: WorkerNode) -> None:
        node._fail("it is over")
        for table in node._tables.values():
            table.close()
