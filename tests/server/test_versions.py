"""What a server publishes: it never changes, is there whole or not at all, and lasts as retention and leases say."""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from errno import ENOSPC, ENOSYS
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import UsageError
from paceline.server import versions as server_versions
from paceline.server.served_table import PartToPublish
from paceline.server.versions import PublishedVersion, PublishedVersions, VersionGone
from paceline.transport import ShmTransport, Transport
from paceline.transport.memory import MemoryTransport
from paceline.update import cuts
from paceline.update.cuts import ShardCut
from paceline.wire.requests import PublishTable, TableCall
from paceline.wire.versions import (
    CHUNK_BYTES,
    MAX_LEASED,
    MAX_NAMES,
    FindVersions,
    PublicationId,
    chunk_digests,
    digest_of,
)

NAMES = ("a", "b")
TABLES = ("w", "x")


def request(number: int, table: str = "w", tables: tuple[str, ...] = ("w",), **changed: Any) -> PublishTable:
    given = {"name": "a", "series": "s", "number": number, "keep": 2, "tables": tables, "layout": b"layout", **changed}
    return PublishTable(TableCall(1, table, number, 0), **given)


def part(number: int, size_bytes: int = 5, transport: Transport | None = None) -> PartToPublish:
    values = torch.full((size_bytes,), number % 251, dtype=torch.uint8)
    return PartToPublish(0, size_bytes, ShardCut({"values": values}), transport or MemoryTransport())


def content(number: int) -> bytes:
    return bytes([number % 251]) * 5


class ByHand:
    """An executor whose calls run when the test says, so that versions come at any time."""

    def __init__(self) -> None:
        self.calls: deque[Callable[[], None]] = deque()

    def submit(self, call: Callable[..., None], *args: object) -> Future[None]:
        self.calls.append(lambda: call(*args))
        return Future()

    def run(self) -> None:
        while self.calls:
            self.calls.popleft()()

    def shutdown(self, **_: object) -> None:
        self.calls.clear()


def by_hand() -> tuple[PublishedVersions, ByHand]:
    versions, executor = PublishedVersions(), ByHand()
    versions._copying = executor  # pyright: ignore
    return versions, executor


def there(versions: PublishedVersions, name: str = "a") -> list[int]:
    found, _ = versions.wait_new(FindVersions(1, name, (), 0.0), lambda: True)
    return [each.number for each in found]


def intact(version: PublishedVersion) -> bool:
    digests = b"".join(digest for memory in version.memories for digest in chunk_digests(memory))
    head, told = version.describe()
    return digests == told and digest_of(version.layout, digests) == head.digest


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from(NAMES), st.integers(0, 9), st.sampled_from(TABLES)),
        st.tuples(st.just("seal"), st.just(""), st.just(0), st.just("")),
        st.tuples(st.just("lease"), st.sampled_from(NAMES), st.integers(0, 9), st.just("")),
        st.tuples(st.just("release"), st.just(""), st.integers(0, 9), st.just("")),
    ),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(1, 3))
def test_versions_are_whole_and_stay_as_they_are_for_as_long_as_they_should(
    steps: list[tuple[str, str, int, str]], keep: int
) -> None:
    versions, executor = by_hand()
    sealed: dict[PublicationId, bytes] = {}
    leased: list[PublishedVersion] = []
    for what, name, number, table in steps:
        if what == "add":
            with suppress(UsageError):  # while two are copied
                versions.add(request(number, table, TABLES, name=name, keep=keep), part(number))
        elif what == "seal" and executor.calls:
            executor.calls.popleft()()
        elif what == "release" and leased:
            versions.release(leased.pop(number % len(leased)))
        elif what == "lease":
            wanted = PublicationId(name, "s", number)
            try:
                leased.append(versions.lease(wanted))
            except VersionGone:
                assert wanted not in versions._ids(name)
        for each in NAMES:
            ids = versions._ids(each)
            held = {version.head.id for version in leased if version.head.id.name == each}
            assert len(set(ids) - held) <= keep
            assert held <= set(ids)
            for found in ids:
                version = versions._names[each].versions[found]
                assert intact(version)
                assert [part.table for part in version.head.parts] == list(TABLES)
                assert version.memories[0].tobytes() == content(found.number)
                assert sealed.setdefault(found, version.head.digest) == version.head.digest
    versions.close()


