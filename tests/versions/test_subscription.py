"""Readers of what workers publish: they get the very bytes, hold up no worker, and find what was kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.jobs import Job, job
from tests.serve.daemon import daemon
from tests.versions.publishing import wait_seen
from torch import Tensor, nn

import paceline
from paceline.api.session import Session
from paceline.errors import DeadlineExceeded, UsageError
from paceline.job.addresses import CLUSTER_NAME
from paceline.server import versions as server_versions
from paceline.transport.deadline import Deadline
from paceline.versions.contents import digest_of_version
from paceline.versions.link import ReaderLink, VersionNotThere
from paceline.versions.places import PublishingServers
from paceline.versions.subscription import Version

PATIENCE_S = 60.0
ADD = paceline.update.Add()


@contextmanager
def readable(directory: Path, **settings: object) -> Iterator[Job]:
    """A job whose folder says where its servers are, as the launcher's does."""
    with job(directory, **settings) as started:  # pyright: ignore[reportArgumentType]
        started.spec.write(directory / CLUSTER_NAME)
        yield started


def a_model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(5, 40), nn.BatchNorm1d(40), nn.Linear(40, 3))


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def equal(version: Version, state: dict[str, Tensor]) -> bool:
    return version.keys() == state.keys() and all(torch.equal(version[name], state[name]) for name in state)


@pytest.mark.parametrize(("carrier", "servers"), [("shm", 1), ("shm", 3), ("tcp", 2), ("tls", 1)])
def test_a_reader_gets_the_bytes_that_the_worker_had_at_that_clock(carrier: str, servers: int, tmp_path: Path) -> None:
    published: dict[int, dict[str, Tensor]] = {}

    def work(ps: Session) -> None:
        model = a_model()
        optimizer = paceline.distributed(torch.optim.Adam(model.parameters()), model=model)
        for step in range(5):
            torch.manual_seed(10 * step + ps.rank)
            optimizer.zero_grad()
            model(torch.randn(8, 5)).square().mean().backward()
            optimizer.step()
            made = paceline.publish(model, keep=3)
            assert (made is None) == (ps.rank > 0)
            if made is not None:
                published[made.number] = state_of(model)
                wait_seen(ps, made)

    def read() -> None:
        with paceline.subscribe(tmp_path) as reader:
            newest = reader.wait(5, timeout_s=PATIENCE_S)
            assert (newest.number, reader.versions()) == (5, [3, 4, 5])
            assert newest.is_mapped == (carrier == "shm")
            for number in (3, 4, 5):
                with reader.pull(number) as version:
                    assert version.verify()
                    assert equal(version, published[number])
            with pytest.raises(VersionNotThere, match=r"no version 2 of 'policy' at .*, but 3, 4, 5"):
                reader.pull(2)

    with readable(tmp_path, workers=2, servers=servers, carrier=carrier) as started:
        started.run(work)
        read()


def test_what_a_reader_writes_to_mapped_memory_stays_with_it_and_is_noticed(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(5000,), update=ADD)
        w.push(torch.ones(5000))
        ps.clock()
        ps.models.publish(w, "w").wait()
        with paceline.subscribe(tmp_path, name="w") as reader:
            version = reader.wait(1, timeout_s=PATIENCE_S)
            link = ReaderLink(PublishingServers(started.transport, started.spec.addresses), 0, PATIENCE_S)
            assert not link.lease(version.id).digests, "as bytes that are mapped need none"
            link.maps = False
            digest = digest_of_version([link.lease(version.id)])
            link.close()
            assert (version.is_mapped, version.digest, version.verify()) == (True, digest, True)
            version["w"][0] = 7.0
            assert (version.digest, version.verify()) == (digest, False)
            with paceline.subscribe(tmp_path, name="w") as another:
                assert torch.equal(another.latest()["w"], torch.ones(5000))

    with readable(tmp_path, carrier="shm") as started:
        started.run(work)


def test_a_reader_waits_for_the_next_version_and_takes_no_part_in_clocks(tmp_path: Path) -> None:
    with readable(tmp_path, carrier="shm") as started, paceline.subscribe(tmp_path, name="w") as reader:
        came, seen = threading.Semaphore(0), list[int]()

        def read() -> None:
            for _ in range(3):
                seen.append(reader.wait(timeout_s=PATIENCE_S).number)
                came.release()

        def work(ps: Session) -> None:
            w = ps.table("w", shape=(3,), update=ADD)
            for _ in range(3):
                w.push([1.0, 2.0, 3.0])
                ps.clock()  # under bsp, with a reader that ticks no clock
                assert paceline.publish(w, name="w") is not None
                assert came.acquire(timeout=PATIENCE_S)

        reading = threading.Thread(target=read)
        reading.start()
        started.run(work)
        reading.join(PATIENCE_S)
        assert seen == [1, 2, 3]


