"""What comes over a line is checked: damaged bytes are fetched anew, and what has come is not fetched again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import job

import paceline
from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError
from paceline.transport.base import Connection, Frame
from paceline.transport.deadline import Deadline
from paceline.versions.link import DamagedVersion, PartMemory, ReaderLink
from paceline.versions.places import PublishingServers, VersionPlaces
from paceline.versions.subscription import VersionSubscription
from paceline.wire.versions import CHUNK_BYTES, BytesFetched, DeltaFetched, VersionLeased, decode, encode

NUMEL = 5 * CHUNK_BYTES // 4 + 3  # over several chunks and requests of float32
PATIENCE_S = 60.0


class Line:
    """A connection that hands each received frame to a function first, which may change it or break the line."""

    def __init__(self, inner: Connection, change: Callable[[Frame, object], Frame]) -> None:
        self.inner = inner
        self.change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def receive(self, **settings: Any) -> Frame:
        frame = self.inner.receive(**settings)
        return self.change(frame, decode(frame.header))


def damaged(frame: Frame) -> Frame:
    body = bytearray(frame.body)
    body[len(body) // 2] ^= 1
    return Frame(frame.header, memoryview(body))


class Published:
    """A version of a table over a line that a test changes."""

    def __init__(self, directory: Path, change: Callable[[Frame, object], Frame]) -> None:
        self.job = job(directory, carrier="memory")
        self.started = self.job.__enter__()
        self.ps = self.started.join(0)
        values = torch.arange(float(NUMEL))
        self.table = self.ps.table("w", shape=(NUMEL,), update=paceline.update.Add(), init=values)
        self.ps.models.publish(self.table, "w", keep=2).wait()
        self.values = values
        self.change = change
        self.num_connections = 0
        servers = PublishingServers(self.started.transport, self.started.spec.addresses)
        self.servers = servers
        self.reader = VersionSubscription("w", VersionPlaces("the test", (lambda: servers,)))

    def change_some(self, *, keep: int = 2) -> None:
        """Publish another version, in which two elements of the first piece have changed."""
        some = torch.zeros(NUMEL)
        some[[5, CHUNK_BYTES // 4]] = 1.0
        self.values = self.values + some
        self.table.push(some)
        self.ps.clock()
        self.ps.models.publish(self.table, "w", keep=keep).wait()

    def __enter__(self) -> Published:
        connect = self.started.transport.connect

        def changed(*args: Any, **settings: Any) -> Any:
            self.num_connections += 1
            return Line(connect(*args, **settings), self.change)

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(self.started.transport, "connect", changed)
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.undo()
        self.reader.close()
        self.ps.close()
        self.job.__exit__(None, None, None)


@pytest.mark.parametrize("which", [0, 1])
def test_damaged_bytes_are_fetched_anew(which: int, tmp_path: Path) -> None:
    num_fetched = [0]

    def change(frame: Frame, message: object) -> Frame:
        if not isinstance(message, BytesFetched):
            return frame
        num_fetched[0] += 1
        return damaged(frame) if num_fetched[0] == which + 1 else frame

    with Published(tmp_path, change) as published:
        version = published.reader.latest(timeout_s=PATIENCE_S)
        assert torch.equal(version["w"], published.values)
        assert num_fetched[0] > 2
        assert published.num_connections == 1


def test_bytes_that_are_always_damaged_are_never_shown(tmp_path: Path) -> None:
    def change(frame: Frame, message: object) -> Frame:
        return damaged(frame) if isinstance(message, BytesFetched) else frame

    with Published(tmp_path, change) as published:
        link = ReaderLink(published.servers, 0, PATIENCE_S)
        (wanted,) = link.find("w", (), PATIENCE_S)
        with pytest.raises(DamagedVersion, match="without the digest that they should have, 3 times in a row"):
            link.fetch(link.lease(wanted), PartMemory())
        link.close()


def test_a_description_without_its_digest_is_refused(tmp_path: Path) -> None:
    def change(frame: Frame, message: object) -> Frame:
        return damaged(frame) if isinstance(message, VersionLeased) else frame

    with Published(tmp_path, change) as published:
        link = ReaderLink(published.servers, 0, PATIENCE_S)
        (wanted,) = link.find("w", (), PATIENCE_S)
        with pytest.raises(PeerError, match="does not have its digest"):
            link.lease(wanted)
        link.close()


def test_a_version_that_was_found_is_held_until_one_is_leased_another_is_asked_for_or_it_is_not_wanted(
    tmp_path: Path,
) -> None:
    with Published(tmp_path, lambda frame, _: frame) as published:
        one, other = (ReaderLink(published.servers, 0, PATIENCE_S) for _ in range(2))

        def come_to(*numbers: int) -> None:
            """Wait until these versions are there, which are copied and dropped by other threads."""
            deadline = Deadline.after(PATIENCE_S)
            while (found := tuple(each.number for each in other.find("w", (), 0.0))) != numbers:
                assert deadline.remaining_s(), found

        first = one.find("w", (), PATIENCE_S, hold=True)[-1]
        for later in (1, 2):
            published.change_some(keep=1)
            come_to(first.number, first.number + later)
        assert one.lease(first).head.id == first
        one.end_lease(first)
        come_to(first.number + 2)
        assert one.find("w", (), 0.0, hold=True)[-1].number == first.number + 2
        published.change_some(keep=1)
        come_to(first.number + 2, first.number + 3)
        assert one.find("w", (), 0.0, hold=True)[-1].number == first.number + 3
        come_to(first.number + 3)
        published.change_some(keep=1)
        come_to(first.number + 3, first.number + 4)
        one.end_hold()
        come_to(first.number + 4)
        assert one.find("w", (), 0.0, hold=True)[-1].number == first.number + 4
        published.change_some(keep=1)
        come_to(first.number + 4, first.number + 5)
        one.close()
        come_to(first.number + 5)
        other.close()


def test_a_call_that_ends_without_a_version_has_none_held(tmp_path: Path) -> None:
    with Published(tmp_path, lambda frame, _: frame) as published:
        reader = published.reader
        number = reader.latest(timeout_s=PATIENCE_S).number
        with pytest.raises(DeadlineExceeded, match="there is none yet"):
            reader.wait(timeout_s=0.0)
        published.change_some(keep=1)
        other, deadline = ReaderLink(published.servers, 0, PATIENCE_S), Deadline.after(PATIENCE_S)
        while [each.number for each in other.find("w", (), 0.0)] != [number + 1]:
            assert deadline.remaining_s()
        other.close()


def test_a_transfer_goes_on_where_its_connection_broke(tmp_path: Path) -> None:
    received = list[int]()

    def change(frame: Frame, message: object) -> Frame:
        if isinstance(message, BytesFetched):
            received.append(len(frame.body))
            if len(received) == 2:
                raise ConnectionLost("the test cut it")
        return frame

    with Published(tmp_path, change) as published:
        version = published.reader.latest(timeout_s=PATIENCE_S)
        assert torch.equal(version["w"], published.values)
        assert published.num_connections == 2
        assert sum(received) == 4 * NUMEL + received[1], "only what was under way came twice"


def test_only_what_has_changed_is_sent_of_the_next_version(tmp_path: Path) -> None:
    def change(frame: Frame, _: object) -> Frame:
        return frame

    with Published(tmp_path, change) as published:
        first = published.reader.latest(timeout_s=PATIENCE_S)
        assert first.received_bytes == 4 * NUMEL
        for number in (1, 2):
            published.change_some()
            version = published.reader.wait(number, timeout_s=PATIENCE_S)
            assert torch.equal(version["w"], published.values)
            assert 2 * (4 + 1) <= version.received_bytes < 2000
            assert version.verify()
        version.close()
        published.change_some(keep=1)
        published.change_some(keep=1)  # the version that the reader has is not kept
        version = published.reader.wait(4, timeout_s=PATIENCE_S)
        assert torch.equal(version["w"], published.values)
        assert version.received_bytes >= CHUNK_BYTES


@pytest.mark.parametrize("how", ["damaged", "misleading", "of another base"])
def test_what_a_delta_gets_wrong_is_sent_whole(how: str, tmp_path: Path) -> None:
    num_deltas = [0]

    def change(frame: Frame, message: object) -> Frame:
        if not isinstance(message, DeltaFetched) or message.num_words is None:
            return frame
        num_deltas[0] += 1
        if how == "damaged":
            return damaged(frame)
        if how == "misleading":
            return Frame(encode(DeltaFetched(message.number, 7)), frame.body)
        return frame

    with Published(tmp_path, change) as published:
        first = published.reader.latest(timeout_s=PATIENCE_S)
        if how == "of another base":
            first["w"][6] = 1e9  # which belongs to the user
        published.change_some()
        version = published.reader.wait(1, timeout_s=PATIENCE_S)
        assert torch.equal(version["w"], published.values)
        assert num_deltas[0] == 1
        assert version.received_bytes >= CHUNK_BYTES
        assert published.num_connections == 1
