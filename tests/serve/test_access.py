"""Which clients a server of its own admits, and what the others are told: where, and what to do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal
from unittest.mock import Mock

import pytest
from tests.serve.daemon import JOIN_S, Daemon, daemon

import paceline
from paceline.errors import (
    AuthenticationFailed,
    CertificateRefused,
    ConnectionLost,
    DeadlineExceeded,
    PeerError,
    Refused,
    UsageError,
)
from paceline.job.credentials.holders import Holder
from paceline.job.credentials.key_store import issue_keys, make_keys, revoke
from paceline.serve.access import ClientCredentials, ServeUrl, server_access
from paceline.serve.client import enter_namespace
from paceline.serve.gateway import Namespaces
from paceline.serve.messages import EnterAccepted, EnterFrame, EnterRefused, EnterRequest, encode
from paceline.transport.base import EMPTY, Connection, PeerIdentity
from paceline.version import __version__
from paceline.wire.messages import Hello
from paceline.wire.messages import encode as encode_node

TOKEN = bytes(range(32))


@contextmanager
def told_in_time(error: type[Exception], match: str) -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(error, match=match):
        yield
    assert time.monotonic() - began < 20.0  # 5 s, and a machine that is busy


def test_a_token_is_needed_and_the_right_one(served: Daemon) -> None:
    with told_in_time(AuthenticationFailed, rf"{served.address('x')} does not let this client in.*the file `token`"):
        served.connect("x", token=TOKEN)
    with told_in_time(UsageError, "refuses clients without its token: give token="):
        served.connect(token=None)
    with told_in_time(UsageError, r"cannot read the token of paceline://.*nowhere: No such file"):
        served.connect(token=served.state / "nowhere")
    with told_in_time(UsageError, "has 0 bytes, expected 32: it is not a token"):
        (served.state / "empty").touch()
        served.connect(token=str(served.state / "empty"))
    with served.connect(token=(served.state / "token").read_bytes()) as ps:
        assert ps.rank == 0
    assert (served.state / "token").stat().st_mode & 0o777 == 0o600


def test_a_missing_server_is_told_with_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.serve.client.CONNECT_TIMEOUT_S", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with told_in_time(PeerError, rf"cannot reach paceline://127.*:{port}/a: no listener .*`paceline serve`"):
            paceline.connect(f"paceline://127.0.0.1:{port}/a", token=TOKEN)
        with told_in_time(PeerError, rf"cannot reach paceline://localhost:{port}/default: no listener"):
            paceline.connect(f"paceline://localhost:{port}", token=TOKEN)
        taken.listen()
        with told_in_time(DeadlineExceeded, rf"paceline://127\.0\.0\.1:{port}/a does not answer: waited .* s for the"):
            paceline.connect(f"paceline://127.0.0.1:{port}/a", token=TOKEN)


def test_a_fault_at_the_gateway_is_told_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    with daemon(tmp_path / "state") as served:
        monkeypatch.setattr("paceline.serve.gateway.encode", fail)
        with told_in_time(ConnectionLost, rf"{served.address('a')} has not said whether it lets this client in: "):
            served.connect("a")
    assert "RuntimeError: a fault of ours" in capsys.readouterr().err


def talk(connection: Connection, header: bytes, body: memoryview) -> None:
    with closing(connection):
        connection.send(header, body, timeout_s=30)
        connection.receive(timeout_s=30)


def test_a_client_that_sends_rubbish_is_cut_off_and_others_are_served(served: Daemon) -> None:
    transport = (
        ClientCredentials(token=served.state / "token").access(ServeUrl.parse(served.address()), None).transport()
    )
    nonsense = [
        (b"", b"", EMPTY),
        (b"\xff" * 99, b"", EMPTY),
        (encode(EnterFrame("absent", b"hello")), b"?", EMPTY),
        (encode(EnterFrame("default")), b"", EMPTY),
        (encode(EnterFrame("default")), b"?", memoryview(bytes(1000))),
        (encode(EnterRefused("you")), b"", EMPTY),
    ]
    for identity, header, body in nonsense:
        connection = transport.connect(f"tcp://127.0.0.1:{served.port}", identity, timeout_s=30)
        with pytest.raises(ConnectionLost):
            talk(connection, header, body)
    with served.connect() as ps:
        assert ps.rank == 0
    assert served.told.lines == []


def test_silent_holders_of_the_token_keep_no_client_waiting(served: Daemon) -> None:
    transport = (
        ClientCredentials(token=served.state / "token").access(ServeUrl.parse(served.address()), None).transport()
    )
    with ExitStack() as clients:
        for number in range(80):
            visit = (
                EnterFrame("default") if number % 2 else EnterFrame("default", ask=EnterRequest(None, 3, __version__))
            )
            silent = transport.connect(f"tcp://127.0.0.1:{served.port}", encode(visit), timeout_s=30)
            clients.enter_context(closing(silent))
        began = time.monotonic()
        with served.connect("other") as ps:
            assert ps.rank == 0
        assert time.monotonic() - began < 20.0  # before it was half a minute


def test_clients_of_a_namespace_that_answers_none_keep_those_of_others_from_nothing(
    served: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, is_over, admit = served.state / "token", threading.Event(), Namespaces.admit

    def admit_late(namespaces: Namespaces, name: str, ask: EnterRequest, identity: PeerIdentity) -> EnterAccepted:
        if name == "slow":
            is_over.wait(JOIN_S)
        return admit(namespaces, name, ask, identity)

    monkeypatch.setattr(Namespaces, "admit", admit_late)
    transport = ClientCredentials(token=key).access(ServeUrl.parse(served.address()), None).transport()
    visit = encode(EnterFrame("slow", ask=EnterRequest(None, None, __version__)))
    with ExitStack() as clients:
        clients.callback(is_over.set)
        for _ in range(80):
            clients.enter_context(closing(transport.connect(f"tcp://127.0.0.1:{served.port}", visit, timeout_s=30)))
        with served.connect("other") as ps:
            assert ps.rank == 0


def test_a_client_whose_certificate_is_revoked_after_its_handshake_is_not_admitted(tmp_path: Path) -> None:
    keys, third = tmp_path / "keys", tmp_path / "third"
    make_keys(keys)
    issue_keys(keys, Holder("worker", 3), third)
    with daemon(tmp_path / "state", keys) as served:
        served.namespaces.expel({"worker-3"})  # no file says so to the handshake
        with told_in_time(PeerError, r"its certificate \(worker-3, [0-9A-F]+\) was revoked"):
            served.connect(token=None, keys=third)
        transport = ClientCredentials(keys=third).access(ServeUrl.parse(served.address()), None).transport()
        hello = encode_node(Hello("worker", 3, 0, 1))
        visit = encode(EnterFrame("default", hello))
        with (
            served.connect(token=None, keys=keys),
            closing(transport.connect(f"tcp://127.0.0.1:{served.port}", visit, timeout_s=30)) as late,
            pytest.raises(ConnectionLost),
        ):
            late.receive(timeout_s=30)
        served.namespaces.expel(set())
        with served.connect(token=None, keys=third) as ps:
            assert ps.rank == 3


@pytest.mark.parametrize("role", ["reader", "relay"])
def test_a_certificate_that_reads_does_not_train(role: Literal["reader", "relay"], tmp_path: Path) -> None:
    keys, own = tmp_path / "keys", tmp_path / "own"
    make_keys(keys)
    issue_keys(keys, Holder(role, 0), own)
    with daemon(tmp_path / "state", keys) as served:
        url = ServeUrl.parse(served.address())
        access = ClientCredentials(keys=own).access(url, None, role)
        with pytest.raises(Refused, match=f"its certificate is for {role}-0, which may read what is published"):
            enter_namespace(url, access, None, None)


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("tcp://127.0.0.1:7700", r"expected paceline://HOST:PORT/NAME"),
        ("127.0.0.1:7700", r"expected paceline://HOST:PORT/NAME"),
        ("paceline://127.0.0.1", r"is not HOST:PORT"),
        ("paceline://::1:7700", r"with an address of IPv6, \[::1\]:7700"),
        ("paceline://127.0.0.1:70000/a", r"is not HOST:PORT"),
        ("paceline://10.0.0.1:7700/a", r"is on another machine.*keys=FOLDER.*or ca="),
    ],
)
def test_an_address_that_makes_no_sense_is_refused_at_once(address: str, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        paceline.connect(address, token=TOKEN)


def test_settings_that_do_not_belong_together_are_refused() -> None:
    address = "paceline://127.0.0.1:7700"
    with pytest.raises(UsageError, match="are for an address"):
        paceline.connect(rank=1)
    with pytest.raises(UsageError, match="are for launched jobs"):
        paceline.connect(address, servers="first:1")
    with pytest.raises(UsageError, match="give either keys="):
        paceline.connect(address, keys="a", ca="b")
    with pytest.raises(UsageError, match="belong together"):
        paceline.connect(address, token=TOKEN, ca="b")
    with pytest.raises(UsageError, match="rank is -1, expected 0"):
        paceline.connect(address, token=TOKEN, rank=-1)
    with pytest.raises(UsageError, match="workers is 0, expected 1"):
        paceline.connect(address, token=TOKEN, workers=0)


def test_a_name_without_an_address_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr("paceline.serve.client.CONNECT_TIMEOUT_S", 0.3)
    with told_in_time(UsageError, "no address is known for the host 'absent'"):
        make_keys(tmp_path / "keys")
        paceline.connect("paceline://absent:7700", keys=tmp_path / "keys")


def test_where_other_machines_come_certificates_are_demanded_and_say_which_worker_it_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"(?s)0\.0\.0\.0 is not a loopback address.*paceline keys make.*--keys KEYS"):
        server_access("0.0.0.0", tmp_path, None)
    keys, third, foreign = tmp_path / "keys", tmp_path / "third", tmp_path / "foreign"
    make_keys(keys)
    make_keys(foreign)
    issue_keys(keys, Holder("worker", 3), third)
    token = keys / "token"
    with daemon(tmp_path / "state", keys) as served:
        with served.connect(token=None, keys=keys) as ps:
            assert ps.rank == 0
            with served.connect(keys=third, token=None) as other:
                assert other.rank == 3
            ca, certificate, key = third / "authority.pem", third / "worker-3.pem", third / "worker-3.key"
            with served.connect(token=token, ca=ca, certificate=certificate, key=key) as other:
                assert other.rank == 3
        with told_in_time(PeerError, r"cannot reach .*does it listen without --keys"):
            served.connect(token=token)
        with told_in_time(AuthenticationFailed, "the certificate of .* does not hold"):
            served.connect(token=token, keys=foreign)
        revoke(keys, "worker-3")
        with told_in_time(PeerError, "or the certificate was revoked"):
            served.connect(token=token, keys=third)
        served.told.wait("(worker-3, ")


@pytest.mark.parametrize("name", ["", "any.key", "authority.key", "token"])
def test_a_server_does_not_start_with_keys_that_others_can_get_at(tmp_path: Path, name: str) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    (keys / name).chmod(0o777 if name == "" else 0o644)
    with pytest.raises(
        UsageError, match=rf"{keys / name} has mode 0\d+ and owner .*chmod {700 if name == '' else 600}"
    ):
        server_access("127.0.0.1", tmp_path, keys)
    (keys / name).chmod(0o700 if name == "" else 0o600)
    assert server_access("127.0.0.1", tmp_path, keys).tls is not None


def test_a_server_does_not_start_with_a_token_that_others_can_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    server_access("127.0.0.1", tmp_path, None)
    (tmp_path / "token").chmod(0o666)
    with pytest.raises(UsageError, match=r"token has mode 0666 .*chmod 600"):
        server_access("127.0.0.1", tmp_path, None)


@pytest.mark.parametrize(
    ("days", "problem"), [(-400, "holds from"), (60, "holds from"), (-24, "holds for 5 days more")]
)
def test_a_server_does_not_start_with_certificates_that_do_not_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: int, problem: str
) -> None:
    """As if the keys had been made so many days ago, or in the future."""
    keys, told = tmp_path / "keys", list[str]()
    made = datetime.now(UTC) + timedelta(days=days, hours=-12)
    monkeypatch.setattr("paceline.job.credentials.certificates.datetime", Mock(now=lambda _: made))
    make_keys(keys)
    if "more" in problem:
        server_access("127.0.0.1", tmp_path, keys, told.append)
        assert len(told) == 1
        assert problem in told[0]
        return
    with pytest.raises(UsageError, match=rf"{problem} \d{{4}}-.*and the clock of this machine says"):
        server_access("127.0.0.1", tmp_path, keys, told.append)


def test_what_is_wrong_with_a_certificate_is_not_blamed_on_the_token(tmp_path: Path) -> None:
    keys, foreign = tmp_path / "keys", tmp_path / "foreign"
    make_keys(keys)
    make_keys(foreign)
    with daemon(tmp_path / "state", keys) as served:
        with pytest.raises(CertificateRefused) as caught:
            served.connect(token=keys / "token", keys=foreign)
        assert "token" not in str(caught.value)


def test_a_folder_without_a_certificate_for_this_rank_is_told(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    issue_keys(tmp_path / "keys", Holder("worker", 2), tmp_path / "issued")
    for rank, folder, said in (
        (
            0,
            "issued",
            r"issued has no certificate for worker-0, only for worker-2: give the rank .*issue KEYS worker-0 ",
        ),
        (3, "none", r"none has no certificate for worker-3, nor for any worker: "),
        (None, "none", r"none has no certificate for any, nor for any worker: "),
    ):
        with pytest.raises(UsageError, match=said):
            paceline.connect("paceline://node-3:7700/a", token=TOKEN, keys=tmp_path / folder, rank=rank)
