"""A worker's connection to a data server, and the state that the server keeps for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.data.service.buffer_pool import BatchBuffers
from paceline.data.service.messages import MAX_UNANSWERED
from paceline.data.service.send_queue import ServiceSendQueue
from paceline.data.service.source_cache import CachedSource
from paceline.errors import PeerError
from paceline.transport.base import Connection
from paceline.wire.messages import Hello, decode
from paceline.wire.permissions import check_caller


@dataclass(slots=True, eq=False)
class Caller:
    """State of one worker's connection; it ends with the connection."""

    hello: Hello
    outbox: ServiceSendQueue
    batch_buffers: BatchBuffers
    sources: dict[int, CachedSource] = field(default_factory=dict[int, CachedSource])  # by number
    num_asked: int = 0

    def count_request(self) -> None:
        """Count a request; raises PeerError when too many are unanswered."""
        self.num_asked += 1  # each gets exactly one answer
        if self.num_asked - self.outbox.num_sent > MAX_UNANSWERED:
            raise PeerError(f"a worker asks more than {MAX_UNANSWERED} things at once")

    def close(self) -> None:
        """End the connection and its thread, and free its buffers."""
        self.outbox.close()
        self.batch_buffers.clear()


def accept_caller(
    connection: Connection,
    generation: int,
    num_workers: int | None,
    on_room: Callable[[], None],
    batch_buffers: BatchBuffers,
) -> Caller:
    """Return the state of a new connection; raises PeerError unless it is from a worker of this job."""
    hello = check_caller(decode(connection.identity), connection)
    if hello.role != "worker":
        raise PeerError(f"a {hello.role} has nothing to ask of a data server")
    if hello.generation != generation:
        raise PeerError(f"worker {hello.rank} is of generation {hello.generation} of the job, expected {generation}")
    if hello.rank < 0 or (num_workers is not None and hello.rank >= num_workers):
        raise PeerError(f"there is no worker {hello.rank} in this job, which has {num_workers}")
    caller = Caller(hello, ServiceSendQueue(connection, on_room), batch_buffers)
    caller.outbox.open()
    return caller