def test_a_lease_keeps_a_version_until_it_ends_or_its_reader_does(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(2,), update=ADD)

        def publish() -> None:
            w.push([1.0, 1.0])
            ps.clock()
            ps.models.publish(w, "w", keep=1).wait()

        publish()
        first = paceline.subscribe(tmp_path, name="w")
        second = paceline.subscribe(tmp_path, name="w")
        held, also_held = first.wait(1, timeout_s=PATIENCE_S), second.wait(1, timeout_s=PATIENCE_S)
        publish()
        assert second.wait(2, timeout_s=PATIENCE_S).number == 2
        assert second.versions() == [1, 2]
        second.pull(1).close()  # another one of the same, whose end leaves the first its lease
        assert second.versions() == [1, 2]
        also_held.close()
        also_held.close()  # ends no lease of another reader
        assert second.versions() == [1, 2]
        first._servers.drop()  # as when its process dies
        ended = time.monotonic() + PATIENCE_S
        while second.versions() != [2]:  # the server notices that its connection has ended
            assert time.monotonic() < ended
        assert held["w"].tolist() == [1.0, 1.0], "what a reader has stays its own"
        held.close()  # of connections that are gone
        first.close()
        second.close()

    with readable(tmp_path, carrier="shm") as started:
        started.run(work)


def test_what_cannot_be_published_is_said(tmp_path: Path) -> None:
    with readable(tmp_path) as started:

        def work(ps: Session) -> None:
            rows = ps.table("rows", rows=2, update=ADD)
            with pytest.raises(UsageError, match="no server holds parameters of this model"):
                paceline.publish(a_model())
            for what in (rows, 3, None):
                with pytest.raises(UsageError, match="cannot be published, expected a model"):
                    paceline.publish(what)  # pyright: ignore[reportArgumentType]
            w = ps.table("w", shape=(2,), update=ADD)
            for wrong in ({"name": ""}, {"name": "x" * 200}, {"keep": 0}, {"keep": 10**9}, {"name": "a\nb"}):
                with pytest.raises(UsageError):
                    paceline.publish(w, **wrong)  # pyright: ignore[reportArgumentType]

        started.run(work)


def test_a_reader_comes_before_the_job_and_waits_no_longer_than_it_says(tmp_path: Path) -> None:
    with (
        paceline.subscribe(tmp_path / "absent") as reader,
        pytest.raises(DeadlineExceeded, match=r"'policy' at .*absent"),
    ):
        reader.latest(timeout_s=0.1)
    with pytest.raises(UsageError, match="no place of versions"):
        paceline.subscribe(3)
    with pytest.raises(UsageError, match="are for an address"):
        paceline.subscribe(tmp_path, token=b"x" * 32)


def test_a_standalone_server_keeps_versions_when_its_workers_have_left(tmp_path: Path) -> None:
    with daemon(tmp_path) as served:
        address = served.address("job")
        with paceline.subscribe(address, name="w", token=tmp_path / "token") as reader:
            for life in range(2):
                with served.connect("job") as ps:
                    w = ps.table("w", shape=(2,), update=ADD)
                    w.push([1.0, 2.0])
                    ps.clock()
                    ps.models.publish(w, "w", keep=3).wait()
                    version = reader.wait(timeout_s=PATIENCE_S)
                    assert version["w"].tolist() == [1.0 + life, 2.0 * (1 + life)]
                served.wait_empty("job")
                assert reader.latest()["w"].tolist() == [1.0 + life, 2.0 * (1 + life)]


def test_a_closed_subscription_says_so_and_wakes_those_that_wait(tmp_path: Path) -> None:
    with readable(tmp_path, carrier="shm"):
        reader, problems = paceline.subscribe(tmp_path), list[BaseException]()

        def wait() -> None:
            try:
                reader.wait(timeout_s=PATIENCE_S)
            except (UsageError, DeadlineExceeded) as error:
                problems.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        reader.close()
        waiting.join(PATIENCE_S)
        assert len(problems) == 1
        with pytest.raises(UsageError, match="is closed"):
            reader.latest()


def test_threads_that_share_a_subscription_keep_their_deadlines_and_wait_for_no_other_to_end_a_lease() -> None:
    entered, go = threading.Event(), threading.Event()

    def once(_: Deadline) -> None:
        entered.set()
        assert go.wait(PATIENCE_S)

    with paceline.connect() as ps, paceline.subscribe(ps, name="w") as reader:
        wait_seen(ps, ps.models.publish(ps.table("w", shape=(2,), update=ADD), "w", keep=1))
        version = reader.latest(timeout_s=PATIENCE_S)
        call = threading.Thread(target=reader._servers.repeat, args=(once, Deadline.after(PATIENCE_S), "the test"))
        call.start()
        assert entered.wait(PATIENCE_S)
        with pytest.raises(DeadlineExceeded, match="behind a call of another thread that waits for the test: threads"):
            reader.latest(timeout_s=0.1)
        version.close()
        assert not go.is_set()
        go.set()
        call.join(PATIENCE_S)
        assert reader._leases
        assert reader.versions(timeout_s=PATIENCE_S) == [0]
        assert not reader._leases


