"""Whom a server can reach: workers on the connections they made, other servers on connections it makes itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.core.messages import Delivered, Held, Ticked
from paceline.errors import PeerError
from paceline.transport.base import EMPTY, Connection, Transport
from paceline.wire.messages import Hello, encode
from paceline.wire.permissions import check_server
from paceline.wire.send_queue import SendQueue

_URGENT = Held | Ticked  # a clock closes no sooner than a worker has heard these
_CONNECT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Connections:
    """Connections by who is at the other end.

    A message to somebody who is not connected is dropped: every message of the protocol is repeated by whoever
    needs its answer.
    """

    server: int
    generation: int
    transport: Transport
    addresses: Callable[[], tuple[str, ...]]
    drop: Callable[[Connection], None]
    sent_bytes: int = 0  # in bodies, to workers
    # By (rank, incarnation): what goes over the newest connection, and the how-many-th of that life it is.
    _workers: dict[tuple[int, int], tuple[int, SendQueue]] = field(
        default_factory=dict[tuple[int, int], tuple[int, SendQueue]]
    )
    _servers: dict[int, SendQueue] = field(default_factory=dict[int, SendQueue])

    def register(self, hello: Hello, connection: Connection) -> None:
        """Note a connection to that life of that worker, unless a newer one is known."""
        life = hello.rank, hello.incarnation
        newest, known = self._workers.get(life, (-1, None))
        if hello.connection < newest or (known is not None and known.connection is connection):
            return
        if known is not None:
            known.close()
        # Mapped memory is sent as a reference and stays as it is until the worker has taken in its content.
        copies = not self.transport.maps_memory
        post = SendQueue(connection, lambda: self.drop(connection), bounded=True, copies=copies)
        self._workers[life] = hello.connection, post

    def is_current(self, hello: Hello, connection: Connection) -> bool:
        """Say whether a worker is reached by this connection and not by a newer one."""
        return hello.role == "worker" and self.connection_of(hello.rank, hello.incarnation) is connection

    def connection_of(self, worker: int, incarnation: int) -> Connection | None:
        """Return the newest connection to that life of that worker, if there is one."""
        _, post = self._workers.get((worker, incarnation), (0, None))
        return None if post is None else post.connection

    def forget(self, connection: Connection) -> None:
        """Drop a connection that has ended."""
        over = [life for life, (_, post) in self._workers.items() if post.connection is connection]
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
        """Send to that life of that worker; a large body that finds no room in its queue is left out.

        A body that waits is copied, or is what `copy` gives, so it may change as soon as this returns; memory that the
        carrier maps may not.
        """
        _, post = self._workers.get((worker, incarnation), (0, None))
        if post is not None:
            self.sent_bytes += len(body)
            urgent, owed = isinstance(message, _URGENT), message.table if isinstance(message, Delivered) else ""
            post.send(encode(message), body, urgent=urgent, owed=owed, copy=copy)

    def send_server(self, server: int, message: object) -> None:
        """Send to another server, over a connection that is made when it is first needed."""
        post = self._servers.get(server)
        if post is None or post.is_over:
            try:
                post = self._connect(server)
            except PeerError:
                return
        post.send(encode(message))

    def expel(self, names: frozenset[str]) -> None:
        """Close the connections to servers whose certificate has such a holder or serial number."""
        for server in [
            rank for rank, known in self._servers.items() if known.connection.peer_identity.are_among(names)
        ]:
            self._servers.pop(server).close()

    def close(self) -> None:
        """Close all connections."""
        for _, post in self._workers.values():
            post.close()
        self._workers.clear()
        for post in self._servers.values():
            post.close()
        self._servers.clear()

    def _connect(self, server: int) -> SendQueue:
        identity = encode(Hello("server", self.server, 0, self.generation))
        connection = self.transport.connect(self.addresses()[server], identity, timeout_s=_CONNECT_TIMEOUT_S)
        check_server(connection, server)
        post = self._servers[server] = SendQueue(connection, connection.close, bounded=True)
        return post
