"""A worker's connection to a data server, and all that the server keeps for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import PeerError
from paceline.feeding.lending import Lending
from paceline.feeding.library import Volume
from paceline.feeding.outbox import Outbox
from paceline.feeding.wire import MAX_UNANSWERED
from paceline.node.roles import check_caller
from paceline.node.wire import Hello, decode
from paceline.transport.base import Connection


@dataclass(slots=True, eq=False)
class Caller:
    """One connection. Everything in it ends with the connection."""

    hello: Hello
    outbox: Outbox
    lending: Lending
    sources: dict[int, Volume] = field(default_factory=dict[int, Volume])  # by the number of their `Open`
    num_asked: int = 0

    def count_request(self) -> None:
        """Note a request; raises PeerError when too many are not answered yet."""
        self.num_asked += 1  # each has one answer
        if self.num_asked - self.outbox.num_sent > MAX_UNANSWERED:
            raise PeerError(f"a worker asks more than {MAX_UNANSWERED} things at once")

    def close(self) -> None:
        """End the connection and its thread, and let go of its memory."""
        self.outbox.close()
        self.lending.clear()


def meet(
    connection: Connection, generation: int, num_workers: int | None, on_room: Callable[[], None], lending: Lending
) -> Caller:
    """Return who calls, ready to be answered; raises PeerError unless it is a worker of this job."""
    hello = check_caller(decode(connection.identity), connection)
    if hello.role != "worker":
        raise PeerError(f"a {hello.role} has nothing to ask of a data server")
    if hello.generation != generation:
        raise PeerError(f"worker {hello.rank} is of generation {hello.generation} of the job, expected {generation}")
    if hello.rank < 0 or (num_workers is not None and hello.rank >= num_workers):
        raise PeerError(f"there is no worker {hello.rank} in this job, which has {num_workers}")
    caller = Caller(hello, Outbox(connection, on_room), lending)
    caller.outbox.open()
    return caller