class WatchedLock:
    """A lock that says when a thread begins to wait for it."""

    def __init__(self) -> None:
        self.inner, self.is_wanted = threading.RLock(), threading.Semaphore(0)

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.is_wanted.release()
        return self.inner.acquire(blocking, timeout)

    def release(self) -> None:
        self.inner.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def test_a_call_that_waited_for_another_finds_the_subscription_closed() -> None:
    entered, problems, lock = threading.Event(), list[str](), WatchedLock()

    def once(_: Deadline) -> None:
        entered.set()
        reader._servers.wait_closed(PATIENCE_S)
        assert lock.is_wanted.acquire(timeout=PATIENCE_S)  # by `close`, which comes behind the other

    def latest() -> None:
        try:
            problems.append(f"version {reader.latest(timeout_s=PATIENCE_S).number}")
        except UsageError as error:
            problems.append(str(error))

    with paceline.connect() as ps, paceline.subscribe(ps, name="w") as reader:
        wait_seen(ps, ps.models.publish(ps.table("w", shape=(2,), update=ADD), "w", keep=1))
        reader._servers.lock = lock  # pyright: ignore
        calls = [
            threading.Thread(target=reader._servers.repeat, args=(once, Deadline.after(PATIENCE_S))),
            threading.Thread(target=latest),
        ]
        for thread in calls:
            thread.start()
            assert lock.is_wanted.acquire(timeout=PATIENCE_S)
            assert entered.wait(PATIENCE_S)
        reader.close()
        for thread in calls:
            thread.join(PATIENCE_S)
        assert problems == ["the subscription to 'w' is closed"]
        assert not reader._servers.links


def test_a_job_that_was_told_to_publishes_every_few_clocks(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        model, other = nn.Linear(3, 2), nn.Linear(3, 2)
        optimizers = [
            paceline.distributed(torch.optim.SGD(each.parameters(), lr=0.5), model=each, name=name)
            for each, name in ((model, "one"), (other, "two"))
        ]
        seen: dict[int, Tensor] = {}
        for _ in range(4):
            for optimizer, each in zip(optimizers, (model, other), strict=True):
                optimizer.zero_grad()
                each(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                seen[ps.node.clock] = each.weight.detach().clone()
        with paceline.subscribe(ps) as reader:
            assert reader.wait(6, timeout_s=PATIENCE_S).number == 6
            assert reader.versions() == [3, 6]
            last = reader.latest()
            assert sorted(last) == ["one.bias", "one.weight", "two.bias", "two.weight"]
            assert torch.equal(last["one.weight"], seen[5])
            assert torch.equal(last["two.weight"], seen[6])

    with readable(tmp_path, publish_every=3) as started:
        started.run(work)


def test_a_version_that_cannot_be_copied_is_told_and_the_next_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def work(ps: Session) -> None:
        w, failed = ps.table("w", shape=(2,), update=ADD), threading.Event()

        def append(_descriptor: int, _content: memoryview) -> None:
            failed.set()
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched, paceline.subscribe(ps, name="w") as reader:
            patched.setattr(server_versions, "append", append)
            ps.models.publish(w, "w", keep=1).wait()
            assert failed.wait(PATIENCE_S)
            patched.undo()
            ps.clock()
            ps.models.publish(w, "w", keep=1).wait()
            assert reader.wait(1, timeout_s=PATIENCE_S).number == 1
            assert reader.versions() == [1]

    with readable(tmp_path, carrier="shm") as started:
        started.run(work)
    assert "version 0 of 'w' is not published: OSError: [Errno 28] No space left on device" in capfd.readouterr().err


def test_versions_that_are_dropped_lose_their_leases(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(2,), update=ADD)
        with paceline.subscribe(ps, name="w") as reader:
            for number in range(1, 20):  # more than there may be leases
                w.push([1.0, 1.0])
                ps.clock()
                ps.models.publish(w, "w", keep=1).wait()
                assert reader.wait(timeout_s=PATIENCE_S).number == number
            assert reader.versions() == [19]
            assert reader.latest().number == 19  # which is dropped at once
            for link in reader._servers.links:
                link.close()  # as when the server is killed
            assert reader.versions() == [19]

    with readable(tmp_path) as started:
        started.run(work)
