"""A certificate names its subject, and no other process can use what was proven with it."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue

import pytest
from tests.transport.carriers import CREDENTIALS
from tests.transport.wire import open_raw, raw_server, read_to_end

from paceline.errors import AuthenticationFailed, DeadlineExceeded, PeerError
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.transport import Listener, TcpTransport
from paceline.transport.base import NO_IDENTITY, PeerIdentity
from paceline.transport.handshake import MAX_TLS_HANDSHAKE_BYTES
from paceline.transport.peer_identity import read_identity

SERVER, WORKER, ANY = Holder("server", 0), Holder("worker", 3), Holder("any")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, authority = tmp_path_factory.mktemp("keys"), Authority.make(CREDENTIALS.job)
    for holder in (SERVER, WORKER, ANY):
        authority.issue(folder, holder)
    return folder


def carrier(keys: Path, holder: Holder, notice: Callable[[str], None] | None = None) -> TcpTransport:
    return TcpTransport(CREDENTIALS, tls=tls_settings(keys, holder), notice=notice)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def listener(keys: Path, told: list[str]) -> Iterator[Listener]:
    with closing(carrier(keys, SERVER, told.append).listen("127.0.0.1:0")) as listener:
        yield listener


def none_was_admitted(listener: Listener) -> bool:
    with pytest.raises(DeadlineExceeded):
        listener.accept(timeout_s=0)
    return True


def test_each_side_knows_the_identity_of_the_other(listener: Listener, keys: Path) -> None:
    with (
        closing(carrier(keys, WORKER).connect(listener.address, b"", timeout_s=30)) as client,
        closing(listener.accept(timeout_s=30)) as server,
    ):
        assert (client.peer_identity.holder, server.peer_identity.holder) == ("server-0", "worker-3")
        assert int(client.peer_identity.serial, 16) != int(server.peer_identity.serial, 16)


def test_without_tls_there_is_no_identity_and_any_name_is_permitted() -> None:
    transport = TcpTransport(CREDENTIALS)
    with (
        closing(transport.listen("127.0.0.1:0")) as listener,
        closing(transport.connect(listener.address, b"", timeout_s=30)) as client,
    ):
        listener.accept(timeout_s=30).close()
        assert client.peer_identity == NO_IDENTITY
        assert NO_IDENTITY.permit("worker", 3)


@pytest.mark.parametrize(
    ("holder", "permitted"),
    [("any", [True, True, True]), ("worker-3", [True, False, False]), ("server-3", [False, False, True])],
)
def test_an_identity_permits_what_it_names(holder: str, permitted: list[bool]) -> None:
    peer_identity = PeerIdentity(holder, "A1")
    assert [
        peer_identity.permit(role, rank) for role, rank in (("worker", 3), ("worker", 4), ("server", 3))
    ] == permitted


@pytest.mark.parametrize(
    ("name", "holder"),
    [
        ("paceline://contract/worker/3", "worker-3"),
        ("paceline://any/server/0", "server-0"),
        ("paceline://contract/any", "any"),
        ("https://member.example", "any"),
    ],
)
def test_names_in_certificates(name: str, holder: str) -> None:
    assert read_identity([name], "0a1b", "contract", "the client") == PeerIdentity(holder, "A1B")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["paceline://other/worker/3"], "for another job than 'contract'"),
        (["paceline://contract/king/3"], "does not name the process"),
        (["paceline://contract/worker/03"], "does not name the process"),
        (["paceline://contract/worker/3/../4"], "does not name the process"),
        (["paceline://contract/worker/-1"], "does not name the process"),
        (["paceline://contract/authority"], "does not name the process"),
        (["paceline://contract/worker/3", "paceline://contract/worker/4"], "does not name the process"),
    ],
)
def test_names_that_do_not_hold(names: list[str], message: str) -> None:
    with pytest.raises(AuthenticationFailed, match=message):
        read_identity(names, "0A", "contract", "the client")


def test_certificate_of_another_job_is_refused(listener: Listener, keys: Path, told: list[str], tmp_path: Path) -> None:
    """Even if the same authority had signed it."""
    authority = Authority.make("another")
    for holder in (SERVER, WORKER):
        authority.issue(tmp_path, holder)
    both = (keys / "authority.pem").read_bytes() + (tmp_path / "authority.pem").read_bytes()
    (tmp_path / "authority.pem").write_bytes(both)
    with pytest.raises(PeerError):
        carrier(tmp_path, WORKER).connect(listener.address, b"", timeout_s=30)
    assert none_was_admitted(listener)
    with closing(carrier(tmp_path, SERVER).listen("127.0.0.1:0")) as other, pytest.raises(PeerError):
        carrier(keys, WORKER).connect(other.address, b"", timeout_s=30)
    listener.close()  # a client is answered before its refusal is told; at the end everything is told
    assert "no certificate that holds here" in told[0]


def contexts(keys: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What a worker that was taken over can use to play a server, and to call one."""
    settings = tls_settings(keys, WORKER)
    made: list[ssl.SSLContext] = []
    for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT):
        context = ssl.SSLContext(protocol)
        context.check_hostname = False
        context.load_verify_locations(settings.authority)
        context.load_cert_chain(settings.certificate, settings.key)
        made.append(context)
    return made[0], made[1]


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while said := source.recv(4096):
            sink.sendall(said)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def test_a_proof_cannot_be_passed_on_by_a_process_in_between(listener: Listener, keys: Path, told: list[str]) -> None:
    """It has a certificate of the job, so both sides speak TLS with it; what it hears, it repeats to the other side."""
    playing, calling = contexts(keys)
    with raw_server() as (middle, address), ThreadPoolExecutor(3) as pool:
        client = pool.submit(carrier(keys, ANY).connect, address, b"", timeout_s=30)
        accepted, _ = middle.accept()
        with (
            playing.wrap_socket(accepted, server_side=True) as near,
            calling.wrap_socket(open_raw(listener.address)) as far,
        ):
            pool.submit(pass_on, near, far)
            pool.submit(pass_on, far, near)
            with pytest.raises(AuthenticationFailed, match="refused the proof of our token"):
                client.result()
    assert none_was_admitted(listener)
    listener.close()
    assert "did not prove that it belongs to this job" in told[0]


