"""Short ways to build cores and messages, so that a test shows only what it is about."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

from paceline.core.consistency import Consistency, ssp
from paceline.core.effects import Reply, Send, Serve
from paceline.core.events import Arrived, Declared, Opened, WantJoin
from paceline.core.messages import Clock, Join, Joined, Pull, Push, PushId, Sender
from paceline.core.server import ServerCore
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.core.worker import WorkerCore

E = TypeVar("E")


def sender(worker: int, incarnation: int = 0, generation: int = 1) -> Sender:
    return Sender(generation, worker, incarnation)


def push_id(worker: int, seq: int, incarnation: int = 0, generation: int = 1) -> PushId:
    return PushId(generation, worker, incarnation, seq)


def push(
    worker: int, seq: int, clock: int, *, table: str = "w", settled: int = 0, incarnation: int = 0, generation: int = 1
) -> Push:
    return Push(push_id(worker, seq, incarnation, generation), table, clock, settled)


def tick(worker: int, clock: int, *withdrawn: tuple[str, int, int], incarnation: int = 0) -> Clock:
    return Clock(sender(worker, incarnation), clock, withdrawn)


def pull(worker: int, request: int, clock: int, needs: int, *, table: str = "w", incarnation: int = 0) -> Pull:
    return Pull(sender(worker, incarnation), request, table, clock, needs)


def make_server(
    consistency: Consistency | None = None,
    *,
    workers: Iterable[int] = (0, 1),
    server: int = 0,
    num_servers: int = 1,
    joined: bool = True,
) -> ServerCore:
    """Return a server with the table "w" whose expected workers have joined."""
    ranks = tuple(workers)
    settings = ServerSettings(server, num_servers, workers=ranks, join_timeout_s=60.0, lease_s=5.0, retry_s=1.0)
    core = ServerCore(settings, started=0.0)
    core.handle(Declared("w", consistency or ssp(1)), 0.0)
    for rank in ranks if joined else ():
        core.handle(Join(sender(rank)), 0.0)
    return core


def make_worker(
    consistency: Consistency | None = None,
    *,
    num_servers: int = 1,
    joined: bool = True,
    max_attempts: int = 5,
    keeps_pushes: bool = False,
) -> WorkerCore:
    """Return worker 0 with the table "w" open, joined at clock 0."""
    core = WorkerCore(WorkerSettings(sender(0), num_servers, 1.0, max_attempts, keeps_pushes=keeps_pushes))
    core.handle(Opened("w", consistency or ssp(1), tuple(range(num_servers))), 0.0)
    if joined:
        core.handle(WantJoin(), 0.0)
        for server in range(num_servers):
            core.handle(Arrived(server, Joined(0)), 0.0)
    return core


def of(effects: Iterable[Any], kind: type[E]) -> list[E]:
    """Return the effects of one kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def said(effects: Iterable[Any], kind: type[E]) -> list[E]:
    """Return the messages of one kind in these effects, in order."""
    messages = [effect.message for effect in effects if isinstance(effect, Reply | Serve | Send)]
    return [message for message in messages if isinstance(message, kind)]
