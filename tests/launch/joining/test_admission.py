"""A run and `paceline join`, by the connection between them: who is let in, what is said, and what its end means."""

from __future__ import annotations

import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from tests.launch.joining.hosting import (
    ELSEWHERE,
    WAIT_S,
    Host,
    address_of,
    hosting,
    launches,
    make_run,
    request,
)

from paceline.errors import (
    EXIT_PREEMPTED,
    AuthenticationFailed,
    CertificateRefused,
    ConnectionLost,
    PeerError,
    Refused,
    UsageError,
)
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.credentials.holders import KEYS_NAME, Holder, TokenFiles, link_keys
from paceline.job.credentials.key_store import issue_keys, make_keys
from paceline.job.machines import Machine
from paceline.job.spec import TOKEN_NAME, write_private
from paceline.launch.guard import clear
from paceline.launch.joining.admission import Joiner
from paceline.launch.joining.connection import RunConnection, find_run_address
from paceline.launch.joining.messages import (
    ADDRESS_NAME,
    JOB,
    JoinAccepted,
    JoinRequest,
    WorkerExited,
    WorkerOrder,
    WorkerTrace,
    encode,
)
from paceline.launch.rendezvous.liveness_lock import ProcessInfo
from paceline.transport.base import Connection
from paceline.transport.tcp import TcpTransport


@contextmanager
def connected(host: Host, keys: Path | None = None) -> Iterator[RunConnection]:
    """Connect as `paceline join` does: by the folder, or by the address with keys."""
    own = host.run_dir.parent / f"own-{secrets.token_hex(4)}"
    own.mkdir(mode=0o700)
    found = find_run_address(str(host.run_dir) if keys is None else address_of(host), 1, keys, own)
    with RunConnection(found) as run:
        yield run


def connect(host: Host) -> Connection:
    transport = TcpTransport(TokenFiles(host.run_dir, JOB))
    return transport.connect(host.admission.address, b"", timeout_s=WAIT_S)


class Answering:
    """Answers requests of a run from a thread of its own, as its supervisor does."""

    def __init__(self, host: Host, *ranks: int) -> None:
        self.joiners: list[Joiner] = []
        self.members: list[object] = []
        self.thread = threading.Thread(target=self.answer, args=(host, ranks))

    def answer(self, host: Host, ranks: tuple[int, ...]) -> None:
        [joiner] = host.wait_requests()
        self.joiners.append(joiner)
        self.members += joiner.admit(launches(*ranks)) if ranks else [joiner.refuse("no place is free")]

    def __enter__(self) -> Answering:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def wait_orders(run: RunConnection, news: threading.Event, num: int) -> list[WorkerOrder]:
    found: list[WorkerOrder] = []
    while len(found) < num:
        assert news.wait(WAIT_S)
        news.clear()
        found += run.orders()
    return found


def test_places_are_given_workers_are_told_what_to_do_and_their_ends_are_heard(tmp_path: Path) -> None:
    with hosting(tmp_path / "run") as host, connected(host) as run, Answering(host, 1, 3) as answering:
        accepted = run.ask(request(2))
        assert accepted == JoinAccepted((host.run_dir / CLUSTER_NAME).read_bytes(), ((1, 1), (3, 1)))
        answering.thread.join(WAIT_S)
        first, other = answering.members
        [joiner] = answering.joiners
        assert (joiner.num, joiner.origin, first.launch.origin) == (2, "machine elsewhere", "machine elsewhere")
        assert other.launch.title == "worker 3 from machine elsewhere"

        news = threading.Event()
        run.follow(news.set)
        first.signal(signal.SIGTERM)
        first.kill()
        other.signal(signal.SIGINT)
        expected = [WorkerOrder(1, "leave"), WorkerOrder(1, "kill"), WorkerOrder(3, "end")]
        assert wait_orders(run, news, 3) == expected
        assert (first.reap(), other.reap()) == (None, None)
        run.report(1, -9)
        assert host.wait_exit(joiner, 1) == first.reap() == -9
        run.report(3, 0)
        assert host.wait_exit(joiner, 3) == 0
    assert host.told == []


def test_on_the_machine_of_the_run_the_process_is_named(tmp_path: Path) -> None:
    with hosting(tmp_path / "run") as host, connected(host) as run, Answering(host, 1) as answering:
        run.ask(request(process=ProcessInfo.own()))
    assert [joiner.origin for joiner in answering.joiners] == ["process 4242"]