def test_before_the_proof_no_more_is_read_than_a_handshake_takes(
    listener: Listener, keys: Path, told: list[str]
) -> None:
    """First records that TLS has to take in whole, then rubbish inside TLS by a peer with a certificate."""
    with open_raw(listener.address) as client:
        record = b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + bytes(16379)
        with suppress(OSError):
            client.sendall(record * 40)
        read_to_end(client)
    _, calling = contexts(keys)
    with calling.wrap_socket(open_raw(listener.address)) as client, suppress(OSError):
        for _ in range(40):
            client.sendall(bytes(1024))
        while client.recv(100):
            pass
    assert none_was_admitted(listener)
    listener.close()
    assert len(told) == 2
    assert MAX_TLS_HANDSHAKE_BYTES == 16384


def test_files_that_were_renewed_are_used_at_the_next_handshake(keys: Path, tmp_path: Path) -> None:
    authority = Authority.make(CREDENTIALS.job)
    for holder in (SERVER, WORKER):
        authority.issue(tmp_path, holder)
    client = carrier(tmp_path, WORKER)
    with closing(carrier(tmp_path, SERVER).listen("127.0.0.1:0")) as listener:
        serials: list[str] = []
        for _ in range(2):
            with closing(client.connect(listener.address, b"", timeout_s=30)):
                with closing(listener.accept(timeout_s=30)) as accepted:
                    serials.append(accepted.peer_identity.serial)
                authority.issue(tmp_path, WORKER)
    assert len(set(serials)) == 2


def test_a_doubtful_clock_is_named(listener: Listener, tmp_path: Path) -> None:
    """A certificate that has expired: when it held, and what this machine takes for the time."""
    from benchmarks.wire_certificates import Authority as TrialAuthority

    trial = TrialAuthority(tmp_path)
    server, late = trial.issue("server"), trial.issue("late", num_days=-1)
    with (
        closing(TcpTransport(CREDENTIALS, tls=server).listen("127.0.0.1:0")) as other,
        pytest.raises(AuthenticationFailed, match=r"late.pem holds from .* until .* UTC; is the clock of this machine"),
    ):
        TcpTransport(CREDENTIALS, tls=late).connect(other.address, b"", timeout_s=30)
    with (
        closing(TcpTransport(CREDENTIALS, tls=late).listen("127.0.0.1:0")) as other,
        pytest.raises(AuthenticationFailed, match=r"has expired.*is the clock of this machine right\? It says 20"),
    ):
        TcpTransport(CREDENTIALS, tls=server).connect(other.address, b"", timeout_s=30)


def test_a_certificate_from_the_future_is_told_from_a_clock_that_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both by the side whose certificate it is and by the other one."""
    told: SimpleQueue[str] = SimpleQueue()
    authority = Authority.make(CREDENTIALS.job)
    authority.issue(tmp_path, SERVER)
    monkeypatch.setattr("paceline.job.credentials.certificates._CLOCKS_DIFFER", timedelta(days=-1))
    authority.issue(tmp_path, WORKER)
    with closing(carrier(tmp_path, SERVER, told.put).listen("127.0.0.1:0")) as server:
        with pytest.raises(
            AuthenticationFailed, match=r"worker-3.pem holds from .* until .* UTC; is the clock of this"
        ):
            carrier(tmp_path, WORKER).connect(server.address, b"", timeout_s=30)
        assert re.search("certificate is not yet valid.*; is the clock of this machine right", told.get(timeout=30))
    with (
        closing(carrier(tmp_path, WORKER).listen("127.0.0.1:0")) as early,
        pytest.raises(AuthenticationFailed, match=r"is not yet valid.*is the clock of this machine right\?"),
    ):
        carrier(tmp_path, SERVER).connect(early.address, b"", timeout_s=30)
