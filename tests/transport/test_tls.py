"""What is peculiar to TLS: a client with a certificate of the job's authority gets in, and is told why if not."""

import queue
import socket
import ssl
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from benchmarks.wire_certificates import Authority
from msgspec.structs import replace
from tests.transport.carriers import CREDENTIALS, connect_pair
from tests.transport.wire import open_raw, raw_server, read_to_end

from paceline.errors import AuthenticationFailed, ConnectionLost, DeadlineExceeded, PeerError, UsageError
from paceline.transport import Credentials, Limits, Listener, TcpTransport, TlsSettings
from paceline.transport.base import ANY
from paceline.transport.handshake import HandshakeResult, TokenHandshake
from paceline.transport.tls import TlsHandshake


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def member(authority: Authority) -> TlsSettings:
    return authority.issue("member")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TlsSettings:
    return Authority(tmp_path_factory.mktemp("theirs"), "other-authority").issue("member")


@pytest.fixture
def listener(member: TlsSettings) -> Iterator[Listener]:
    with closing(TcpTransport(CREDENTIALS, tls=member).listen("127.0.0.1:0")) as listener:
        yield listener


def client_with(tls: TlsSettings | None) -> TcpTransport:
    return TcpTransport(CREDENTIALS, tls=tls)


def none_was_admitted(listener: Listener) -> bool:
    with pytest.raises(DeadlineExceeded):
        listener.accept(timeout_s=0)
    return True


@contextmanager
def eavesdropping(near: socket.socket, far: socket.socket) -> Generator[bytearray]:
    """Pass on what either socket says until one of them ends; yield a growing copy of it all."""
    heard = bytearray()

    def pass_on(source: socket.socket, sink: socket.socket) -> None:
        with suppress(ConnectionError):
            while said := source.recv(1 << 16):
                heard.extend(said)
                sink.sendall(said)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(pass_on, near, far)
        pool.submit(pass_on, far, near)
        yield heard


