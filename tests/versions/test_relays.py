"""Relays hand on the very bytes with the same digests, cost the trainer one reader, and may be killed at any time."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.data.service.feeders import until
from tests.jobs import Job, job
from tests.versions.relaying import PATIENCE_S, TOKEN, Relaying, RelayProcess, relay_process, relaying
from torch import Tensor

import paceline
from paceline.api.session import Session
from paceline.errors import AuthenticationFailed, ConnectionLost, DeadlineExceeded, PeerError, Refused, UsageError
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.job.credentials.key_store import issue_keys, make_keys
from paceline.transport.base import Connection, Frame
from paceline.transport.memory import MemoryTransport
from paceline.transport.tcp import TcpTransport
from paceline.versions.link import VersionNotThere
from paceline.versions.places import PublishingServers, VersionPlaces
from paceline.versions.relay import RelaySettings, VersionRelay
from paceline.versions.subscription import VersionSubscription
from paceline.wire.versions import CHUNK_BYTES, BytesFetched, decode

ADD = paceline.update.Add()
NUMEL = 5 * CHUNK_BYTES // 4 + 3  # of float32: two requests over tcp
NUM_READERS = 5


class Publisher:
    """A worker that publishes a table, and what each version has."""

    def __init__(self, started: Job, numel: int = 100) -> None:
        self.ps: Session = started.join(0)
        self.table = self.ps.table("w", shape=(numel,), update=ADD, init=torch.arange(float(numel)))
        self.values: dict[int, Tensor] = {}

    def publish(self, *, keep: int = 3) -> int:
        """Change a few elements, and publish them all."""
        some = torch.zeros_like(self.table.pull())
        some[[1, -2]] = 1.0
        self.table.push(some)
        number = self.ps.clock()
        self.values[number] = self.table.pull().clone()
        self.ps.models.publish(self.table, "w", keep=keep).wait()
        return number


@contextmanager
def publishing(directory: Path, *, servers: int = 1, numel: int = 100) -> Iterator[tuple[Job, Publisher]]:
    with job(directory, carrier="tcp", servers=servers) as started:
        started.spec.write(directory / CLUSTER_NAME)
        publisher = Publisher(started, numel)
        try:
            yield started, publisher
        finally:
            publisher.ps.close()


def of_job(started: Job, connected: list[int] | None = None) -> VersionPlaces:
    """The servers of a job, for a relay; `connected` gets the number of servers each time that they are found."""

    def find() -> PublishingServers:
        if connected is not None:
            connected.append(len(started.spec.addresses))
        return PublishingServers(started.transport, started.spec.addresses, role="relay")

    return VersionPlaces("the job", (find,))


class LosableJob:
    """The servers of a job, for a relay, until the line to them is cut."""

    def __init__(self, started: Job) -> None:
        self._started = started
        self._is_lost = False
        self.places = VersionPlaces("the job", (self._find,))

    def lose(self, relaying: Relaying) -> None:
        """Cut the lines of this relay to the servers; it finds no others."""
        self._is_lost = True
        for followed in relaying.relay._followed.values():
            for link in followed.subscription._servers.links:
                link.close()

    def _find(self) -> PublishingServers:
        if self._is_lost:
            raise PeerError("the test cut it")
        return PublishingServers(self._started.transport, self._started.spec.addresses, role="relay")


def reader_of(*addresses: object) -> VersionSubscription:
    return paceline.subscribe(list(addresses), name="w", token=TOKEN)


@pytest.mark.parametrize("servers", [1, 3])
def test_readers_of_a_relay_get_the_same_bytes_and_digests_and_cost_the_servers_one_reader(
    servers: int, tmp_path: Path
) -> None:
    connected = list[int]()
    with ExitStack() as opened:
        started, publisher = opened.enter_context(publishing(tmp_path, servers=servers, numel=NUMEL))
        first = opened.enter_context(relaying(of_job(started, connected), "w"))
        upstream = VersionPlaces("a relay", _finders(first.address, "relay"))
        second = opened.enter_context(relaying(upstream, "w"))  # which follows the first
        direct = opened.enter_context(paceline.subscribe(tmp_path, name="w"))
        readers = [opened.enter_context(reader_of(each.address)) for each in (first, second) * NUM_READERS]
        for _ in range(3):
            number = publisher.publish()
            digest = direct.wait(number, timeout_s=PATIENCE_S).digest
            received = list[int]()
            for reader in readers:
                version = reader.wait(number, timeout_s=PATIENCE_S)
                assert (version.number, version.digest) == (number, digest)
                assert torch.equal(version["w"], publisher.values[number])
                assert version.verify()
                received.append(version.received_bytes)
        assert all(0 < each < 10_000 for each in received), "what has changed, and no more"
        assert connected == [servers]


def _finders(address: str, role: str = "reader") -> tuple[Any, ...]:
    from paceline.serve.access import ClientCredentials
    from paceline.versions.places import find_places

    return find_places(address, ClientCredentials(TOKEN), role).finders  # pyright: ignore[reportArgumentType]


def test_a_relay_keeps_few_versions_and_those_that_readers_hold(tmp_path: Path) -> None:
    with ExitStack() as opened:
        started, publisher = opened.enter_context(publishing(tmp_path))
        relay = opened.enter_context(relaying(of_job(started), "w", keep=1, max_leased=2))
        reader = opened.enter_context(reader_of(relay.address))
        held = [reader.wait(publisher.publish(), timeout_s=PATIENCE_S) for _ in range(2)]
        assert reader.versions() == [1, 2]
        held += [reader.wait(publisher.publish(), timeout_s=PATIENCE_S) for _ in range(2)]
        until(lambda: reader.versions() == [2, 3, 4])  # version 1 was asked for least lately
        for number, version in enumerate(held, start=1):
            assert torch.equal(version["w"], publisher.values[number])
        with pytest.raises(VersionNotThere, match="no version 1 of 'w'"):
            reader.pull(1, timeout_s=PATIENCE_S)
        assert torch.equal(reader.pull(2)["w"], publisher.values[2])
        held[1].close()
        until(lambda: reader.versions() == [3, 4])


def test_a_relay_without_its_job_serves_what_it_has_and_says_what_it_waits_for(tmp_path: Path) -> None:
    with ExitStack() as opened:
        started, publisher = opened.enter_context(publishing(tmp_path))
        job = LosableJob(started)
        relay = opened.enter_context(relaying(job.places, "w"))
        reader = opened.enter_context(reader_of(relay.address))
        number = publisher.publish()
        assert reader.wait(number, timeout_s=PATIENCE_S).number == number
        job.lose(relay)
        why = ""
        while "a relay" not in why:  # until the relay takes its job for lost
            with pytest.raises(DeadlineExceeded, match=r"there is none yet; there are \[1\]") as late:
                reader.wait(timeout_s=1.0)
            why = str(late.value)
        assert "there are [1]. a relay does not reach the job: " in why
        with reader_of(relay.address) as other:
            assert torch.equal(other.latest(timeout_s=PATIENCE_S)["w"], publisher.values[number])
        assert any("'w' of the job is not reached, readers keep what is here" in line for line in relay.told)


def test_a_reader_of_a_relay_that_lost_its_job_goes_on_at_the_next_place(tmp_path: Path) -> None:
    with ExitStack() as opened:
        started, publisher = opened.enter_context(publishing(tmp_path))
        job = LosableJob(started)
        relay = opened.enter_context(relaying(job.places, "w"))
        other = opened.enter_context(relaying(of_job(started), "w"))
        reader = opened.enter_context(reader_of(relay.address, other.address))
        assert reader.wait(publisher.publish(), timeout_s=PATIENCE_S).number == 1
        job.lose(relay)
        number = publisher.publish()
        assert torch.equal(reader.wait(number, timeout_s=PATIENCE_S)["w"], publisher.values[number])


def test_a_relay_goes_on_where_memory_for_a_version_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.versions.relay._AGAIN_S", 0.0)
    told, places = list[str](), VersionPlaces("the test", ())
    listener = MemoryTransport().listen("memory://relay")
    relay = VersionRelay(listener, places, RelaySettings(("w",), 1, 1, "default"), lambda line, _: told.append(line))
    waited = iter([False, True])

    def wait(*, timeout_s: float) -> None:
        del timeout_s
        if not next(waited):
            raise OSError(12, "Cannot allocate memory")
        relay.stop()
        raise DeadlineExceeded("there is none")

    subscription = VersionSubscription("w", places)
    monkeypatch.setattr(subscription, "wait", wait)
    relay._follow(subscription)
    listener.close()
    assert told == ["'w' of the test is not handed on: OSError: [Errno 12] Cannot allocate memory"]


def test_a_publisher_whose_machine_has_its_clock_behind_is_not_taken_and_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes the place of one that published version 1 already."""
    folders = (tmp_path / "first", tmp_path / "second")
    with ExitStack() as opened:
        jobs = list[Job]()
        for folder, began_ns in zip(folders, (2, 1), strict=True):
            folder.mkdir()
            monkeypatch.setattr("paceline.worker.publishing.time.time_ns", lambda began_ns=began_ns: began_ns)
            started, publisher = opened.enter_context(publishing(folder))
            assert publisher.publish() == 1
            jobs.append(started)
        places = VersionPlaces("the job", (lambda: PublishingServers(jobs[0].transport, jobs[0].spec.addresses),))
        reader = opened.enter_context(VersionSubscription("w", places))
        assert reader.latest(timeout_s=PATIENCE_S).number == 1
        del jobs[0]
        for link in reader._servers.links:
            link.close()
        with pytest.raises(DeadlineExceeded, match=r"an earlier publisher only, up to 1, .* clock is behind"):
            reader.wait(timeout_s=1.0)
        assert "clock is behind" in reader.problem


