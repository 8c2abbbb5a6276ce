"""Real threads of real nodes, of which one runs at a time: at each pause the dice say which goes on.

Threads pause where memory is lent, given back, sent, received or updated, and wherever they wait for each other. So the
same seed gives the same order, and many seeds give many orders.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import ConnectionLost, PeerError
from paceline.server.connections import Acceptor, Incoming
from paceline.transport.base import EMPTY, NO_IDENTITY, AllocateBody, Frame
from paceline.transport.buffer_pool import BufferPool
from paceline.transport.buffers import destination, flat
from paceline.update.shard import Shard
from paceline.wire.send_queue import SendQueue
from paceline.worker.waits import WorkerLock

HANG_S = 20.0
NUM_STEPS = 20_000
PATIENCE_S = 0.5  # of a server that repeats what was not answered


class Torn(BaseException):
    """What ends a thread when the play has failed."""


def always() -> bool:
    return True


class Actor:
    """A thread that runs when it is told to; looks like `threading.Thread` to those that start one."""

    def __init__(
        self, stage: Stage, target: Callable[..., None], name: str, args: tuple[Any, ...] = (), daemon: bool = True
    ) -> None:
        self.stage, self.name = stage, name
        self.target, self.args = target, args
        self.ready: Callable[[], bool] = always
        self.where = "start"
        self.is_over = False
        self.go = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._live, name=name, daemon=daemon)

    def start(self) -> None:
        self.stage.actors.append(self)
        self.thread.start()

    def join(self, timeout: float | None = None) -> None:
        self.stage.pause(f"end of {self.name}", lambda: self.is_over)

    def is_alive(self) -> bool:
        return not self.is_over

    def _live(self) -> None:
        assert self.go.acquire(timeout=HANG_S)
        try:
            self.target(*self.args)
        except Torn:
            pass
        except BaseException as error:
            self.stage.errors.append(error)
        finally:
            self.is_over = True
            self.stage.turn.release()


@dataclass
class Stage:
    """The threads, and which goes on."""

    seed: int
    actors: list[Actor] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    num_steps: int = 0
    now_s: float = 0.0  # for servers, which wait for a time; it passes when no other actor can go on
    is_idle: bool = False
    is_torn: bool = False

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)

    def spawn(self, name: str, target: Callable[[], None]) -> Actor:
        actor = Actor(self, target, name)
        actor.start()
        return actor

    def pause(self, where: str, ready: Callable[[], bool] = always) -> None:
        """Let others go on; return when it is this thread's turn again, and not before `ready`."""
        me = next((actor for actor in self.actors if actor.thread is threading.current_thread()), None)
        if me is None:
            assert ready(), f"no actor on stage could bring {where}"
            return
        if self.is_torn:
            raise Torn
        me.where, me.ready = where, ready
        self.turn.release()
        if not me.go.acquire(timeout=HANG_S) or self.is_torn:
            raise Torn

    def play(self) -> None:
        """Have all threads run to their ends; raises what went wrong first."""
        try:
            self._play()
        finally:
            self.is_torn = True
            for actor in self.actors:
                actor.go.release()
                actor.thread.join(HANG_S)
        if self.errors:
            raise self.errors[0]

    def _able(self, alive: list[Actor]) -> list[Actor]:
        self.is_idle = False
        able = [actor for actor in alive if actor.ready()]
        if not able:
            self.is_idle, self.now_s = True, self.now_s + PATIENCE_S
            able = [actor for actor in alive if actor.ready()]
        return able

    def _play(self) -> None:
        while not self.errors and (alive := [actor for actor in self.actors if not actor.is_over]):
            able = self._able(alive)
            assert able, f"no actor can go on: {[(actor.name, actor.where) for actor in alive]}; {self.errors}"
            self.num_steps += 1
            assert self.num_steps < NUM_STEPS, f"no end: {[(actor.name, actor.where) for actor in alive]}"
            self.dice.choice(able).go.release()
            assert self.turn.acquire(timeout=HANG_S), "an actor waits otherwise than on stage"


