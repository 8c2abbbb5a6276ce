"""What is peculiar to TCP: addresses, ports, and peers that say or do the wrong thing after the handshake."""

import errno
import os
import signal
import socket
import struct
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psutil
import pytest
from tests.transport.carriers import CREDENTIALS
from tests.transport.wire import open_raw, raw_server, shake_hands

from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError, UsageError
from paceline.transport import Limits, TcpTransport
from paceline.transport.base import EMPTY
from paceline.transport.channel import OutOfTime, SilenceLimit, SocketChannel
from paceline.transport.deadline import Deadline
from paceline.transport.frames import PREFIX_BYTES, Kind, Prefix, encode_prefix
from paceline.transport.stream import StreamConnection

ROOT = Path(__file__).parents[2]


def served_by_hand(listener_limits: Limits | None = None) -> tuple[socket.socket, StreamConnection]:
    """Return a plain socket past its handshake, and the connection it talks to."""
    with closing(TcpTransport(CREDENTIALS, listener_limits).listen("127.0.0.1:0")) as listener:
        client = open_raw(listener.address)
        shake_hands(client)
        return client, listener.accept(timeout_s=30)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("0.0.0.0:0", "need TLS"),
        ("192.168.1.7:80", "need TLS"),
        ("[::]:0", "need TLS"),
        ("no-such-host:80", "not an IP address"),
        ("127.0.0.1", "expected host:port"),
        ("127.0.0.1:http", "expected host:port"),
        ("127.0.0.1:70000", "expected host:port"),
        ("127.0.0.1:-1", "expected host:port"),
    ],
)
def test_only_loopback_addresses_with_a_port(address: str, message: str) -> None:
    transport = TcpTransport(CREDENTIALS)
    with pytest.raises(UsageError, match=message):
        transport.listen(address)
    with pytest.raises(UsageError, match=message):
        transport.connect(address, b"", timeout_s=1)


def test_localhost_is_127_0_0_1() -> None:
    with closing(TcpTransport(CREDENTIALS).listen("localhost:0")) as listener:
        assert listener.address.startswith("tcp://127.0.0.1:")


def test_listens_on_the_configured_address_alone() -> None:
    with closing(TcpTransport(CREDENTIALS).listen("127.0.0.1:0")) as listener:
        port = int(listener.address.rpartition(":")[2])
        listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        assert [(c.laddr.ip, c.laddr.port) for c in listening] == [("127.0.0.1", port)]


def test_taken_port_names_its_owner() -> None:
    with raw_server() as (_, address), pytest.raises(UsageError, match=f"is taken by process {os.getpid()}: choose"):
        TcpTransport(CREDENTIALS).listen(address)


def test_killed_peer_is_lost() -> None:
    script = (
        "import sys; from paceline.transport import *\n"
        "end = TcpTransport(Credentials(bytes(range(32)), 'contract')).connect(sys.argv[1], b'', timeout_s=30)\n"
        "end.send(b'up', timeout_s=30); end.receive(timeout_s=60)"
    )
    with closing(TcpTransport(CREDENTIALS).listen("127.0.0.1:0")) as listener:
        peer = subprocess.Popen([sys.executable, "-c", script, listener.address])
        with peer, closing(listener.accept(timeout_s=30)) as server:
            assert server.receive(timeout_s=30).header == b"up"
            peer.send_signal(signal.SIGKILL)
            with pytest.raises(ConnectionLost, match="closed it or died"):
                server.receive(timeout_s=30)


def test_garbage_after_the_handshake_ends_the_connection() -> None:
    client, server = served_by_hand()
    with client, closing(server):
        client.sendall(b"x" * PREFIX_BYTES)
        with pytest.raises(PeerError, match="not a Paceline peer"):
            server.receive(timeout_s=30)
        with pytest.raises(ConnectionLost, match="not a Paceline peer"):
            server.receive(timeout_s=30)
        with pytest.raises(ConnectionLost):
            server.send(b"push", timeout_s=30)


def test_oversize_frame_is_refused_before_memory_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(size_bytes: int) -> memoryview:
        raise AssertionError(f"{size_bytes} bytes were taken")

    monkeypatch.setattr("paceline.transport.stream.fresh_buffer", no_memory)
    client, server = served_by_hand(Limits(max_body_bytes=1000))
    with client, closing(server):
        client.sendall(encode_prefix(Prefix(Kind.INLINE, 0, 1001)))
        with pytest.raises(PeerError, match="body of 1001 bytes, at most 1000"):
            server.receive(timeout_s=30)


