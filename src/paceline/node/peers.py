"""Whom a server can reach: workers on the connections they made, other servers on connections it makes itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import PeerError
from paceline.node.wire import Hello, encode
from paceline.transport.base import EMPTY, Connection, Transport

_SEND_TIMEOUT_S = 5.0
_LEAST_BYTES_PER_S = 50e6  # a peer that takes in large values more slowly than this does not keep up
_CONNECT_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Peers:
    """Connections by who is at the other end.

    A message to somebody who is not connected is dropped: every message of the protocol is repeated by whoever
    needs its answer.
    """

    server: int
    generation: int
    transport: Transport
    addresses: Callable[[], tuple[str, ...]]
    drop: Callable[[Connection], None]
    # By (rank, incarnation): the newest connection, and the how-many-th of that life it is.
    _workers: dict[tuple[int, int], tuple[int, Connection]] = field(
        default_factory=dict[tuple[int, int], tuple[int, Connection]]
    )
    _servers: dict[int, Connection] = field(default_factory=dict[int, Connection])

    def register(self, hello: Hello, connection: Connection) -> None:
        """Note a connection to that life of that worker, unless a newer one is known."""
        life = hello.rank, hello.incarnation
        newest, _ = self._workers.get(life, (-1, None))
        if hello.connection >= newest:
            self._workers[life] = hello.connection, connection

    def is_current(self, hello: Hello, connection: Connection) -> bool:
        """Say whether a worker is reached by this connection and not by a newer one."""
        return hello.role == "worker" and self.connection_of(hello.rank, hello.incarnation) is connection

    def connection_of(self, worker: int, incarnation: int) -> Connection | None:
        """Return the newest connection to that life of that worker, if there is one."""
        _, connection = self._workers.get((worker, incarnation), (0, None))
        return connection

    def forget(self, connection: Connection) -> None:
        """Drop a connection that has ended."""
        self._workers = {life: entry for life, entry in self._workers.items() if entry[1] is not connection}

    def send_worker(self, worker: int, incarnation: int, message: object, body: memoryview = EMPTY) -> None:
        """Send to that life of that worker; a worker that does not take it in time is disconnected."""
        connection = self.connection_of(worker, incarnation)
        if connection is None:
            return
        try:
            connection.send(encode(message), body, timeout_s=_SEND_TIMEOUT_S + len(body) / _LEAST_BYTES_PER_S)
        except PeerError:
            self.drop(connection)

    def send_server(self, server: int, message: object) -> None:
        """Send to another server, over a connection that is made when it is first needed."""
        try:
            connection = self._servers.get(server) or self._connect(server)
            connection.send(encode(message), timeout_s=_SEND_TIMEOUT_S)
        except PeerError:
            lost = self._servers.pop(server, None)
            if lost is not None:
                lost.close()

    def close(self) -> None:
        """Close the connections to other servers."""
        for connection in self._servers.values():
            connection.close()
        self._servers.clear()

    def _connect(self, server: int) -> Connection:
        identity = encode(Hello("server", self.server, 0, self.generation))
        connection = self.transport.connect(self.addresses()[server], identity, timeout_s=_CONNECT_TIMEOUT_S)
        self._servers[server] = connection
        return connection
