"""Memory passed by a peer: it is checked before it is mapped, whatever the peer says of it."""

import array
import fcntl
import hmac
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.transport.wire import read_exactly

from paceline.errors import PeerError
from paceline.transport import Connection, Limits, ShmTransport
from paceline.transport.frames import WIRE_VERSION, Kind, Prefix, encode_prefix
from paceline.transport.segments import create_memory

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[tuple[socket.socket, Connection]]:
    """Yield a plain socket past its handshake, and the connection it talks to."""
    tmp_path.chmod(0o700)
    path = f"{tmp_path}/server-0.sock"
    transport = ShmTransport("job", Limits(max_segments=2))
    with closing(transport.listen(path)) as listener, socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        client.connect(path)
        digest = hmac.digest(b"paceline job", b"job", "sha256")
        client.sendall(struct.pack("<4sHH32s", b"PCLN", WIRE_VERSION, 0, digest))
        assert read_exactly(client, 7) == struct.pack("<4sH?", b"PCLN", WIRE_VERSION, True)
        with closing(listener.accept(timeout_s=30)) as server:
            yield client, server


def pass_segment(client: socket.socket, descriptor: int, size_bytes: int, number: int = 1) -> None:
    prefix = encode_prefix(Prefix(Kind.SHARED_FIRST, 0, 8, number, 0, size_bytes))
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
    client.sendmsg([prefix], [rights])
    os.close(descriptor)


def memory(size_bytes: int, seals: int = SEALS) -> int:
    descriptor = create_memory(size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def test_honest_segment_by_the_book(hostile: tuple[socket.socket, Connection]) -> None:
    client, server = hostile
    pass_segment(client, memory(4096), 4096)
    assert bytes(server.receive(timeout_s=30).body) == bytes(8)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_segment_that_could_shrink_is_refused(hostile: tuple[socket.socket, Connection], seals: int) -> None:
    client, server = hostile
    pass_segment(client, memory(4096, seals), 4096)
    with pytest.raises(PeerError, match="could still change its size"):
        server.receive(timeout_s=30)


def test_segment_smaller_than_announced_is_refused(hostile: tuple[socket.socket, Connection]) -> None:
    client, server = hostile
    pass_segment(client, memory(4096), 1 << 20)
    with pytest.raises(PeerError, match="of 4096 bytes and announced 1048576"):
        server.receive(timeout_s=30)


def test_descriptor_of_a_file_is_refused(hostile: tuple[socket.socket, Connection], tmp_path: Path) -> None:
    client, server = hostile
    pass_segment(client, os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT), 4096)
    with pytest.raises(PeerError, match=r"not sealed memory|could still change its size"):
        server.receive(timeout_s=30)


def test_body_beyond_its_segment_is_refused(hostile: tuple[socket.socket, Connection]) -> None:
    client, server = hostile
    pass_segment(client, memory(4096), 4096)
    server.receive(timeout_s=30)
    client.sendall(encode_prefix(Prefix(Kind.SHARED, 0, 8192, 1, 0, 8192)))
    with pytest.raises(PeerError, match="segment 1 of 8192 bytes, never passed"):
        server.receive(timeout_s=30)


@pytest.mark.parametrize("kind", [Kind.SHARED, Kind.SHARED_FIRST])
def test_segment_never_passed_is_refused(hostile: tuple[socket.socket, Connection], kind: Kind) -> None:
    client, server = hostile
    client.sendall(encode_prefix(Prefix(kind, 0, 8, 7, 0, 8)))
    with pytest.raises(PeerError, match="segment 7"):
        server.receive(timeout_s=30)


def test_too_many_segments_are_refused(hostile: tuple[socket.socket, Connection]) -> None:
    client, server = hostile
    for number in (1, 2):
        pass_segment(client, memory(4096), 4096, number)
        server.receive(timeout_s=30)
    pass_segment(client, memory(4096), 4096, 3)
    with pytest.raises(PeerError, match="more than 2 segments"):
        server.receive(timeout_s=30)


def test_descriptors_that_no_frame_uses_are_refused_and_closed(hostile: tuple[socket.socket, Connection]) -> None:
    client, server = hostile
    rights = array.array("i", [client.fileno()])
    for _ in range(10):
        client.sendmsg([b"P"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    with pytest.raises(PeerError, match="more descriptors"):
        server.receive(timeout_s=30)


def test_a_transport_leaves_nothing_behind_that_is_called_at_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **calls: registered.append(calls))
    ShmTransport("job")
    assert not registered
