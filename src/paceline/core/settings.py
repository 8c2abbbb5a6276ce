"""What the cores are told once, at their start. Times are seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.core.messages import Sender

WAIT_TIMEOUT_S: Final = 600.0  # for a wait of a worker, where the user says nothing else


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a server core is told once.

    Args:
        server: rank of this server; rank 0 is the lead.
        num_servers: how many servers share the tables.
        workers: ranks that are expected to join; the clock waits for them until `join_timeout_s` has passed.
        lease_s: how long a worker may be disconnected before it is given up.
        retry_s: how often an unanswered question to the lead is repeated.
        shares: how much of each table every server holds, as proportions; none for equal parts.
        clock: where the job goes on, of which all clocks below were finished before.
    """

    server: int
    num_servers: int
    generation: int = 1
    workers: tuple[int, ...] = ()
    join_timeout_s: float = 60.0
    lease_s: float = 5.0
    retry_s: float = 1.0
    shares: tuple[float, ...] = ()
    clock: int = 0


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What a worker core is told once.

    Args:
        sender: generation, rank and incarnation of this worker.
        num_servers: how many servers there are; clocks are told to all of them.
        retry_s: after how long an unanswered message is repeated for the first time; the pauses double, up to 12 times
            this. Long on carriers that lose nothing, short on those that do.
        max_attempts: how often a message is sent before the worker gives up; reads, and pushes that are held, wait for
            other workers, and for as long as the caller does.
        shares: how much of each table every server holds; see `ServerSettings`.
    """

    sender: Sender
    num_servers: int
    retry_s: float = 5.0
    max_attempts: int = 20
    shares: tuple[float, ...] = ()
