"""Whom a server can reach: workers on the connections they made, other servers on connections it makes itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import PeerError
from paceline.node.wire import Hello, encode
from paceline.transport.base import EMPTY, Connection, Transport

_SEND_TIMEOUT_S = 5.0
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
    _workers: dict[tuple[int, int], Connection] = field(default_factory=dict[tuple[int, int], Connection])
    _servers: dict[int, Connection] = field(default_factory=dict[int, Connection])
    # Memory in which values travel to a worker, by (connection, table, purpose). A worker has at most one read and
    # one delivery of a table under way, and has taken in the last one before it causes the next.
    _memory: dict[tuple[int, str, str], memoryview] = field(default_factory=dict[tuple[int, str, str], memoryview])

    def register(self, hello: Hello, connection: Connection) -> None:
        """Note that this connection is the newest to that life of that worker."""
        if hello.role == "worker":
            self._workers[hello.rank, hello.incarnation] = connection

    def is_current(self, hello: Hello, connection: Connection) -> bool:
        """Say whether a worker is reached by this connection and not by a newer one."""
        return self._workers.get((hello.rank, hello.incarnation)) is connection

    def forget(self, connection: Connection) -> None:
        """Drop what belongs to a connection that has ended."""
        self._workers = {life: c for life, c in self._workers.items() if c is not connection}
        self._memory = {key: m for key, m in self._memory.items() if key[0] != id(connection)}

    def memory(self, worker: int, incarnation: int, table: str, purpose: str, size_bytes: int) -> memoryview:
        """Return memory for values on their way to a worker; empty if it is not connected."""
        connection = self._workers.get((worker, incarnation))
        if connection is None:
            return EMPTY
        key = (id(connection), table, purpose)
        if key not in self._memory:
            self._memory[key] = connection.allocate(size_bytes)
        return self._memory[key]

    def send_worker(self, worker: int, incarnation: int, message: object, body: memoryview = EMPTY) -> None:
        """Send to that life of that worker; a worker that does not take it in time is disconnected."""
        connection = self._workers.get((worker, incarnation))
        if connection is not None:
            self.send(connection, message, body)

    def send(self, connection: Connection, message: object, body: memoryview = EMPTY) -> None:
        """Send on a connection; end it if the other side does not take the message in time."""
        try:
            connection.send(encode(message), body, timeout_s=_SEND_TIMEOUT_S)
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