def plain_tls(listener: Listener, member: TlsSettings, version: ssl.TLSVersion) -> ssl.SSLSocket:
    """Connect as a TLS client that has no certificate and accepts any."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.maximum_version = version
    context.load_verify_locations(member.authority)
    return context.wrap_socket(open_raw(listener.address), do_handshake_on_connect=False)


def test_members_meet_whatever_their_certificates(listener: Listener, authority: Authority) -> None:
    other = client_with(authority.issue("another member"))
    with (
        closing(other.connect(listener.address, b"worker 3", timeout_s=30)) as client,
        closing(listener.accept(timeout_s=30)) as server,
    ):
        client.send(b"push", memoryview(b"gradient"), timeout_s=30)
        assert bytes(server.receive(timeout_s=30).body) == b"gradient"
        assert server.identity == b"worker 3"


def test_nothing_travels_in_the_clear(listener: Listener, member: TlsSettings) -> None:
    with raw_server() as (middle, address), ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client_with(member).connect, address, b"identity", timeout_s=30)
        with (
            middle.accept()[0] as near,
            open_raw(listener.address) as far,
            eavesdropping(near, far) as heard,
            closing(waiting.result()) as client,
            closing(listener.accept(timeout_s=30)) as server,
        ):
            client.send(b"header", memoryview(b"gradient" * 1000), timeout_s=30)
            assert server.receive(timeout_s=30).body[:8] == b"gradient"
    assert len(heard) > 8000
    assert not any(word in heard for word in (b"identity", b"header", b"gradient", b"PCLN"))


def test_server_of_another_authority_is_not_trusted(listener: Listener, stranger: TlsSettings) -> None:
    with pytest.raises(AuthenticationFailed, match=r"certificate of 127.* does not hold: .*authority in"):
        client_with(stranger).connect(listener.address, b"", timeout_s=30)
    assert none_was_admitted(listener)


def test_client_of_another_authority_is_refused_and_told(
    listener: Listener, member: TlsSettings, stranger: TlsSettings
) -> None:
    trusting = replace(stranger, authority=member.authority)
    with pytest.raises(AuthenticationFailed, match=r"refused the certificate in .*alert unknown ca.*signed by"):
        client_with(trusting).connect(listener.address, b"", timeout_s=30)
    assert none_was_admitted(listener)


def test_expired_certificate_of_the_server_does_not_hold(authority: Authority, member: TlsSettings) -> None:
    expired = authority.issue("expired-server", num_days=-1)
    with (
        closing(client_with(expired).listen("127.0.0.1:0")) as listener,
        pytest.raises(AuthenticationFailed, match=r"certificate has expired. Expected one that is valid now"),
    ):
        client_with(member).connect(listener.address, b"", timeout_s=30)


def test_expired_certificate_of_a_client_is_refused_and_told(listener: Listener, authority: Authority) -> None:
    with pytest.raises(AuthenticationFailed, match=r"alert certificate expired.*valid now"):
        client_with(authority.issue("expired-client", num_days=-1)).connect(listener.address, b"", timeout_s=30)
    assert none_was_admitted(listener)


def test_client_without_a_certificate_is_refused(listener: Listener, member: TlsSettings) -> None:
    with plain_tls(listener, member, ssl.TLSVersion.TLSv1_3) as client:
        client.do_handshake()
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            client.recv(1)
    assert none_was_admitted(listener)


def test_with_tls_any_address_will_do(member: TlsSettings) -> None:
    transport = client_with(member)
    with closing(transport.listen("0.0.0.0:0")) as listener:
        port = listener.address.rpartition(":")[2]
        with (
            closing(transport.connect(f"127.0.0.1:{port}", b"", timeout_s=30)) as client,
            closing(listener.accept(timeout_s=30)) as server,
        ):
            client.send(b"from afar", timeout_s=30)
            assert server.receive(timeout_s=30).header == b"from afar"


def test_older_tls_is_refused(listener: Listener, member: TlsSettings) -> None:
    with plain_tls(listener, member, ssl.TLSVersion.TLSv1_2) as client, pytest.raises(ssl.SSLError, match="VERSION"):
        client.do_handshake()
    assert none_was_admitted(listener)


def test_token_is_asked_for_inside(listener: Listener, member: TlsSettings) -> None:
    other = TcpTransport(Credentials(bytes(32), CREDENTIALS.job), tls=member)
    with pytest.raises(AuthenticationFailed, match="the token or the job"):
        other.connect(listener.address, b"", timeout_s=30)
    assert none_was_admitted(listener)


def test_client_without_tls_is_refused(listener: Listener) -> None:
    with pytest.raises(PeerError):
        client_with(None).connect(listener.address, b"", timeout_s=30)
    assert none_was_admitted(listener)


def test_server_without_tls_is_named(member: TlsSettings) -> None:
    with (
        closing(client_with(None).listen("127.0.0.1:0")) as listener,
        pytest.raises(PeerError, match="it may run without TLS"),
    ):
        client_with(member).connect(listener.address, b"", timeout_s=30)


def test_silent_client_is_closed_at_the_deadline(member: TlsSettings) -> None:
    transport = TcpTransport(CREDENTIALS, Limits(handshake_timeout_s=0.05), tls=member)
    with closing(transport.listen("127.0.0.1:0")) as listener, open_raw(listener.address) as client:
        assert read_to_end(client) == b""


def test_silent_server_does_not_hold_the_client(member: TlsSettings) -> None:
    with raw_server() as (_, address), pytest.raises(DeadlineExceeded, match="handshake"):
        client_with(member).connect(address, b"", timeout_s=0.05)


def test_frame_sent_in_part_ends_the_connection(member: TlsSettings) -> None:
    with closing(connect_pair(client_with(member), "127.0.0.1:0")) as pair:
        with pytest.raises(DeadlineExceeded, match=r"to take a frame; sent [1-9]\d* of"):
            pair.server.send(b"large", memoryview(bytes(64 << 20)), timeout_s=0.1)
        with pytest.raises(ConnectionLost, match="only in part"):
            pair.server.send(b"next", timeout_s=30)


def test_a_peer_that_has_tls_answer_without_end_loses_its_connection(member: TlsSettings) -> None:
    with closing(connect_pair(client_with(member), "127.0.0.1:0")) as pair:
        # As from forty thousand requests for new keys: each has an answer, which leaves with the next frame.
        cast("Any", pair.server)._channel._leaving.write(bytes(1 << 21))
        pair.client.send(b"more", timeout_s=30)
        with pytest.raises(PeerError, match="asks for new keys"):
            pair.server.receive(timeout_s=30)
        with pytest.raises(ConnectionLost, match="asks for new keys"):
            pair.server.send(b"next", timeout_s=30)


@pytest.mark.parametrize("header", ["X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_a_certificate_under_another_header_is_the_callers_mistake(
    member: TlsSettings, header: str, tmp_path: Path
) -> None:
    other = tmp_path / "other.pem"
    text = member.certificate.read_text()
    other.write_text(text.replace("BEGIN CERTIFICATE", f"BEGIN {header}").replace("END CERTIFICATE", f"END {header}"))
    with pytest.raises(UsageError, match=r"other.pem: expected a certificate in PEM format between -----BEGIN CERT"):
        client_with(replace(member, certificate=other))


@pytest.mark.parametrize("name", ["certificate", "key", "authority"])
def test_files_that_are_not_there_are_the_callers_mistake(member: TlsSettings, name: str, tmp_path: Path) -> None:
    settings = replace(member, **{name: tmp_path / "missing.pem"})
    with pytest.raises(UsageError, match=r"missing.pem.*No such file.*Expected a certificate"):
        client_with(settings)


def test_key_of_another_certificate_is_the_callers_mistake(member: TlsSettings, stranger: TlsSettings) -> None:
    with pytest.raises(UsageError, match="mismatch"):
        client_with(replace(member, key=stranger.key))


class RevokedMeanwhile:
    """A client's proof of the token, before which its certificate is revoked."""

    def __init__(self, revoked: Path) -> None:
        self._revoked = revoked
        self._proof = TokenHandshake(CREDENTIALS)

    def introduce(self, *said: Any, bound: bytes) -> HandshakeResult:
        self._revoked.write_text(f"{ANY}\n")
        return self._proof.introduce(*said, bound=bound)


def test_a_certificate_that_is_revoked_during_its_handshake_lets_nothing_in(
    member: TlsSettings, tmp_path: Path
) -> None:
    revoked = tmp_path / "revoked"
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    server = TcpTransport(CREDENTIALS, tls=replace(member, revoked=revoked), notice=told.put)
    client = client_with(member)
    client._handshake = TlsHandshake(member, cast("TokenHandshake", RevokedMeanwhile(revoked)), CREDENTIALS.job)
    with closing(server.listen("127.0.0.1:0")) as listener:
        with suppress(PeerError):  # it may learn it from the first word that it waits for
            client.connect(listener.address, b"late", timeout_s=30).close()
        assert "was revoked" in told.get(timeout=30)
        assert none_was_admitted(listener)