def test_what_a_relay_does_not_hand_on_is_refused_with_a_reason(tmp_path: Path) -> None:
    with ExitStack() as opened:
        started, publisher = opened.enter_context(publishing(tmp_path))
        relay = opened.enter_context(relaying(of_job(started), "w"))
        reader = opened.enter_context(reader_of(relay.address))
        with pytest.raises(Refused, match="this relay of the job has no version yet"):
            reader.wait(timeout_s=5.0)
        publisher.publish()
        assert reader.wait(timeout_s=PATIENCE_S).number == 1
        with (
            paceline.subscribe(relay.address, name="v", token=TOKEN) as other,
            pytest.raises(Refused, match="hands on 'w', and not 'v': start it with --name v"),
        ):
            other.latest(timeout_s=5.0)
        with (
            paceline.subscribe(f"{relay.address}/x", name="w", token=TOKEN) as other,
            pytest.raises(Refused, match="hands on 'default', and not 'x'"),
        ):
            other.latest(timeout_s=5.0)
        with pytest.raises(UsageError, match="a relay hands on versions and no rows"):
            reader.table("rows", timeout_s=PATIENCE_S)
        with pytest.raises(AuthenticationFailed), paceline.subscribe(relay.address, name="w", token=b"x" * 32) as other:
            other.latest(timeout_s=PATIENCE_S)
        with pytest.raises(VersionNotThere, match=r"no version 7 of 'w' at .*, but 1"):
            reader.pull(7, timeout_s=PATIENCE_S)


