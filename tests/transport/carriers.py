"""Every transport, ready to use, and two connected ends of it."""

from __future__ import annotations

import os
import socket
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.transport import (
    Connection,
    Credentials,
    FaultPlan,
    FaultyTransport,
    Limits,
    Listener,
    MemoryTransport,
    ShmTransport,
    TcpTransport,
    TlsSettings,
    Transport,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CARRIERS = ("memory", "memory-maps", "tcp", "tls", "shm", "faulty-memory", "faulty-tcp")
CREDENTIALS = Credentials(token=bytes(range(32)), job="contract")


@dataclass(frozen=True)
class Carrier:
    """A transport and an address of it to listen at."""

    transport: Transport
    address: str


@dataclass(frozen=True)
class Pair:
    """Both ends of one connection, and how they met."""

    transport: Transport
    listener: Listener
    client: Connection
    server: Connection

    def close(self) -> None:
        self.client.close()
        self.server.close()
        self.listener.close()


def make_carrier(kind: str, directory: Path, limits: Limits | None = None, tls: TlsSettings | None = None) -> Carrier:
    """Make a transport of this kind; "tls" needs certificates."""
    if kind.startswith("faulty-"):
        inner = make_carrier(kind.removeprefix("faulty-"), directory, limits, tls)
        return Carrier(FaultyTransport(inner.transport, FaultPlan(), seed=0), inner.address)
    if kind in ("memory", "memory-maps"):
        return Carrier(MemoryTransport(limits, maps=kind == "memory-maps"), "memory://server-0")
    if kind in ("tcp", "tls"):
        assert (tls is None) == (kind == "tcp")
        return Carrier(TcpTransport(CREDENTIALS, limits, tls=tls), "tcp://127.0.0.1:0")
    os.chmod(directory, 0o700)
    return Carrier(ShmTransport("contract", limits), f"shm://{directory}/server-0.sock")


def connect_pair(transport: Transport, address: str) -> Pair:
    listener = transport.listen(address)
    client = transport.connect(listener.address, b"worker 3", timeout_s=30)
    return Pair(transport, listener, client, listener.accept(timeout_s=30))


@contextmanager
def full_listener() -> Iterator[str]:
    """HOST:PORT at which the system accepts no more connections, as behind a firewall that drops packets."""
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket())
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(8):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            with suppress(BlockingIOError):
                client.connect(server.getsockname())
        yield f"127.0.0.1:{server.getsockname()[1]}"