def test_a_version_is_not_there_before_all_its_tables() -> None:
    versions, executor = by_hand()
    versions.add(request(1, "w", TABLES), part(1))
    executor.run()
    assert there(versions) == []
    versions.add(request(1, "x", TABLES), part(1, CHUNK_BYTES + 1))
    executor.calls.popleft()()
    assert there(versions) == []
    executor.run()
    assert there(versions) == [1]
    versions.add(request(1, "w", TABLES), part(9))  # again, from a worker that came back
    assert not executor.calls
    assert len(versions.lease(PublicationId("a", "s", 1)).describe()[1]) == 3 * 32


def test_digests_are_computed_once_and_for_the_first_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = list[int]()

    def counted(memory: memoryview) -> Iterator[bytes]:
        computed.append(len(memory))
        return chunk_digests(memory)

    monkeypatch.setattr(server_versions, "chunk_digests", counted)
    versions, executor = by_hand()
    versions.add(request(1), part(1))
    executor.run()
    version = versions.lease(PublicationId("a", "s", 1))
    assert (version.head.digest, computed) == (b"", [])
    with ThreadPoolExecutor(8) as readers:
        told = set(readers.map(lambda _: version.describe(), range(8)))
    assert told == {(version.head, version.digests)}
    assert computed == [5]
    assert intact(version)


def test_versions_of_which_a_table_never_comes_are_dropped() -> None:
    versions, executor = by_hand()
    for number in range(50):
        versions.add(request(number, "w", TABLES), part(number))
    assert len(versions._names["a"].unfinished) <= 5
    versions.add(request(49, "x", TABLES), part(49))
    executor.run()
    assert there(versions) == [49]


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "x" * 101},
        {"name": "a\x1b[2J"},
        {"keep": 0},
        {"keep": 1 << 40},
        {"number": -1},
        {"series": ""},
        {"series": "x" * 65},
        {"tables": ("other",)},
        {"tables": ("w", "w")},
        {"tables": tuple(map(str, range(2000)))},
    ],
)
def test_values_that_a_version_cannot_have_are_refused(wrong: dict[str, Any]) -> None:
    versions = PublishedVersions()
    with pytest.raises(UsageError):
        versions.add(request(**{"number": 1, **wrong}), part(1))
    assert not versions._names


def test_what_is_published_faster_than_it_is_copied_is_refused_and_keeps_nothing() -> None:
    versions, executor = by_hand()
    parts = [part(number) for number in range(3)]
    for number in range(2):
        versions.add(request(number), parts[number])
    with pytest.raises(UsageError, match="the 2 versions before it are still being copied: publish less often"):
        versions.add(request(2), parts[2])
    executor.run()
    assert there(versions) == [0, 1]
    assert all(each.cut.is_over for each in parts), "updates keep nothing for them any more"


def test_all_tables_of_a_version_that_is_refused_are_and_nothing_of_it_is_kept() -> None:
    versions, executor = by_hand()

    def add(number: int, *tables: str) -> list[str]:
        refusals = list[str]()
        for table in tables:
            try:
                versions.add(request(number, table, TABLES), part(number))
            except UsageError as error:
                refusals.append(str(error))
        return refusals

    assert add(3, "w") == []
    for number in (1, 2):
        assert add(number, *TABLES) == []
    first = add(4, "w")
    assert add(3, "x") == first, "of which a table waits to be copied"
    executor.run()
    assert add(4, "x") == first, "which comes when there is room"
    assert len(first) == 1
    assert there(versions) == [1, 2]
    assert not versions._names["a"].unfinished
    assert add(4, *TABLES) == [], "asked for once more"
    executor.run()
    assert there(versions) == [2, 4]


def test_versions_are_published_again_once_the_thread_that_copies_them_can_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    versions, parts = PublishedVersions(), [part(number) for number in range(6)]
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none)
        for number in range(3):
            why = f"the server cannot start a thread that copies version {number}: can't start new thread"
            for table in TABLES:
                with pytest.raises(UsageError, match=why):
                    versions.add(request(number, table, TABLES), parts[2 * number + TABLES.index(table)])
    assert all(each.cut.is_over for each in parts), "updates keep nothing for them"
    versions.add(request(3), part(3))
    assert versions._copying is not None
    versions._copying.shutdown()  # which waits for its thread
    assert there(versions) == [3]
    versions.close()
    assert capsys.readouterr().err == ""


def test_a_version_that_there_is_no_memory_for_is_told_and_never_there(capsys: pytest.CaptureFixture[str]) -> None:
    versions, executor = by_hand()
    given_up = part(1)
    versions.add(request(1), given_up)
    given_up.cut.close()  # as updates do that have run too far ahead
    executor.run()
    assert there(versions) == []
    assert "version 1 of 'a' is not published: a cut was given up" in capsys.readouterr().err
    versions.add(request(2), part(2))
    executor.run()
    assert there(versions) == [2]


