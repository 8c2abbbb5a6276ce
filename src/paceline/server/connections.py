"""The outgoing side of a server: send queues to workers, which connected, and to servers, which it connects to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.messages import Delivered, Held, Ticked
from paceline.errors import PeerError
from paceline.transport.base import EMPTY, Connection, Transport
from paceline.wire.messages import Hello, encode
from paceline.wire.permissions import check_server
from paceline.wire.send_queue import SendHold, SendQueue

_URGENT = Held | Ticked  # a clock cannot complete before a worker has received these
_CONNECT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Connections:
    """Connections by peer.

    A message to a peer that is not connected is dropped: the process that needs an answer repeats its message.
    """

    server: int
    generation: int
    transport: Transport
    addresses: Callable[[], tuple[str, ...]]
    drop: Callable[[Connection], None]
    hold: SendHold = field(default_factory=SendHold)  # gathers small frames that are sent while it is entered
    sent_bytes: int = 0  # in bodies, to workers
    # By (rank, incarnation): the number of the newest connection, and its send queue.
    _workers: dict[tuple[int, int], tuple[int, SendQueue]] = field(
        default_factory=dict[tuple[int, int], tuple[int, SendQueue]]
    )
    _servers: dict[int, SendQueue] = field(default_factory=dict[int, SendQueue])
    _heard: dict[int, Connection] = field(default_factory=dict[int, Connection])  # the newest that a server has made

    def register(self, hello: Hello, connection: Connection) -> None:
        """Use this connection to reach a worker, unless a newer one is known."""
        life = hello.rank, hello.incarnation
        newest, known = self._workers.get(life, (-1, None))
        if hello.connection < newest or (known is not None and known.connection is connection):
            return
        if known is not None:
            known.close()
        # Mapped memory is sent as a reference, and does not change until the worker has read it.
        copies = not self.transport.maps_memory
        queue = SendQueue(connection, lambda: self.drop(connection), bounded=True, copies=copies, hold=self.hold)
        self._workers[life] = hello.connection, queue

    def is_current(self, hello: Hello, connection: Connection) -> bool:
        """Return whether this is the newest connection to its worker."""
        return hello.role == "worker" and self.connection_of(hello.rank, hello.incarnation) is connection

    def connection_of(self, worker: int, incarnation: int) -> Connection | None:
        """Return the newest connection to this incarnation of a worker, None if it is not connected."""
        _, queue = self._workers.get((worker, incarnation), (0, None))
        return None if queue is None else queue.connection

    def forget(self, connection: Connection) -> None:
        """Remove a connection that has ended."""
        over = [life for life, (_, queue) in self._workers.items() if queue.connection is connection]
        for life in over:
            self._workers.pop(life)[1].close()

    def send_worker(
        self,
        worker: int,
        incarnation: int,
        message: object,
        body: memoryview = EMPTY,
        copy: Callable[[], memoryview] | None = None,
    ) -> None:
        """Queue a message for this incarnation of a worker; a large body that does not fit its queue is left out.

        A body that has to wait is copied, by `copy` if given, so `body` may change as soon as this returns; memory that
        the transport maps may not.
        """
        _, queue = self._workers.get((worker, incarnation), (0, None))
        if queue is not None:
            self.sent_bytes += len(body)
            urgent, owed = isinstance(message, _URGENT), message.table if isinstance(message, Delivered) else ""
            queue.send(encode(message), body, urgent=urgent, owed=owed, copy=copy)

    def send_server(self, server: int, message: object) -> None:
        """Queue a message for another server; connects when first needed. Dropped if the server cannot be reached."""
        queue = self._servers.get(server)
        if queue is None or queue.is_over:
            try:
                queue = self._connect(server)
            except PeerError:
                return
        queue.send(encode(message))

    def note_heard(self, server: int, connection: Connection) -> None:
        """Connect anew to a server that has: another process may be in its place, which our connection misses."""
        before, self._heard[server] = self._heard.get(server), connection
        if before is not None and before is not connection and server in self._servers:
            self._servers.pop(server).close()

    def expel(self, names: frozenset[str]) -> None:
        """Close connections to servers whose certificate has one of these holders or serial numbers."""
        for server in [
            rank for rank, known in self._servers.items() if known.connection.peer_identity.are_among(names)
        ]:
            self._servers.pop(server).close()

    def close(self) -> None:
        """Close all connections."""
        for _, queue in self._workers.values():
            queue.close()
        self._workers.clear()
        for queue in self._servers.values():
            queue.close()
        self._servers.clear()
        self._heard.clear()

    def _connect(self, server: int) -> SendQueue:
        identity = encode(Hello("server", self.server, 0, self.generation))
        connection = self.transport.connect(self.addresses()[server], identity, timeout_s=_CONNECT_TIMEOUT_S)
        check_server(connection, server)
        queue = self._servers[server] = SendQueue(connection, connection.close, bounded=True, hold=self.hold)
        return queue