def test_workers_are_taken_for_killed_when_their_connection_ends_but_for_those_that_had_ended(tmp_path: Path) -> None:
    with hosting(tmp_path / "run") as host:
        connection = connect(host)
        with Answering(host, 1, 2) as answering:
            connection.send(encode(request(2)), timeout_s=WAIT_S)
        [joiner] = answering.joiners
        connection.send(encode(WorkerExited(2, 0)), timeout_s=WAIT_S)
        assert host.wait_exit(joiner, 2) == 0
        connection.close()
        assert host.wait_exit(joiner, 1) == -signal.SIGKILL
        assert joiner.exit_code(2) == 0
    [line] = host.told
    assert line.startswith("the connection to machine elsewhere, which has joined, has ended: ")


def test_places_in_which_nothing_was_started_are_left(tmp_path: Path) -> None:
    with hosting(tmp_path / "run") as host:
        with connected(host) as run, Answering(host, 1, 2) as answering:
            run.ask(request(2))
            run.report(2, 1)
        [joiner] = answering.joiners
        assert [host.wait_exit(joiner, rank) for rank in (1, 2)] == [EXIT_PREEMPTED, 1]
    assert host.told == []


def test_a_run_that_ends_is_out_of_reach(tmp_path: Path) -> None:
    news = threading.Event()
    with hosting(tmp_path / "run") as host:
        own = tmp_path / "own"
        run = RunConnection(find_run_address(str(host.run_dir), 1, None, own))
        with Answering(host, 1):
            run.ask(request())
        run.follow(news.set)
        host.admission.__exit__()
        assert news.wait(WAIT_S)
        assert "is over" in run.lost
        with run:
            run.report(1, 0)  # no one hears it


OLD = ProcessInfo(Machine("elsewhere"), "0.0.1")


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (request(program="b" * 64), "its script is not the one that the run was started with"),
        (request(process=OLD), "on elsewhere runs paceline 0.0.1, and this process on"),
    ],
)
def test_a_process_that_does_not_fit_is_refused_whatever_places_there_are(
    tmp_path: Path, asked: JoinRequest, says: str
) -> None:
    with hosting(tmp_path / "run") as host, connected(host) as run:
        with pytest.raises(Refused, match=r"the run in \S+ takes no worker: ") as refused:
            run.ask(asked)
        assert says in str(refused.value)
        assert host.admission.requested() == []


def test_any_program_may_join_that_says_none(tmp_path: Path) -> None:
    with hosting(tmp_path / "run") as host, connected(host) as run, Answering(host) as answering:
        with pytest.raises(Refused, match="takes no worker: no place is free"):
            run.ask(request(program=""))
        answering.thread.join(WAIT_S)
        assert len(answering.joiners) == 1


MALFORMED = (
    b"",
    b"\x00",
    b"\xc1" * 1000,
    encode(WorkerExited(1, 0)),
    encode(WorkerOrder(1, "kill")),
    encode(request(process=ProcessInfo(Machine("x\x1b[2J"), ELSEWHERE.version))),
    encode(request(process=ProcessInfo(Machine("x" * 300), ELSEWHERE.version))),
    encode(request(num=0)),
    encode(request(num=1 << 20)),
    encode(msgspec.structs.replace(request(), ranks=(1 << 20,))),
    encode(msgspec.structs.replace(request(), program="a" * 65)),
    encode(request(process=ProcessInfo(ELSEWHERE.machine, "x" * ((1 << 20) - 200)))),
    encode(request())[:-1],
    encode(request()) + b"\x00",
)