def test_announced_but_unsent_body_takes_no_memory() -> None:
    client, server = served_by_hand()
    with client, closing(server):
        client.sendall(encode_prefix(Prefix(Kind.INLINE, 0, 1 << 33)))
        before = psutil.Process().memory_info().rss
        with pytest.raises(DeadlineExceeded):
            server.receive(timeout_s=0.05)
        assert psutil.Process().memory_info().rss - before < 64 << 20


def test_a_connection_takes_memory_for_a_large_header_once_one_comes() -> None:
    tracemalloc.start()
    try:
        client, server = served_by_hand()
        assert tracemalloc.get_traced_memory()[0] < 1 << 18
    finally:
        tracemalloc.stop()
    with closing(client), closing(server):
        for size_bytes in (7, 1 << 20, 1 << 15, 0):
            header = os.urandom(size_bytes)
            with ThreadPoolExecutor(1) as pool:
                sent = pool.submit(client.sendall, encode_prefix(Prefix(Kind.INLINE, size_bytes, 3)) + header + b"abc")
                frame = server.receive(timeout_s=30)
                sent.result()
            assert (frame.header, bytes(frame.body)) == (header, b"abc")


def test_shared_memory_cannot_be_named() -> None:
    client, server = served_by_hand()
    with client, closing(server):
        client.sendall(encode_prefix(Prefix(Kind.SHARED, 0, 10, 1, 0, 10)))
        with pytest.raises(PeerError, match="a transport that has none"):
            server.receive(timeout_s=30)


def test_frame_cut_by_a_deadline_is_continued() -> None:
    client, server = served_by_hand()
    frame = encode_prefix(Prefix(Kind.INLINE, 4, 1000)) + b"push" + bytes(range(250)) * 4
    with client, closing(server):
        for end in range(100, len(frame) + 100, 100):
            client.sendall(frame[end - 100 : end])
            if end < len(frame):
                with pytest.raises(DeadlineExceeded):
                    server.receive(timeout_s=0.01)
        received = server.receive(timeout_s=30)
    assert (received.header, bytes(received.body)) == (b"push", frame[68:])


def test_frame_cut_by_a_deadline_is_continued_at_the_place_first_named() -> None:
    client, server = served_by_hand()
    wanted = bytearray(1000)
    frame = encode_prefix(Prefix(Kind.INLINE, 4, 1000)) + b"push" + bytes(range(250)) * 4
    with client, closing(server):
        client.sendall(frame[:500])
        with pytest.raises(DeadlineExceeded):
            server.receive(timeout_s=0.05, place=lambda *_: memoryview(wanted))
        client.sendall(frame[500:])
        assert server.receive(timeout_s=30).body == wanted == frame[68:]


def test_frame_cut_by_the_end_is_lost() -> None:
    client, server = served_by_hand()
    with closing(server):
        with client:
            client.sendall(encode_prefix(Prefix(Kind.INLINE, 4, 1000)) + b"push" + bytes(500))
        with pytest.raises(ConnectionLost):
            server.receive(timeout_s=30)


def test_frame_sent_in_part_ends_the_connection() -> None:
    client, server = served_by_hand()
    with client, closing(server):
        with pytest.raises(DeadlineExceeded, match=r"to take a frame; sent [1-9]\d* of"):
            server.send(b"large", memoryview(bytes(64 << 20)), timeout_s=0.1)
        with pytest.raises(ConnectionLost, match="only in part"):
            server.send(b"next", timeout_s=30)


def test_last_words_can_be_read_after_a_failed_send() -> None:
    client, server = served_by_hand()
    with closing(server):
        with client:
            client.sendall(encode_prefix(Prefix(Kind.INLINE, 7, 0)) + b"refused")
            with pytest.raises(DeadlineExceeded):
                server.send(b"large", memoryview(bytes(64 << 20)), timeout_s=0.1)
            assert server.receive(timeout_s=30).header == b"refused"
        with pytest.raises(ConnectionLost):
            server.receive(timeout_s=30)


def test_silence_noticed_by_the_kernel_is_a_loss_and_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object) -> int:
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    client, server = served_by_hand()
    with client, closing(server):
        monkeypatch.setattr(SocketChannel, "read_some", silent)
        with pytest.raises(ConnectionLost, match="fell silent"):
            server.receive(timeout_s=30)