class Line:
    """A connection that tells of each answer before it is received by the reader."""

    def __init__(self, inner: Connection, received: Any) -> None:
        self.inner = inner
        self.received = received

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def receive(self, **settings: Any) -> Frame:
        frame = self.inner.receive(**settings)
        self.received(decode(frame.header), frame)
        return frame


def test_a_relay_that_is_killed_in_the_middle_of_a_transfer_is_gone_on_from_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    relays, sizes = list[RelayProcess](), list[int]()
    connect = TcpTransport.connect

    def received(message: object, frame: Frame) -> None:
        if isinstance(message, BytesFetched):
            sizes.append(len(frame.body))
            if len(sizes) == 2:
                relays[0].kill()

    def watched(self: TcpTransport, *args: Any, **settings: Any) -> Any:
        return Line(connect(self, *args, **settings), received)

    with ExitStack() as opened:
        _, publisher = opened.enter_context(publishing(tmp_path, servers=2, numel=4 * NUMEL))
        number = publisher.publish()
        relays += [opened.enter_context(relay_process(str(tmp_path), "--name", "w")) for _ in range(2)]
        addresses = [each.address for each in relays]
        for address in addresses:
            with paceline.subscribe(address, name="w", token=tmp_path / "token") as reader:
                assert reader.latest(timeout_s=PATIENCE_S).number == number
        monkeypatch.setattr(TcpTransport, "connect", watched)
        with paceline.subscribe(addresses, name="w", token=tmp_path / "token") as reader:
            version = reader.latest(timeout_s=PATIENCE_S)
        assert relays[0].process.returncode == -signal.SIGKILL
        assert torch.equal(version["w"], publisher.values[number])
        assert version.verify()
        # What had come is not fetched again, but for the requests that were under way.
        assert 16 * NUMEL <= sum(sizes) <= 16 * NUMEL + 4 * 4 * CHUNK_BYTES
        relays[1].process.terminate()
        assert relays[1].process.wait(PATIENCE_S) == 0


class HeldLines:
    """Lines from a relay to a job, of which each stops after four chunks of a version, until `go` or `lose`."""

    maps_memory, name = False, "tcp"

    def __init__(self, started: Job) -> None:
        self.go = threading.Event()
        self.is_lost = False
        self._addresses = started.spec.addresses
        self._transport = started.transport

    def find(self) -> PublishingServers:
        """Return the servers of the job, for a relay."""
        self._require_there()
        return PublishingServers(self, self._addresses, role="relay")  # pyright: ignore[reportArgumentType]

    def lose(self) -> None:
        """Cut the lines; there are no others."""
        self.is_lost = True
        self.go.set()

    def _require_there(self) -> None:
        if self.is_lost:
            raise ConnectionLost("the test cut it")

    def connect(self, *args: Any, **settings: Any) -> Any:
        num_chunks = 0

        def received(message: object, _: Frame) -> None:
            nonlocal num_chunks
            num_chunks += isinstance(message, BytesFetched)
            if num_chunks == 5:
                assert self.go.wait(PATIENCE_S)
                self._require_there()

        return Line(self._transport.connect(*args, **settings), received)


