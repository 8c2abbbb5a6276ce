"""A client with the token gets in; any other gets a closed connection and no word."""

import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transport.carriers import CREDENTIALS
from tests.transport.wire import (
    GREETING_BYTES,
    NONCE,
    greeting,
    hello,
    open_raw,
    proof,
    raw_server,
    read_exactly,
    read_to_end,
    shake_hands,
)

from paceline.errors import AuthenticationFailed, DeadlineExceeded, PeerError, Refused, UsageError
from paceline.transport import Credentials, Limits, Listener, TcpTransport
from paceline.transport.frames import WIRE_VERSION
from paceline.transport.handshake import REFUSAL


@pytest.fixture
def transport() -> TcpTransport:
    return TcpTransport(CREDENTIALS)


@pytest.fixture
def listener(transport: TcpTransport) -> Iterator[Listener]:
    with closing(transport.listen("127.0.0.1:0")) as listener:
        yield listener


def none_was_admitted(listener: Listener) -> bool:
    with pytest.raises(DeadlineExceeded):
        listener.accept(timeout_s=0)
    return True


def test_token_must_be_long_and_stays_secret() -> None:
    with pytest.raises(UsageError, match="has 31 bytes, expected at least 32"):
        Credentials(token=bytes(31), job="short")
    secret = b"s" * 32
    assert "ssss" not in repr(Credentials(token=secret, job="job"))


@pytest.mark.parametrize(
    "other",
    [Credentials(os.urandom(32), CREDENTIALS.job), Credentials(CREDENTIALS.token, "other job")],
    ids=["other token", "other job"],
)
def test_other_token_or_job_is_refused_and_the_client_told(listener: Listener, other: Credentials) -> None:
    with pytest.raises(AuthenticationFailed, match="the token or the job"):
        TcpTransport(other).connect(listener.address, b"", timeout_s=30)
    assert none_was_admitted(listener)


def test_an_honest_client_by_the_book_is_let_in(listener: Listener) -> None:
    with open_raw(listener.address) as client:
        shake_hands(client, b"worker 3")
        with closing(listener.accept(timeout_s=30)) as server:
            assert server.identity == b"worker 3"


def test_without_a_proof_nothing_is_learned_but_the_version_and_that_it_does_not_hold(listener: Listener) -> None:
    with open_raw(listener.address) as client:
        client.sendall(hello() + bytes(32))
        said = read_to_end(client)
    assert (len(said), said[GREETING_BYTES:]) == (GREETING_BYTES + len(REFUSAL), REFUSAL)
    assert none_was_admitted(listener)


def test_garbage_gets_no_answer(listener: Listener) -> None:
    with open_raw(listener.address) as client:
        client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(100))
        assert read_to_end(client) == b""


@settings(max_examples=30)
@given(noise=st.binary(min_size=40, max_size=400))
def test_no_noise_gets_in(listener: Listener, noise: bytes) -> None:
    with open_raw(listener.address) as client:
        client.sendall(noise)
        with suppress(OSError):  # refused already
            client.shutdown(socket.SHUT_WR)
        assert read_to_end(client)[GREETING_BYTES:] in (b"", REFUSAL)
    assert none_was_admitted(listener)


def test_replayed_handshake_fails(listener: Listener) -> None:
    with open_raw(listener.address) as honest:
        honest.sendall(hello(b"worker 3"))
        nonce = read_exactly(honest, GREETING_BYTES)[-32:]
        recorded = proof(b"client", b"worker 3", NONCE, nonce)
        honest.sendall(recorded)
        assert len(read_exactly(honest, 32)) == 32
        listener.accept(timeout_s=30).close()
    with open_raw(listener.address) as replayer:
        replayer.sendall(hello(b"worker 3") + recorded)
        assert read_to_end(replayer)[GREETING_BYTES:] == REFUSAL
    assert none_was_admitted(listener)


def test_proof_does_not_pass_for_another_identity(listener: Listener) -> None:
    with open_raw(listener.address) as client:
        client.sendall(hello(b"worker 4"))
        nonce = read_exactly(client, GREETING_BYTES)[-32:]
        client.sendall(proof(b"client", b"worker 3", NONCE, nonce))
        assert read_to_end(client) == REFUSAL
    assert none_was_admitted(listener)


def test_reflected_proof_fails(transport: TcpTransport) -> None:
    """A false server without the token returns to the client its own nonce and its own proof."""
    with raw_server() as (server, address), ThreadPoolExecutor(1) as pool:
        client = pool.submit(transport.connect, address, b"", timeout_s=30)
        sock, _ = server.accept()
        with sock:
            nonce = read_exactly(sock, len(hello()))[-32:]
            sock.sendall(greeting(nonce=nonce))
            sock.sendall(read_exactly(sock, 32))
            with pytest.raises(AuthenticationFailed, match="did not prove that it belongs to job"):
                client.result()


def test_reflected_hello_fails(transport: TcpTransport) -> None:
    """A mirror returns every byte."""
    with raw_server() as (server, address), ThreadPoolExecutor(1) as pool:
        client = pool.submit(transport.connect, address, b"", timeout_s=30)
        sock, _ = server.accept()
        with sock, suppress(ConnectionResetError):
            while data := sock.recv(4096):
                sock.sendall(data)
        with pytest.raises(AuthenticationFailed):
            client.result()


def test_other_version_of_the_server_is_named(transport: TcpTransport) -> None:
    with raw_server() as (server, address), ThreadPoolExecutor(1) as pool:
        client = pool.submit(transport.connect, address, b"", timeout_s=30)
        sock, _ = server.accept()
        with sock:
            sock.sendall(greeting(version=9))
            with pytest.raises(Refused, match=f"wire version 9, expected {WIRE_VERSION}: install the same paceline"):
                client.result()