def user_timeout_ms(connection: StreamConnection) -> int:
    sock = connection._channel._socket  # type: ignore[attr-defined]
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_a_peer_that_is_stopped_while_a_large_frame_is_under_way_is_not_given_up_by_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.transport.channel._PAUSE_S", 0.0)
    transport, body = TcpTransport(CREDENTIALS), memoryview(bytes(32 << 20))
    with closing(transport.listen("127.0.0.1:0")) as listener, ThreadPoolExecutor(1) as pool:
        near = transport.connect(listener.address, b"", timeout_s=30)
        with closing(near), closing(listener.accept(timeout_s=30)) as far:
            sent = pool.submit(near.send, b"large", body, timeout_s=60)  # the other end reads nothing, as if stopped
            for _ in range(20):
                with pytest.raises(DeadlineExceeded):
                    near.receive(timeout_s=0.02)
                assert user_timeout_ms(near) == 0
            assert not sent.done()
            assert far.receive(timeout_s=30).body == body
            sent.result(timeout=30)


@pytest.mark.campaign
def test_a_process_that_is_stopped_for_twenty_seconds_gets_its_large_frame() -> None:
    code = (
        "from paceline.transport import TcpTransport; from tests.transport.carriers import CREDENTIALS\n"
        "listener = TcpTransport(CREDENTIALS).listen('127.0.0.1:0'); print(listener.address, flush=True)\n"
        "connection = listener.accept(timeout_s=30); input()\n"
        "print(len(connection.receive(timeout_s=60).body), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as child, ThreadPoolExecutor(1) as pool:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        connection = TcpTransport(CREDENTIALS).connect(child.stdout.readline().strip(), b"", timeout_s=30)
        with closing(connection):
            os.kill(child.pid, signal.SIGSTOP)
            sent = pool.submit(connection.send, b"large", memoryview(bytes(64 << 20)), timeout_s=120)
            with pytest.raises(DeadlineExceeded):
                connection.receive(timeout_s=30)
            os.kill(child.pid, signal.SIGCONT)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == f"{64 << 20}\n"
            sent.result(timeout=30)


def test_the_kernel_gives_up_what_goes_unanswered_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.transport.channel._PAUSE_S", 0.0)

    class Line:
        """A socket whose kernel says how often it has said something again, and asked at a closed window."""

        said_again, asked_again, timeout_ms = 0, 0, 0

        def getsockopt(self, level: int, option: int, size: int) -> bytes:
            assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_INFO)
            info = bytes([1, 0, self.said_again, self.asked_again]).ljust(size - 8, b"\0")
            return info + struct.pack("II", 2_000, 1_000)  # heard so many milliseconds ago

        def setsockopt(self, level: int, option: int, value: int) -> None:
            assert (level, option) == (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            self.timeout_ms = value

    line = Line()
    silence = SilenceLimit(line)  # type: ignore[arg-type]
    seen: list[int] = []
    for line.said_again, line.asked_again in ((0, 0), (0, 2), (1, 0), (5, 0), (0, 0), (0, 3), (0, 1)):
        silence.check()
        seen.append(line.timeout_ms)
    assert seen == [0, 0, 10_000, 10_000, 0, 10_000, 0]


def test_there_is_no_room_without_a_reader_and_never_for_a_large_body() -> None:
    sock, connection = served_by_hand()
    with closing(sock), closing(connection):
        assert connection.has_room(memoryview(bytes(1000)))
        assert not connection.has_room(memoryview(bytes(1 << 20)))
        for _ in range(1000):
            if not connection.has_room(memoryview(bytes(1000))):
                break
            connection.send(b"more", memoryview(bytes(16 << 10)), timeout_s=30)
        assert not connection.has_room(EMPTY)


def test_one_thread_may_ask_for_room_while_another_waits_for_it() -> None:
    here, there = socket.socketpair()
    with here, there, ThreadPoolExecutor(1) as pool:
        channel = SocketChannel(here)
        while channel.has_room():
            here.send(bytes(4096))
        waiting = pool.submit(channel.wait_for_room, Deadline.after(0.2))
        while not waiting.done():
            assert not channel.has_room()
        assert isinstance(waiting.exception(), OutOfTime)


@pytest.mark.parametrize(
    ("address", "leaves"),
    [("127.0.0.1:9", False), ("tcp://localhost:9", False), ("[::1]:9", False), ("127.9.0.3:9", True)],
)
def test_an_address_that_frames_start_from_does_not_leave_the_machine(address: str, leaves: bool) -> None:
    assert TcpTransport(CREDENTIALS).leaves_machine(address) == leaves