def test_a_relay_hands_on_what_it_has_of_a_version_while_the_rest_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = TcpTransport.connect
    with ExitStack() as opened:
        started, publisher = opened.enter_context(publishing(tmp_path, numel=NUMEL))
        number = publisher.publish()
        lines = HeldLines(started)
        early = list[int]()

        def received(message: object, frame: Frame) -> None:
            is_reader = threading.current_thread() is threading.main_thread()  # and none of the relays
            if is_reader and isinstance(message, BytesFetched) and not lines.go.is_set():
                early.append(len(frame.body))
                lines.go.set()

        def watched(self: TcpTransport, *args: Any, **settings: Any) -> Any:
            return Line(connect(self, *args, **settings), received)

        first = opened.enter_context(relaying(VersionPlaces("the job", (lines.find,)), "w"))
        second = opened.enter_context(relaying(VersionPlaces("a relay", _finders(first.address, "relay")), "w"))
        monkeypatch.setattr(TcpTransport, "connect", watched)
        with reader_of(second.address) as reader:
            version = reader.wait(timeout_s=PATIENCE_S)
        assert early == [4 * CHUNK_BYTES], "through two relays, of which none had more"
        assert version.number == number
        assert torch.equal(version["w"], publisher.values[number])
        assert version.verify()


def test_a_version_that_comes_to_a_relay_no_further_is_gone_on_with_at_the_next_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, sizes = TcpTransport.connect, list[int]()
    with ExitStack() as opened:
        started, publisher = opened.enter_context(publishing(tmp_path, numel=NUMEL))
        number = publisher.publish()
        lines = HeldLines(started)

        def received(message: object, frame: Frame) -> None:
            if isinstance(message, BytesFetched) and threading.current_thread() is threading.main_thread():
                sizes.append(len(frame.body))
                if not lines.is_lost:
                    lines.lose()

        def watched(self: TcpTransport, *args: Any, **settings: Any) -> Any:
            return Line(connect(self, *args, **settings), received)

        first = opened.enter_context(relaying(VersionPlaces("the job", (lines.find,)), "w"))
        second = opened.enter_context(relaying(of_job(started), "w"))
        monkeypatch.setattr(TcpTransport, "connect", watched)
        with reader_of(first.address) as reader:
            assert reader.versions(timeout_s=PATIENCE_S) == [number]
        with reader_of(first.address, second.address) as reader:
            version = reader.wait(timeout_s=PATIENCE_S)
        assert version.number == number
        assert torch.equal(version["w"], publisher.values[number])
        assert sum(sizes) == 4 * NUMEL, "nothing is fetched twice"
        assert any("'w' of the job is not reached, readers keep what is here" in line for line in first.told)


def test_with_certificates_relays_and_readers_know_each_other_by_their_roles(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    for holder in (Holder("relay", 0), Holder("reader", 0), Holder("reader", 1)):
        issue_keys(keys, holder, tmp_path / str(holder))
    with ExitStack() as opened:
        (tmp_path / "job").mkdir()
        started, publisher = opened.enter_context(publishing(tmp_path / "job"))
        publisher.publish()
        token = (keys / "token").read_bytes()

        def serve(holder: Holder) -> str:
            tls = tls_settings(tmp_path / str(holder), holder)
            return opened.enter_context(relaying(of_job(started), "w", tls=tls, token=token)).address

        good, false = serve(Holder("relay", 0)), serve(Holder("reader", 1))
        with paceline.subscribe(good, name="w", keys=tmp_path / "reader-0") as reader:
            assert reader.latest(timeout_s=PATIENCE_S).verify()
        with (
            paceline.subscribe(false, name="w", keys=tmp_path / "reader-0") as reader,
            pytest.raises(
                AuthenticationFailed,
                match="should be a server or a relay, but its certificate is for reader-1",
            ),
        ):
            reader.latest(timeout_s=PATIENCE_S)
        with paceline.subscribe([false, good], name="w", keys=tmp_path / "reader-0") as reader:
            assert reader.latest(timeout_s=PATIENCE_S).verify()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (("run", "--keep", "0"), "--keep is 0, expected 1 to 64 versions"),
        (("run", "--leased", "9"), "--leased is 9, expected 1 to 8 versions"),
        (("paceline://127.0.0.1:1/a", "paceline://127.0.0.1:2/b"), "the addresses name several jobs, a, b"),
        (("paceline://127.0.0.1:1",), "refuses clients without its token"),
        (("absent",), "cannot read the job's token absent/token"),
        (("absent", "--listen", "0.0.0.0:0"), "`paceline keys issue KEYS reader-0 --out FOLDER`"),
    ],
)
def test_a_relay_that_cannot_begin_says_why_in_one_line(told: tuple[str, ...], said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "paceline", "relay", *told]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
