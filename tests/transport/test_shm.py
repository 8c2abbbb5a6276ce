"""What is peculiar to shared memory: it is shared, it is freed, and it may be short."""

import errno
import gc
import itertools
import mmap
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest
from tests.leaks import open_descriptors
from tests.transport.carriers import Pair, connect_pair

from paceline.errors import AuthenticationFailed, ConnectionLost, DeadlineExceeded, PeerError, Refused, UsageError
from paceline.transport import Connection, Limits, ShmTransport
from paceline.transport.frames import WIRE_VERSION
from paceline.transport.segments import create_memory


@pytest.fixture
def address(tmp_path: Path) -> str:
    tmp_path.chmod(0o700)
    return f"shm://{tmp_path}/server-0.sock"


@pytest.fixture
def pair(address: str) -> Iterator[Pair]:
    with closing(connect_pair(ShmTransport("job"), address)) as pair:
        yield pair


def fill(end: Connection) -> int:
    """Send until the carrier takes no more; returns how many frames it took whole."""
    for num_sent in itertools.count():
        try:
            end.send(b"x" * 1000, timeout_s=0)
        except DeadlineExceeded:
            return num_sent
    raise AssertionError


def test_allocated_body_is_shared(pair: Pair) -> None:
    memory = pair.transport.allocate(1 << 20)
    pair.client.send(b"push", memory[100:200], timeout_s=30)
    body = pair.server.receive(timeout_s=30).body
    memory[100:105] = b"later"
    assert bytes(body[:5]) == b"later"


def test_shared_body_is_not_placed(pair: Pair) -> None:
    memory = pair.transport.allocate(100)
    pair.client.send(b"push", memory, timeout_s=30)
    body = pair.server.receive(timeout_s=30, place=lambda *_: memoryview(bytearray(100))).body
    memory[:5] = b"later"
    assert bytes(body[:5]) == b"later"


def test_both_sides_share_their_own(pair: Pair) -> None:
    for sender, receiver in ((pair.client, pair.server), (pair.server, pair.client)):
        memory = pair.transport.allocate(5000)
        for text in (b"first", b"again"):
            memory[:5] = text
            sender.send(b"push", memory, timeout_s=30)
            assert bytes(receiver.receive(timeout_s=30).body[:5]) == text


def test_receiver_cannot_write_to_the_senders_memory(pair: Pair) -> None:
    memory = pair.transport.allocate(5000)
    pair.client.send(b"push", memory, timeout_s=30)
    pair.server.receive(timeout_s=30).body[:5] = b"wrong"
    assert bytes(memory[:5]) == bytes(5)


def test_body_partly_outside_the_allocation_is_copied(pair: Pair) -> None:
    plain = bytearray(100)
    pair.transport.allocate(4096)
    pair.client.send(b"push", memoryview(plain), timeout_s=30)
    body = pair.server.receive(timeout_s=30).body
    plain[:5] = b"later"
    assert bytes(body[:5]) == bytes(5)


def test_dropped_memory_is_freed_on_both_sides(pair: Pair) -> None:
    before = len(open_descriptors())
    for number in range(20):
        memory = pair.transport.allocate(1 << 20)
        memory[:1] = bytes([number])
        pair.client.send(b"push", memory, timeout_s=30)
        assert pair.server.receive(timeout_s=30).body[0] == number
        pair.transport.allocate(1 << 20)  # dropped at once, never sent
    del memory
    gc.collect()
    pair.client.send(b"the last is gone", timeout_s=30)
    pair.server.receive(timeout_s=30)
    assert len(open_descriptors()) == before


def test_memory_freed_is_retired_on_every_connection_that_was_given_it(address: str) -> None:
    transport = ShmTransport("job")
    before = len(open_descriptors())
    with closing(connect_pair(transport, address)) as pair:
        others = [transport.connect(address, bytes([number]), timeout_s=30) for number in range(3)]
        accepted = [pair.listener.accept(timeout_s=30) for _ in others]
        connected = len(open_descriptors())
        memory = transport.allocate(1 << 20)
        for end in (pair.server, *accepted[1:]):
            for _ in range(2):
                end.send(b"values", memory, timeout_s=30)
        del memory
        for end in (pair.server, *accepted):
            end.send(b"the memory is gone", timeout_s=30)
        for end in (pair.client, *others):
            while end.receive(timeout_s=30).header == b"values":
                pass
        assert len(open_descriptors()) == connected
        for end in (*others, *accepted):
            end.close()
    assert len(open_descriptors()) == before