def test_client_of_another_version_is_told_ours_and_closed(listener: Listener) -> None:
    with open_raw(listener.address) as client:
        client.sendall(hello(version=9))
        assert read_to_end(client)[:6] == greeting()[:6]
    assert none_was_admitted(listener)


def test_server_of_another_kind_is_named(transport: TcpTransport) -> None:
    with raw_server() as (server, address), ThreadPoolExecutor(1) as pool:
        client = pool.submit(transport.connect, address, b"", timeout_s=30)
        sock, _ = server.accept()
        with sock:
            sock.sendall(b"SSH-2.0-OpenSSH_9.6 hello hello hello hello\r\n")
            with pytest.raises(PeerError, match=r"not a Paceline peer but an SSH server"):
                client.result()


def test_silent_server_does_not_hold_the_client(transport: TcpTransport) -> None:
    with raw_server() as (_, address), pytest.raises(DeadlineExceeded, match="handshake"):
        transport.connect(address, b"", timeout_s=0.05)


def test_server_that_hangs_up_is_named(transport: TcpTransport) -> None:
    with raw_server() as (server, address), ThreadPoolExecutor(1) as pool:
        client = pool.submit(transport.connect, address, b"", timeout_s=30)
        server.accept()[0].close()
        with pytest.raises(PeerError, match="closed the connection during the handshake"):
            client.result()


def test_a_connection_that_is_cut_before_the_servers_proof_is_no_refusal(transport: TcpTransport) -> None:
    with raw_server() as (server, address), ThreadPoolExecutor(1) as pool:
        client = pool.submit(transport.connect, address, b"", timeout_s=30)
        sock, _ = server.accept()
        with sock:
            read_exactly(sock, len(hello()))
            sock.sendall(greeting())
            read_exactly(sock, 32)
        with pytest.raises(PeerError, match="closed the connection during the handshake") as raised:
            client.result()
        assert not isinstance(raised.value, AuthenticationFailed)


def test_slow_client_is_closed_at_the_deadline() -> None:
    transport = TcpTransport(CREDENTIALS, Limits(handshake_timeout_s=0.05))
    with closing(transport.listen("127.0.0.1:0")) as listener, open_raw(listener.address) as client:
        client.sendall(hello()[:10])
        assert read_to_end(client) == b""


def test_flood_of_silent_clients_does_not_block_an_honest_one() -> None:
    limits = Limits(max_half_open=8, handshake_timeout_s=60)
    transport = TcpTransport(CREDENTIALS, limits)
    with ExitStack() as flood, closing(transport.listen("127.0.0.1:0")) as listener:
        for _ in range(3 * limits.max_half_open):
            flood.enter_context(open_raw(listener.address))
        honest = flood.enter_context(closing(transport.connect(listener.address, b"honest", timeout_s=30)))
        server = flood.enter_context(closing(listener.accept(timeout_s=30)))
        assert server.identity == honest.identity == b"honest"


def test_silent_clients_take_no_place_from_a_slow_one() -> None:
    transport = TcpTransport(CREDENTIALS, Limits(max_half_open=1, handshake_timeout_s=60))
    with ExitStack() as clients, closing(transport.listen("127.0.0.1:0")) as listener:
        slow = clients.enter_context(open_raw(listener.address))
        slow.sendall(hello(b"slow"))
        nonce = read_exactly(slow, GREETING_BYTES)[-32:]
        for _ in range(40):
            clients.enter_context(open_raw(listener.address))
        slow.settimeout(0.5)  # a round trip of this line: long enough to be in the way
        with pytest.raises(TimeoutError):
            slow.recv(1)
        slow.sendall(proof(b"client", b"slow", NONCE, nonce))
        with closing(listener.accept(timeout_s=30)) as server:
            assert server.identity == b"slow"


def test_many_clients_of_one_address_give_way_to_another_address() -> None:
    transport = TcpTransport(CREDENTIALS, Limits(max_half_open=4, handshake_timeout_s=60))
    with ExitStack() as clients, closing(transport.listen("127.0.0.1:0")) as listener:
        host, port = listener.address.removeprefix("tcp://").split(":")
        for number in range(200):
            talker = socket.create_connection((host, int(port)), timeout=5, source_address=("127.0.0.2", 0))
            clients.enter_context(talker).sendall(hello(b"talker"))
            if number < 4:
                read_exactly(talker, GREETING_BYTES)
        honest = clients.enter_context(closing(transport.connect(listener.address, b"honest", timeout_s=30)))
        with closing(listener.accept(timeout_s=30)) as server:
            assert server.identity == honest.identity == b"honest"


def test_silent_clients_are_bounded_and_the_oldest_go_first() -> None:
    told: list[str] = []
    transport = TcpTransport(CREDENTIALS, Limits(max_silent=8, handshake_timeout_s=60), notice=told.append)
    with ExitStack() as clients, closing(transport.listen("127.0.0.1:0")) as listener:
        silent = [clients.enter_context(open_raw(listener.address)) for _ in range(30)]
        for early in silent[:22]:
            assert read_to_end(early) == b""
        for late in silent[22:]:
            late.setblocking(False)
            with pytest.raises(BlockingIOError):
                late.recv(1)
        clients.enter_context(closing(transport.connect(listener.address, b"honest", timeout_s=30)))
        clients.enter_context(closing(listener.accept(timeout_s=30)))
    assert told[0].endswith("was turned away: it was one of too many that have yet to shake hands")