@pytest.mark.parametrize("header", MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_request_ends_the_connection(tmp_path: Path, header: bytes) -> None:
    with hosting(tmp_path / "run") as host:
        connection = connect(host)
        connection.send(header, timeout_s=WAIT_S)
        with pytest.raises(ConnectionLost):
            connection.receive(timeout_s=WAIT_S)
        connection.close()
        assert host.admission.requested() == []
        with connected(host) as run, Answering(host, 1):  # it goes on
            run.ask(request())
    assert host.told == []


@pytest.mark.parametrize(
    "header",
    [
        encode(WorkerExited(2, 0)),
        encode(request()),
        b"\xc1",
        encode(WorkerExited(1, 256)),
        encode(WorkerExited(1, -256)),
        encode(WorkerTrace(1, 0.0, b'{"kind":"step"}\n')),
    ],
    ids=["a place of others", "a second request", "no message", "no exit code", "no signal", "no record"],
)
def test_a_worker_is_taken_for_killed_whose_launcher_says_what_means_nothing(tmp_path: Path, header: bytes) -> None:
    with hosting(tmp_path / "run") as host:
        connection = connect(host)
        with Answering(host, 1) as answering:
            connection.send(encode(request()), timeout_s=WAIT_S)
        connection.send(header, timeout_s=WAIT_S)
        assert host.wait_exit(answering.joiners[0], 1) == -signal.SIGKILL
        connection.close()
    assert len(host.told) == 1


def test_frames_are_small(tmp_path: Path) -> None:
    with hosting(tmp_path / "run") as host:
        connection = connect(host)
        connection.send(encode(request()), memoryview(bytes(1)), timeout_s=WAIT_S)
        with pytest.raises(ConnectionLost):
            connection.receive(timeout_s=WAIT_S)
        connection.close()


@pytest.mark.parametrize(
    "header",
    [b"\xc1", encode(JoinAccepted(b"", ())), encode(WorkerOrder(1, "kill")), encode(request())],
    ids=["no message", "no places", "an order", "a request"],
)
def test_a_run_that_answers_what_means_nothing_is_not_joined(tmp_path: Path, header: bytes) -> None:
    with hosting(tmp_path / "run") as host, connected(host) as run:
        answer = threading.Thread(target=lambda: host.wait_requests()[0]._connection.send(header, timeout_s=WAIT_S))
        answer.start()
        with pytest.raises(PeerError):
            run.ask(request())
        answer.join(WAIT_S)


def test_another_token_is_not_let_in(tmp_path: Path) -> None:
    with hosting(tmp_path / "run") as host:
        make_run(tmp_path / "other")
        write_private(tmp_path / "other" / TOKEN_NAME, secrets.token_bytes(32))
        write_private(tmp_path / "other" / ADDRESS_NAME, host.admission.address.encode())
        with pytest.raises(AuthenticationFailed, match=r"the run in \S+ does not let this process in"):
            RunConnection(find_run_address(str(tmp_path / "other"), 1, None, tmp_path))
        assert host.admission.requested() == []


@pytest.mark.parametrize(("name", "ranks"), [("any", (0, 1, 2, 3)), ("worker-2", (2,))])
def test_a_certificate_is_for_its_own_places(tmp_path: Path, name: str, ranks: tuple[int, ...]) -> None:
    keys, issued = tmp_path / "keys", tmp_path / "issued"
    make_keys(keys)
    issue_keys(keys, Holder.parse(name), issued)
    with hosting(tmp_path / "run", keys) as host, connected(host, issued) as run, Answering(host, 2) as answering:
        run.ask(msgspec.structs.replace(request(), ranks=None if name == "any" else (2,)))
        answering.thread.join(WAIT_S)
        [joiner] = answering.joiners
        permitted = tuple(launch.rank for launch in launches(0, 1, 2, 3) if joiner.permits(launch))
        assert permitted == ranks


@pytest.mark.parametrize("role", ["server-0", "data-0"])
def test_a_certificate_that_is_for_no_worker_is_refused(tmp_path: Path, role: str) -> None:
    keys, issued = tmp_path / "keys", tmp_path / "issued"
    make_keys(keys)
    issue_keys(keys, Holder.parse(role), issued)
    for suffix in ("pem", "key"):  # as if it were a worker's
        (issued / f"{role}.{suffix}").rename(issued / f"worker-1.{suffix}")
    with hosting(tmp_path / "run", keys) as host, connected(host, issued) as run:
        with pytest.raises(Refused, match=f"its certificate is for {role}, and not for a worker"):
            run.ask(request())
        assert host.admission.requested() == []


@pytest.mark.parametrize(
    ("snapshots", "shares_folder", "may"),
    [("snapshots", False, False), ("snapshots", True, True), ("", False, True)],
)
def test_worker_0_has_the_folder_of_snapshots(tmp_path: Path, snapshots: str, shares_folder: bool, may: bool) -> None:
    with (
        hosting(tmp_path / "run", snapshots=snapshots) as host,
        connected(host) as run,
        Answering(host, 1) as answering,
    ):
        run.ask(msgspec.structs.replace(request(), shares_folder=shares_folder))
    zero, one = launches(0, 1)
    assert [answering.joiners[0].permits(each) for each in (zero, one)] == [may, True]


def test_what_a_revoked_certificate_has_started_is_taken_for_killed(tmp_path: Path) -> None:
    keys, issued = tmp_path / "keys", tmp_path / "issued"
    make_keys(keys)
    issue_keys(keys, Holder("worker", 2), issued)
    with hosting(tmp_path / "run", keys) as host, connected(host, issued) as run, Answering(host, 2) as answering:
        run.ask(request())
        answering.thread.join(WAIT_S)
        host.admission.expel({"worker-1"})
        assert answering.joiners[0].exit_code(2) is None
        host.admission.expel({"worker-1", "worker-2"})
        assert host.wait_exit(answering.joiners[0], 2) == -signal.SIGKILL


def test_keys_of_another_authority_are_not_let_in(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "others")
    (tmp_path / "own").mkdir()
    with hosting(tmp_path / "run", tmp_path / "keys") as host:
        found = find_run_address(address_of(host), 1, tmp_path / "others", tmp_path / "own")
        with pytest.raises(CertificateRefused, match="Join with the keys that the run was given as --keys"):
            RunConnection(found)


def test_keys_are_linked_and_stay_when_the_folder_of_the_job_is_cleared(tmp_path: Path) -> None:
    keys, folder = tmp_path / "keys", tmp_path / "run"
    make_keys(keys)
    before = {path: path.read_bytes() for path in keys.iterdir() if path.is_file()}
    for temporary in (False, True):
        folder.mkdir(mode=0o700)
        link_keys(keys, folder)
        assert (folder / TOKEN_NAME).read_bytes() == (keys / TOKEN_NAME).read_bytes()
        assert not (folder / KEYS_NAME / "authority.key").exists()
        clear(folder, temporary=temporary)
        assert {path: path.read_bytes() for path in keys.iterdir() if path.is_file()} == before
        if not temporary:
            assert list(folder.rglob("*")) == [folder / KEYS_NAME]
            (folder / KEYS_NAME).rmdir()
            folder.rmdir()


@pytest.mark.parametrize(
    ("text", "keys", "says"),
    [
        ("nowhere", None, "'nowhere' is neither the folder of a run on this machine nor HOST:PORT"),
        ("127.0.0.1:1", None, "which lets in who has a certificate of its authority: give --keys FOLDER"),
        (".", None, "cannot read the cluster spec"),
    ],
)
def test_what_is_no_run_is_said(tmp_path: Path, text: str, keys: Path | None, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        find_run_address(str(tmp_path) if text == "." else text, 1, keys, tmp_path)


def test_a_run_whose_workers_stay_and_one_that_has_ended_are_said(tmp_path: Path) -> None:
    make_run(tmp_path / "fixed", num_at_start=0)
    with pytest.raises(UsageError, match="keeps its 4 workers: start it with --workers 4:5, for example"):
        find_run_address(str(tmp_path / "fixed"), 1, None, tmp_path)
    make_run(tmp_path / "ended")
    with pytest.raises(UsageError, match="does not listen for workers that join: has it ended"):
        find_run_address(str(tmp_path / "ended"), 1, None, tmp_path)
    with pytest.raises(UsageError, match="which has its keys: leave out --keys"):
        find_run_address(str(tmp_path / "ended"), 1, tmp_path, tmp_path)


def test_keys_without_a_certificate_of_a_worker_are_said(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    issue_keys(tmp_path / "keys", Holder("server", 1), tmp_path / "issued")
    (tmp_path / "own").mkdir()
    with pytest.raises(UsageError, match="has no certificate for a worker: have one made where the keys were made"):
        find_run_address("127.0.0.1:1", 1, tmp_path / "issued", tmp_path / "own")


def test_where_no_run_listens_is_said(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    write_private(tmp_path / "run" / TOKEN_NAME, secrets.token_bytes(32))
    write_private(tmp_path / "run" / ADDRESS_NAME, b"tcp://127.0.0.1:1")
    with pytest.raises(
        PeerError, match=r"cannot reach the run in \S+: no listener at 127.0.0.1:1.* Does the run go on\?"
    ):
        RunConnection(find_run_address(str(tmp_path / "run"), 1, None, tmp_path))
