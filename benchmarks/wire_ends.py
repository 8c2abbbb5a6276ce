"""Ways to carry bytes between two processes, Paceline's and plain sockets, behind one face."""

import os
import socket
from pathlib import Path
from typing import Final, Literal, Protocol, final

from wire_certificates import settings_in

from paceline.transport.base import EMPTY, Connection, Credentials, Listener, Transport
from paceline.transport.shm import ShmTransport
from paceline.transport.tcp import TcpTransport

Kind = Literal["raw tcp", "tcp", "tls", "raw unix", "unix", "shm"]
KINDS: Final[tuple[Kind, ...]] = ("raw tcp", "tcp", "tls", "raw unix", "unix", "shm")
TIMEOUT_S: Final = 60.0
JOB: Final = "wire"
TOKEN_NAME: Final = "token"  # the file of the secret that both processes know
MEMBER: Final = "member"  # the name of the certificate that both processes show
SMALL: Final = bytes(64)


class End(Protocol):
    """One end of an open connection."""

    def send(self) -> None:
        """Send one large body."""
        ...

    def take(self) -> None:
        """Wait for one large body; its bytes are then in memory of this process."""
        ...

    def send_small(self) -> None:
        """Send a small message."""
        ...

    def take_small(self) -> None:
        """Wait for a small message."""
        ...

    def close(self) -> None:
        """Free it."""
        ...


@final
class RawEnd:
    """A blocking socket: `sendall`, and `recv_into` memory that is there already."""

    def __init__(self, sock: socket.socket, size_bytes: int) -> None:
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(TIMEOUT_S)
        self._socket = sock
        self._body = memoryview(bytearray(os.urandom(size_bytes)))
        self._small = memoryview(bytearray(SMALL))

    def send(self) -> None:
        """Send one large body."""
        self._socket.sendall(self._body)

    def take(self) -> None:
        """Wait for one large body."""
        self._fill(self._body)

    def send_small(self) -> None:
        """Send a small message."""
        self._socket.sendall(self._small)

    def take_small(self) -> None:
        """Wait for a small message."""
        self._fill(self._small)

    def close(self) -> None:
        """Free it."""
        self._socket.close()

    def _fill(self, memory: memoryview) -> None:
        while memory:
            received = self._socket.recv_into(memory)
            if not received:
                raise EOFError
            memory = memory[received:]


@final
class CarrierEnd:
    """A connection of Paceline, which receives into memory that is there already.

    `shared` bodies are given by address, and the receiver copies them out.
    """

    def __init__(self, transport: Transport, connection: Connection, size_bytes: int, *, shared: bool) -> None:
        self._connection = connection
        self._body = transport.allocate(size_bytes) if shared else memoryview(bytearray(size_bytes))
        self._body[:] = os.urandom(size_bytes)
        self._shared = shared

    def send(self) -> None:
        """Send one large body."""
        self._connection.send(b"large", self._body, timeout_s=TIMEOUT_S)

    def take(self) -> None:
        """Wait for one large body."""
        body = self._connection.receive(timeout_s=TIMEOUT_S, place=lambda *_: self._body).body
        if self._shared:
            self._body[:] = body

    def send_small(self) -> None:
        """Send a small message."""
        self._connection.send(SMALL, EMPTY, timeout_s=TIMEOUT_S)

    def take_small(self) -> None:
        """Wait for a small message."""
        self._connection.receive(timeout_s=TIMEOUT_S)

    def close(self) -> None:
        """Free it."""
        self._connection.close()


@final
class EndListener:
    """Where the ends of one kind are accepted."""

    def __init__(self, kind: Kind, folder: Path) -> None:
        self._kind = kind
        place = folder / f"{kind.replace(' ', '-')}.sock"
        self._raw: socket.socket | None = None
        self._transport = _transport(kind, folder)
        self._listener: Listener | None = None
        if kind == "raw unix":
            self._raw = socket.socket(socket.AF_UNIX)
            self._raw.bind(str(place))
            self.address = str(place)
        elif kind == "raw tcp":
            self._raw = socket.create_server(("127.0.0.1", 0))
            self.address = str(self._raw.getsockname()[1])
        else:
            at = "tcp://127.0.0.1:0" if kind in ("tcp", "tls") else f"shm://{place}"
            self._listener = self._transport.listen(at)
            self.address = self._listener.address
        if self._raw is not None:
            self._raw.listen(64)
            self._raw.settimeout(TIMEOUT_S)

    def accept(self, size_bytes: int) -> End:
        """Wait for the next connection."""
        if self._raw is not None:
            return RawEnd(self._raw.accept()[0], size_bytes)
        assert self._listener is not None
        connection = self._listener.accept(timeout_s=TIMEOUT_S)
        return CarrierEnd(self._transport, connection, size_bytes, shared=self._kind == "shm")

    def close(self) -> None:
        """Stop listening."""
        listening = self._raw or self._listener
        assert listening is not None
        listening.close()
        if self._kind == "raw unix":
            Path(self.address).unlink()


def connect(kind: Kind, address: str, folder: Path, size_bytes: int) -> End:
    """Connect to a listener of another process."""
    if kind == "raw tcp":
        return RawEnd(socket.create_connection(("127.0.0.1", int(address)), TIMEOUT_S), size_bytes)
    if kind == "raw unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address)
        return RawEnd(sock, size_bytes)
    transport = _transport(kind, folder)
    connection = transport.connect(address, b"sender", timeout_s=TIMEOUT_S)
    return CarrierEnd(transport, connection, size_bytes, shared=kind == "shm")


def _transport(kind: Kind, folder: Path) -> Transport:
    """Make a transport from the secrets in a folder."""
    if kind not in ("tcp", "tls"):
        return ShmTransport(JOB)
    credentials = Credentials((folder / TOKEN_NAME).read_bytes(), JOB)
    return TcpTransport(credentials, tls=settings_in(folder, MEMBER) if kind == "tls" else None)