class StagedCondition:
    """A lock that may be entered again, and a condition on it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.owner: threading.Thread | None = None
        self.depth = 0
        self.version = 0

    def __enter__(self) -> StagedCondition:
        me = threading.current_thread()
        if self.owner not in (None, me):
            self.stage.pause("a lock", lambda: self.owner is None)
        self.owner, self.depth = me, self.depth + 1
        return self

    def __exit__(self, *_: object) -> None:
        self.depth -= 1
        self.owner = self.owner if self.depth else None

    def wait(self, timeout: float | None = None) -> bool:
        before = self.version
        return self._wait("news", lambda: self.version != before)

    def wait_for(self, predicate: Callable[[], object], timeout: float | None = None) -> bool:
        return bool(predicate()) or self._wait("a condition", lambda: bool(predicate()))

    def notify_all(self) -> None:
        self.version += 1

    def _wait(self, what: str, ready: Callable[[], bool]) -> bool:
        owner, depth = self.owner, self.depth
        self.owner, self.depth = None, 0
        self.stage.pause(what, lambda: self.owner is None and ready())
        self.owner, self.depth = owner, depth
        return True


class StagedSemaphore:
    """A number that actors take from, and wait for while it is 0."""

    def __init__(self, stage: Stage, value: int) -> None:
        self.stage = stage
        self.value = value

    def acquire(self, timeout: float | None = None) -> bool:
        self.stage.pause("room for more", lambda: self.value > 0)
        self.value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self.value += n


@dataclass
class OneWay:
    """Frames on their way in one direction: of each its header, its size, and as much of its body as has come."""

    frames: deque[tuple[bytes, int, list[bytes | memoryview]]] = field(default_factory=deque)
    is_over: bool = False
    is_taken: bool = False  # an actor is sending


class StagedConnection:
    """One end of two lanes. Bodies go by in two halves, or as the sender's own memory where the transport maps it."""

    def __init__(self, transport: StagedTransport, peer: str, identity: bytes, out: OneWay, into: OneWay) -> None:
        self.peer, self.identity, self.peer_identity = peer, identity, NO_IDENTITY
        self._transport, self._stage = transport, transport.stage
        self._out, self._in = out, into

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        self._stage.pause("room to send", lambda: not self._out.is_taken or self._out.is_over)
        if self._out.is_over:
            raise ConnectionLost("it was closed")
        body = flat(body)
        come: list[bytes | memoryview] = []
        self._out.is_taken = True
        self._out.frames.append((header, body.nbytes, come))
        if self._transport.is_shared(body):
            come.append(body[:])
        else:
            for part in (body[: body.nbytes // 2], body[body.nbytes // 2 :]) if body.nbytes else ():
                self._stage.pause("sending")
                come.append(bytes(part))
        self._out.is_taken = False

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        if self._stage.dice.random() < 0.5:
            return False
        for header, body in frames:
            self.send(header, body, timeout_s=timeout_s)
        return True

    def has_frame(self) -> bool:
        return False  # so that others may go on before each

    def fileno(self) -> None:
        return None  # a thread of its own waits for it on stage

    def receive(self, *, timeout_s: float, place: AllocateBody | None = None) -> Frame:
        self._stage.pause("a frame", lambda: bool(self._in.frames) or self._in.is_over)
        if self._in.is_over:
            raise ConnectionLost("it was closed")
        header, size_bytes, come = self._in.frames.popleft()
        if not size_bytes:
            return Frame(header, EMPTY)
        if come and isinstance(come[0], memoryview):
            return Frame(header, come[0])
        found = destination(place, header, size_bytes)
        memory, buffer = (memoryview(bytearray(size_bytes)), None) if found is None else found
        num_read = 0
        while num_read < size_bytes:
            self._stage.pause("more of a body", lambda: bool(come) or self._in.is_over)
            if not come:
                raise ConnectionLost("it was closed")
            part = come.pop(0)
            memory[num_read : num_read + len(part)] = part
            num_read += len(part)
        return Frame(header, memory, buffer)

    def close(self) -> None:
        self._out.is_over = self._in.is_over = True


class StagedListener:
    def __init__(self, address: str, stage: Stage) -> None:
        self.address, self._stage = address, stage
        self.waiting: deque[StagedConnection] = deque()
        self._is_over = False

    def accept(self, *, timeout_s: float) -> StagedConnection:
        self._stage.pause("a connection", lambda: bool(self.waiting) or self._is_over)
        if self._is_over:
            raise ConnectionLost("the listener is closed")
        return self.waiting.popleft()

    def close(self) -> None:
        self._is_over = True


class StagedTransport:
    """Carries frames between the threads of a stage."""

    def __init__(self, stage: Stage, *, maps_memory: bool) -> None:
        self.name, self.stage, self.maps_memory = "staged", stage, maps_memory
        self._listeners: dict[str, StagedListener] = {}
        self._allocated: list[bytearray] = []

    def allocate(self, size_bytes: int) -> memoryview:
        memory = bytearray(size_bytes)
        self._allocated.append(memory)
        return memoryview(memory)

    def is_shared(self, body: memoryview) -> bool:
        return self.maps_memory and any(body.obj is memory for memory in self._allocated)

    def listen(self, address: str) -> StagedListener:
        return self._listeners.setdefault(address, StagedListener(address, self.stage))

    def connect(self, address: str, identity: bytes, *, timeout_s: float) -> StagedConnection:
        there, back = OneWay(), OneWay()
        if address not in self._listeners:
            raise PeerError(f"no listener at {address}")
        self._listeners[address].waiting.append(StagedConnection(self, "client", identity, back, there))
        return StagedConnection(self, address, identity, there, back)


class NoTimer:
    """Nothing is lost on stage, so nothing is repeated."""

    def __init__(self, *_: object) -> None:
        pass

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def join(self) -> None: ...


@contextmanager
def staged(seed: int) -> Iterator[Stage]:
    """Have the nodes that are made inside run on a stage."""
    stage = Stage(seed)
    threads = SimpleNamespace(
        Thread=lambda target, name, args=(), daemon=True: Actor(stage, target, name, args, daemon),
        current_thread=threading.current_thread,
        Lock=threading.Lock,  # of what does not wait while it holds one
        Semaphore=lambda value: StagedSemaphore(stage, value),
    )

    def get(acceptor: Acceptor, timeout_s: float | None) -> object | None:
        is_timed = timeout_s is not None
        stage.pause("news for a server", lambda: not acceptor._queue.empty() or (is_timed and stage.is_idle))
        try:
            item = acceptor._queue.get_nowait()
        except Empty:
            return None
        if isinstance(item, Incoming) and item.note_taken is not None:
            item.note_taken()
        return item

    with pytest.MonkeyPatch.context() as patch:
        for module in ("wire.send_queue", "wire.connection", "server.connections"):
            patch.setattr(f"paceline.{module}.threading", threads)
        patch.setattr("paceline.server.node.time", SimpleNamespace(monotonic=lambda: stage.now_s))
        patch.setattr("paceline.worker.node.PeriodicThread", NoTimer)
        patch.setattr("paceline.server.buffers.MIN_MAPPED_BYTES", 1)
        patch.setattr(Acceptor, "get", get)
        for owner, attribute in ((WorkerLock, "changed"), (SendQueue, "_changed")):
            patch.setattr(owner, "__init__", _with_condition(owner.__init__, attribute, stage))
        for owner, method in (
            (BufferPool, "lend"),
            (BufferPool, "reclaim"),
            (Shard, "apply"),
            (Shard, "copy_values"),
        ):
            patch.setattr(owner, method, _with_pauses(getattr(owner, method), method, stage))
        yield stage


def _with_condition(make: Callable[..., None], attribute: str, stage: Stage) -> Callable[..., None]:
    def init(self: object, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        setattr(self, attribute, StagedCondition(stage))

    return init


def _with_pauses(call: Callable[..., Any], where: str, stage: Stage) -> Callable[..., Any]:
    def paused(*args: Any, **kwargs: Any) -> Any:
        stage.pause(f"before {where}")
        result = call(*args, **kwargs)
        stage.pause(f"after {where}")
        return result

    return paused
