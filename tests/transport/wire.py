"""Playing a peer by hand: raw sockets that say whatever a test wants."""

from __future__ import annotations

import hmac
import socket
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.transport.carriers import CREDENTIALS

from paceline.transport.frames import MAGIC, WIRE_VERSION

if TYPE_CHECKING:
    from collections.abc import Generator

NONCE = bytes(32)
GREETING_BYTES = 38


def open_raw(address: str) -> socket.socket:
    """Connect a plain socket to a tcp listener."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=30)


@contextmanager
def raw_server() -> Generator[tuple[socket.socket, str]]:
    """Yield a plain listening socket and its address."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        sock.settimeout(30)
        yield sock, f"tcp://127.0.0.1:{sock.getsockname()[1]}"


def hello(identity: bytes = b"", *, version: int = WIRE_VERSION, nonce: bytes = NONCE) -> bytes:
    return struct.pack("<4sHH32s", MAGIC, version, len(identity), nonce) + identity


def greeting(*, version: int = WIRE_VERSION, nonce: bytes = NONCE) -> bytes:
    return struct.pack("<4sH32s", MAGIC, version, nonce)


def proof(role: bytes, identity: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    """Compute a proof from the description of the protocol, apart from the code under test."""
    version, job, unbound = struct.pack(">H", WIRE_VERSION), CREDENTIALS.job.encode(), b""
    parts = (role, version, job, unbound, identity, client_nonce, server_nonce)
    said = b"".join(struct.pack(">I", len(part)) + part for part in parts)
    return hmac.new(CREDENTIALS.token, said, "sha256").digest()


def read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Read `num_bytes`, or fewer when the stream ends before."""
    data = b""
    while len(data) < num_bytes and (more := sock.recv(num_bytes - len(data))):
        data += more
    return data


def read_to_end(sock: socket.socket) -> bytes:
    """Read until the other side closes or resets; times out if it does neither."""
    data = b""
    try:
        while more := sock.recv(4096):
            data += more
    except ConnectionResetError:
        pass
    return data


def shake_hands(sock: socket.socket, identity: bytes = b"") -> None:
    """Play an honest client up to its first frame."""
    sock.sendall(hello(identity))
    nonce = read_exactly(sock, GREETING_BYTES)[-32:]
    sock.sendall(proof(b"client", identity, NONCE, nonce))
    assert read_exactly(sock, 32) == proof(b"server", identity, NONCE, nonce)