def test_memory_is_freed_after_its_connections_and_its_transport(address: str) -> None:
    before = open_descriptors()
    transport = ShmTransport("job")
    memory, unsent = transport.allocate(4096), transport.allocate(4096)
    with closing(connect_pair(transport, address)) as pair:
        pair.client.send(b"push", memory[:10], timeout_s=30)
    del transport, pair
    gc.collect()
    memory[:5] = unsent[:5] = b"alive"
    del memory, unsent
    assert open_descriptors() == before


def test_more_segments_than_the_peer_takes_travel_inline(address: str) -> None:
    transport = ShmTransport("job", Limits(max_segments=2))
    with closing(connect_pair(transport, address)) as pair:
        memories = [transport.allocate(1000) for _ in range(4)]
        for number, memory in enumerate(memories):
            memory[:] = bytes([number]) * 1000
            pair.client.send(b"push", memory, timeout_s=30)
        bodies = [pair.server.receive(timeout_s=30).body for _ in memories]
        assert bodies == memories
        for memory in memories:
            memory[:1] = b"z"
        assert [body[0] for body in bodies] == [ord("z"), ord("z"), 2, 3]


def test_retirement_is_not_lost_when_a_send_fails(pair: Pair) -> None:
    before = len(open_descriptors())
    memory = pair.transport.allocate(1 << 20)
    pair.client.send(b"push", memory, timeout_s=30)
    pair.server.receive(timeout_s=30)
    num_sent = fill(pair.client)
    memory.release()
    del memory
    gc.collect()
    with pytest.raises(PeerError):
        pair.client.send(b"push", timeout_s=0)
    for _ in range(num_sent):
        pair.server.receive(timeout_s=30)
    pair.client.send(b"push", timeout_s=30)
    assert pair.server.receive(timeout_s=30).header == b"push"
    assert len(open_descriptors()) == before


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.ENOMEM, errno.ENOSYS])
def test_without_shared_memory_bodies_travel_inline_and_one_notice_says_so(address: str, reason: int) -> None:
    def full(size_bytes: int) -> int:
        raise OSError(reason, os.strerror(reason))

    notices: list[str] = []
    transport = ShmTransport("job", notice=notices.append, create_memory=full)
    with closing(connect_pair(transport, address)) as pair:
        for end, other in ((pair.client, pair.server), (pair.server, pair.client)):
            memory = transport.allocate(100_000)
            memory[:5] = b"alive"
            end.send(b"push", memory, timeout_s=30)
            assert bytes(other.receive(timeout_s=30).body[:5]) == b"alive"
    assert len(notices) == 1
    assert "100000 bytes cannot be allocated" in notices[0]
    assert os.strerror(reason) in notices[0]


def test_memory_without_pages_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, offset: int, size_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space"):
        create_memory(4096)


def test_system_without_memory_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="no memfd_create"):
        create_memory(4096)


def test_kernel_refuses_to_shrink_or_to_rewrite_a_segment(pair: Pair) -> None:
    before = open_descriptors()
    memory = pair.transport.allocate(4096)
    (descriptor, *_) = [
        int(number)
        for number, name in open_descriptors().items()
        if name.startswith("/memfd:") and before.get(number) != name
    ]
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, 1)
    with pytest.raises(PermissionError):
        os.pwrite(descriptor, b"wrong", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(descriptor, 4096)
    assert bytes(memory) == bytes(4096)


def test_other_job_is_refused(address: str) -> None:
    with closing(ShmTransport("job").listen(address)), pytest.raises(AuthenticationFailed, match="another job"):
        ShmTransport("other").connect(address, b"", timeout_s=30)


def test_other_version_is_named(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address.removeprefix("shm://"))
        server.listen()
        client = socket.socket(socket.AF_UNIX)
        with client, ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ShmTransport("job").connect, address, b"", timeout_s=30)
            sock, _ = server.accept()
            with sock:
                sock.sendall(struct.pack("<4sH?", b"PCLN", 9, True))
                with pytest.raises(Refused, match=f"wire version 9, expected {WIRE_VERSION}"):
                    waiting.result()


