"""Settings of the cores, fixed at their start. Times are in seconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from paceline.core.messages import Sender

WAIT_TIMEOUT_S: Final = 600.0  # the default for a worker's waits
LEASE_S: Final = 5.0
MAX_WORKERS: Final = 1 << 16  # of a job, as far as messages can say


class ServerSettings(msgspec.Struct, frozen=True):
    """Settings of a server core.

    Args:
        server: rank of this server; rank 0 is the lead.
        num_servers: how many servers share the tables.
        generation: of the job; one that goes on from a snapshot has a larger one than the job that wrote it.
        workers: ranks that are expected to join; the clock waits for them until `join_timeout_s` has passed.
        join_timeout_s: how long an expected worker may take to join.
        lease_s: how long a worker may be disconnected before it is evicted.
        retry_s: the time between repetitions of an unanswered `Follow` to the lead.
        shares: how much of each table every server holds, as proportions; empty for equal parts.
        clock: the first clock; a restored job has finished all clocks below.
    """

    server: int
    num_servers: int
    generation: int = 1
    workers: tuple[int, ...] = ()
    join_timeout_s: float = 60.0
    lease_s: float = LEASE_S
    retry_s: float = 1.0
    shares: tuple[float, ...] = ()
    clock: int = 0


class WorkerSettings(msgspec.Struct, frozen=True):
    """Settings of a worker core.

    Args:
        sender: generation, rank and incarnation of this worker.
        num_servers: how many servers there are; ticks go to all of them.
        retry_s: the time before the first repetition of an unanswered message; the pauses double, up to 12 times
            this. Long on transports that lose nothing, short on those that do.
        max_attempts: how often a message is sent before the worker fails. Reads and held pushes have no limit: they
            depend on other workers, and the caller has a timeout of its own.
        shares: how much of each table every server holds; see `ServerSettings`.
        keeps_pushes: replicas of servers may lag, so applied pushes are kept until the replica of their server has
            them, and repeated to the process that serves in its place.
    """

    sender: Sender
    num_servers: int
    retry_s: float = 5.0
    max_attempts: int = 20
    shares: tuple[float, ...] = ()
    keeps_pushes: bool = False
