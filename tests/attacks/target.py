"""What is attacked: a server over tcp with a table, a worker that uses it, and a picture of everything that counts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from tests.nodes.client import Client, member, serve_table
from tests.nodes.cluster import JOIN_S, Cluster
from tests.transport.carriers import CREDENTIALS

from paceline.core.messages import Fetched, Pull, Sender
from paceline.core.settings import ServerSettings
from paceline.observe.trace import Trace
from paceline.server.dense_table import ServedDenseTable
from paceline.server.node import ServerNode
from paceline.server.row_table import ServedRowTable
from paceline.server.tables import ServerState
from paceline.transport import Limits, TcpTransport, TlsSettings
from paceline.wire.messages import PullFrame

PATIENCE_S = 30.0
REFUSED_WITHIN_S = 1.0  # of processor time, as a busy machine takes its time


@dataclass
class Target:
    """A server under attack. `honest` is worker 0, which has made table "w"."""

    servers: Cluster
    honest: Client
    _num_reads: int = 0

    @property
    def address(self) -> str:
        return self.servers.addresses[0]

    def picture(self) -> dict[str, Any]:
        """All that an attack must not change, as the server's own thread sees it."""
        seen: SimpleQueue[dict[str, Any]] = SimpleQueue()
        self.servers.servers[0].do(lambda state: seen.put(_picture(state)))
        return seen.get(timeout=PATIENCE_S)

    def read(self) -> bytes:
        """Return the values of "w" as the honest worker reads them."""
        self._num_reads += 1
        self.honest.say(PullFrame(Pull(Sender(1, 0, 0), self._num_reads, "w", 0, 0), self._num_reads - 1))
        return bytes(self.honest.hear(Fetched)[1])


def _picture(state: ServerState) -> dict[str, Any]:
    core, tables = state.core, state.tables
    return {
        "values": {
            table.spec.name: bytes(table.memory) for table in tables.values() if isinstance(table, ServedDenseTable)
        },
        "waiting": sum(table.num_waiting for table in tables.values()),
        "members": core.members,
        "clocks": dict(core._clocks._of),
        "versions": {name: (table.version, table.commit.clock) for name, table in core.tables.items()},
        "rows": {table.spec.name: len(table.store) for table in tables.values() if isinstance(table, ServedRowTable)},
    }


@contextmanager
def target(
    *, tls: TlsSettings | None = None, client_tls: TlsSettings | None = None, limits: Limits | None = None, **more: Any
) -> Iterator[Target]:
    """Run a server and an honest worker of it; both have ended afterwards, whatever happened meanwhile."""
    with serving(tls=tls, client_tls=client_tls, limits=limits) as servers, member(servers, 0) as honest:
        serve_table(honest, **more)
        yield Target(servers, honest)


@contextmanager
def serving(
    *, tls: TlsSettings | None = None, client_tls: TlsSettings | None = None, limits: Limits | None = None
) -> Iterator[Cluster]:
    """Run a server; a `Cluster` of which others join by `client_tls`."""
    carrier = TcpTransport(CREDENTIALS, limits, tls=tls)
    listener = carrier.listen("127.0.0.1:0")
    addresses = (listener.address,)
    settings = ServerSettings(0, 1, lease_s=60.0)
    node = ServerNode(settings, listener, carrier, lambda: addresses, Trace(None), checks_memory=True)
    thread = threading.Thread(target=node.run, name="target", daemon=True)
    thread.start()
    try:
        yield Cluster(TcpTransport(CREDENTIALS, limits, tls=client_tls), [node], addresses, lease_s=60.0)
        assert thread.is_alive(), "the server is gone"
    finally:
        node.stop()
        thread.join(JOIN_S)
        assert not thread.is_alive(), "the server hangs"