def test_other_user_is_refused(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(AuthenticationFailed, match="expected our own user 4242"):
        pair.transport.connect(pair.listener.address, b"", timeout_s=30)


def test_socket_and_directory_are_closed_to_others(tmp_path: Path) -> None:
    directory = tmp_path / "made" / "here"
    with closing(ShmTransport("job").listen(f"{directory}/s.sock")):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE((directory / "s.sock").stat().st_mode) == 0o600
    assert list(directory.iterdir()) == []


def test_open_directory_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(UsageError, match=r"mode 0755 .* expected 0700"):
        ShmTransport("job").listen(f"{tmp_path}/s.sock")


def test_socket_of_a_dead_process_is_replaced(address: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address.removeprefix("shm://"))
    connect_pair(ShmTransport("job"), address).close()


def test_file_in_the_way_is_kept(address: str) -> None:
    path = Path(address.removeprefix("shm://"))
    path.write_text("precious")
    with pytest.raises(UsageError, match="not a socket"):
        ShmTransport("job").listen(address)
    assert path.read_text() == "precious"


def test_long_path_is_reached_by_its_directory(tmp_path: Path) -> None:
    address = f"shm://{tmp_path}/{'d' * 90}/{'e' * 90}/server-0.sock"
    with closing(connect_pair(ShmTransport("job"), address)) as pair:
        pair.client.send(b"far", timeout_s=30)
        assert pair.server.receive(timeout_s=30).header == b"far"


def test_long_name_is_the_callers_mistake(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(UsageError, match="too long"):
        ShmTransport("job").listen(f"{tmp_path}/{'n' * 108}")


def test_a_socket_without_a_file_carries_the_same_and_keeps_other_jobs_out() -> None:
    transport, address = ShmTransport("job"), f"shm://@paceline-test-{uuid4()}"
    with closing(connect_pair(transport, address)) as pair:
        body = transport.allocate(1 << 16)
        pair.client.send(b"push", body, timeout_s=30)
        received = pair.server.receive(timeout_s=30).body
        body[:5] = b"later"
        assert bytes(received[:5]) == b"later"
    with closing(ShmTransport("job").listen(address)) as listener:  # its name is free again
        assert listener.address == address
        with pytest.raises(UsageError, match=r"cannot listen at shm://@paceline-test-.*in use"):
            ShmTransport("job").listen(address)
        with ThreadPoolExecutor(1) as thread:
            stranger = thread.submit(ShmTransport("another").connect, address, b"worker 1", timeout_s=30)
            with pytest.raises(DeadlineExceeded):
                listener.accept(timeout_s=0.2)
            with pytest.raises(PeerError, match="job"):
                stranger.result()
    with pytest.raises(PeerError, match="no listener at"):
        transport.connect(address, b"worker 1", timeout_s=30)
    with pytest.raises(UsageError, match=r"cannot listen at shm://@nnn.*too long"):
        transport.listen(f"shm://@{'n' * 108}")


def test_relative_path_is_the_callers_mistake() -> None:
    with pytest.raises(UsageError, match="full path"):
        ShmTransport("job").listen("server-0.sock")


def test_killed_peer_is_lost_and_its_memory_stays_readable(address: str) -> None:
    script = (
        "import sys; from paceline.transport import *\n"
        "transport = ShmTransport('job'); end = transport.connect(sys.argv[1], b'', timeout_s=30)\n"
        "memory = transport.allocate(1 << 20); memory[:5] = b'alive'\n"
        "end.send(b'up', memory, timeout_s=30); end.receive(timeout_s=60)"
    )
    with closing(ShmTransport("job").listen(address)) as listener:
        peer = subprocess.Popen([sys.executable, "-c", script, address])
        with peer, closing(listener.accept(timeout_s=30)) as server:
            body = server.receive(timeout_s=30).body
            peer.send_signal(signal.SIGKILL)
            with pytest.raises(ConnectionLost, match="closed it or died"):
                server.receive(timeout_s=30)
            assert bytes(body[:5]) == b"alive"