def memory_files() -> dict[int, str]:
    """The files of memory that this process has open: descriptors and what they lead to."""
    found = {int(path.name): os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    return {descriptor: name for descriptor, name in found.items() if name.startswith("/memfd:paceline")}


def test_no_process_can_write_to_what_readers_map() -> None:
    versions, executor = by_hand()
    before, size_bytes = memory_files(), cuts.CHUNK + 3  # of a piece, and a part of another
    versions.add(request(1), part(1, size_bytes, ShmTransport("job")))
    executor.run()
    (memory,) = versions.lease(PublicationId("a", "s", 1)).memories
    (descriptor,) = memory_files().keys() - before.keys()
    assert os.pread(descriptor, 2 * size_bytes, 0) == memory.tobytes() == bytes([1]) * size_bytes
    writable = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)  # as the owner of the file may
    try:
        with pytest.raises(PermissionError):
            os.pwrite(writable, b"wrong", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(writable, 1)
        with pytest.raises(PermissionError):
            mmap.mmap(writable, size_bytes)
    finally:
        os.close(writable)
    memory[0] = 2  # which stays in this process, and is not in the file
    assert os.pread(descriptor, 1, 0) == bytes([1])


def test_a_version_that_memory_ends_for_is_told_and_leaves_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(descriptor: int, content: memoryview) -> None:
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    monkeypatch.setattr(server_versions, "append", full)
    versions, executor = by_hand()
    before = memory_files()
    versions.add(request(1), part(1, transport=ShmTransport("job")))
    executor.run()
    assert there(versions) == []
    assert "version 1 of 'a' is not published: " in (told := capsys.readouterr().err)
    assert os.strerror(ENOSPC) in told
    assert memory_files() == before


def test_without_files_of_memory_a_version_is_in_memory_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(size_bytes: int, *, sparse: bool = False) -> int:
        raise OSError(ENOSYS, os.strerror(ENOSYS))

    monkeypatch.setattr(server_versions, "create_memory", missing)
    notices, (versions, executor) = list[str](), by_hand()
    transport = ShmTransport("job", notice=notices.append, create_memory=missing)
    versions.add(request(1), part(1, transport=transport))
    executor.run()
    assert versions.lease(PublicationId("a", "s", 1)).memories[0].tobytes() == content(1)
    assert len(notices) == 1


def test_what_a_reader_wants_held_stays_for_it_unless_it_knows_it() -> None:
    versions, executor = by_hand()

    def held(*known: int) -> PublishedVersion | None:
        ids = tuple(PublicationId("a", "s", each) for each in known)
        return versions.wait_new(FindVersions(1, "a", ids, 0.0, hold=True), lambda: True)[1]

    assert held() is None
    holds = list[PublishedVersion]()
    for number in range(MAX_LEASED):
        versions.add(request(number, keep=1), part(number))
        executor.run()
        found = held()
        assert found is not None
        assert found.head.id.number == number
        assert held(number) is None
        holds.append(found)
    versions.add(request(99, keep=1), part(99))
    executor.run()
    assert there(versions) == [*range(MAX_LEASED), 99]
    for each in holds:
        versions.release(each)
    assert there(versions) == [99]


def test_names_and_leases_are_bounded() -> None:
    versions, executor = by_hand()
    for number in range(MAX_NAMES):
        versions.add(request(1, name=f"name {number}"), part(1))
    with pytest.raises(UsageError, match=f"as {MAX_NAMES} other names are"):
        versions.add(request(1, name="one more"), part(1))
    versions.close()
    versions, executor = by_hand()
    leases = list[PublishedVersion]()
    for number in range(MAX_LEASED):
        versions.add(request(number, keep=1), part(number))
        executor.run()
        leases.append(versions.lease(PublicationId("a", "s", number)))
    versions.add(request(99, keep=1), part(99))
    executor.run()
    assert there(versions) == [*range(MAX_LEASED), 99]
    newest = versions.lease(PublicationId("a", "s", 99))
    assert newest.num_leases == 1  # beside those that leases keep
    assert versions.wait_bytes(leases[0], 0, 1, lambda: True)
    versions.add(request(100, keep=1), part(100))
    executor.run()
    assert there(versions) == [0, *range(2, MAX_LEASED), 99, 100]  # bytes of version 0 were asked for since
    assert [each.is_let_go for each in leases] == [number == 1 for number in range(MAX_LEASED)]
    assert not leases[1].memories
    for each in [*leases, newest]:
        versions.release(each)
    assert there(versions) == [100]
