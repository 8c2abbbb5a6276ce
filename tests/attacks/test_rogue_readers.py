"""A reader that was taken over: it may read what is published, and nothing that it says reaches a table or a clock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.jobs import Job, job

import paceline
from paceline.api.session import Session
from paceline.core.messages import Clock, Join, Leave, Push, PushId, Sender
from paceline.errors import PeerError
from paceline.server import feeds, readers
from paceline.server.feeds import MAX_SHOWN
from paceline.transport.base import Connection, PeerIdentity
from paceline.wire import messages as wire
from paceline.wire import versions as spoken
from paceline.wire.messages import Hello, PushFrame
from paceline.wire.versions import (
    ChooseServer,
    DescribeRows,
    EndLease,
    FetchBytes,
    FetchChanges,
    FetchDelta,
    FetchRows,
    FindVersions,
    FollowRows,
    LeaseVersion,
    PublicationId,
    ReaderRefused,
    RowChoice,
)

PATIENCE_S = 60.0
KNOWN = PublicationId("w", "s", 1)


@contextmanager
def reading(started: Job, role: str = "reader", rank: int = 0) -> Iterator[Connection]:
    hello = wire.encode(Hello(role, rank, 0, 1))
    connection = started.transport.connect(started.spec.addresses[0], hello, timeout_s=PATIENCE_S)
    try:
        yield connection
    finally:
        connection.close()


def is_cut(connection: Connection) -> bool:
    try:
        connection.receive(timeout_s=PATIENCE_S)
    except PeerError:
        return True
    return False


def said_by_workers() -> list[bytes]:
    sender = Sender(1, 0, 0)
    push = PushFrame(Push(PushId(1, 0, 0, 0), "w", 0, 0), 1.0, (), ())
    return [wire.encode(message) for message in (push, Join(sender), Clock(sender, 5), Leave(sender))]


BREACHES: dict[str, list[tuple[bytes, bytes]]] = {
    "what workers say": [(header, bytes(8)) for header in said_by_workers()],
    "what servers say": [(spoken.encode(ReaderRefused(1, "no")), b"")],
    "a body": [(spoken.encode(FindVersions(1, "w", (), 0.0)), bytes(100))],
    "a large body": [(spoken.encode(FindVersions(1, "w", (), 0.0)), bytes(1 << 20))],
    "nothing": [(b"", b"")],
    "noise": [(os.urandom(50), b"")],
    "a negative size": [(spoken.encode(FetchBytes(1, KNOWN, 0, 0, 1))[:-1] + b"\xff", b"")],
    "more versions than there can be": [
        (spoken.encode(FindVersions(1, "w", tuple(PublicationId("w", "s", each) for each in range(1000)), 0.0)), b"")
    ],
    "a name that is too long": [(spoken.encode(FindVersions(1, "w" * 10_000, (), 0.0)), b"")],
}


@pytest.mark.parametrize("breach", BREACHES)
def test_a_reader_that_says_what_it_may_not_is_cut_and_training_goes_on(breach: str, tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        w = ps.table("w", shape=(2,), update=paceline.update.Add())
        for header, body in BREACHES[breach]:
            with reading(started) as rogue:
                with suppress(PeerError):  # while a large body is on its way
                    rogue.send(header, memoryview(body), timeout_s=PATIENCE_S)
                assert is_cut(rogue)
        w.push([1.0, 2.0])
        assert ps.clock() == 1
        assert w.pull().tolist() == [1.0, 2.0]

    with job(tmp_path, carrier="tcp") as started:
        started.run(work)


def test_readers_that_say_nothing_keep_none_out_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_READERS", 2)

    def ask(reader: Connection) -> object:
        reader.send(spoken.encode(FindVersions(1, "w", (), 0.0)), timeout_s=PATIENCE_S)
        return spoken.decode(reader.receive(timeout_s=PATIENCE_S).header)

    with job(tmp_path, carrier="tcp") as started, reading(started) as first, reading(started) as silent:
        for reader in (first, silent, first):
            assert ask(reader) == spoken.VersionsFound(1, ())
        with reading(started) as early:
            refused = spoken.decode(early.receive(timeout_s=PATIENCE_S).header)
            assert refused == ReaderRefused(-1, "there are 2 readers already")
        monkeypatch.setattr(readers, "SILENT_S", 0.0)
        with reading(started) as late:
            assert ask(late) == spoken.VersionsFound(1, ())
            assert is_cut(silent)
            assert ask(first) == spoken.VersionsFound(1, ())


def test_many_readers_of_one_origin_give_way_to_one_of_another_machine_or_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def by_rank(connection: Connection) -> tuple[str, str]:
        hello = wire.decode(connection.identity)
        assert isinstance(hello, Hello)
        return str(hello.rank), ""

    monkeypatch.setattr(readers, "MAX_READERS", 3)
    monkeypatch.setattr(readers, "_origin", by_rank)

    def answer(reader: Connection) -> object:
        reader.send(spoken.encode(FindVersions(1, "w", (), 0.0)), timeout_s=PATIENCE_S)
        return spoken.decode(reader.receive(timeout_s=PATIENCE_S).header)

    with job(tmp_path, carrier="tcp") as started, ExitStack() as opened:
        many = [opened.enter_context(reading(started)) for _ in range(3)]
        for reader in many:
            assert answer(reader) == spoken.VersionsFound(1, ())
        other = opened.enter_context(reading(started, rank=1))
        assert answer(other) == spoken.VersionsFound(1, ())
        assert is_cut(many[0])
        with reading(started) as again, reading(started, rank=1) as second:  # neither has less than its share by now
            for reader in (again, second):
                refused = spoken.decode(reader.receive(timeout_s=PATIENCE_S).header)
                assert refused == ReaderRefused(-1, "there are 3 readers already")
        for reader in (*many[1:], other):
            assert answer(reader) == spoken.VersionsFound(1, ())


def test_readers_are_told_apart_by_their_machine_and_certificate() -> None:
    def origin(peer: str, serial: str = "") -> tuple[str, str]:
        connection: Any = SimpleNamespace(peer=peer, peer_identity=PeerIdentity("any", serial))
        return readers._origin(connection)

    assert origin("10.0.0.1:4711") == origin("10.0.0.1:4712") != origin("10.0.0.2:4711")
    assert origin("10.0.0.1:4711", "A") != origin("10.0.0.1:4711", "B")


def test_a_reader_that_keeps_all_versions_that_may_be_kept_stops_no_other(tmp_path: Path) -> None:
    with job(tmp_path, carrier="tcp") as started, started.join(0) as ps, ExitStack() as opened:
        w = ps.table("w", shape=(2,), update=paceline.update.Add())
        rogue, leased = opened.enter_context(reading(started)), list[PublicationId]()

        def ask(message: object) -> object:
            rogue.send(spoken.encode(message), timeout_s=PATIENCE_S)
            return spoken.decode(rogue.receive(timeout_s=PATIENCE_S).header)

        other = opened.enter_context(paceline.subscribe(ps, name="w"))
        for step in range(1, spoken.MAX_LEASED + 4):
            w.push([1.0, 1.0])
            assert ps.clock() == step
            ps.models.publish(w, "w", keep=1).wait()
            found = ask(FindVersions(1, "w", tuple(leased), PATIENCE_S))
            assert isinstance(found, spoken.VersionsFound)
            leased.append(found.ids[-1])
            assert isinstance(ask(LeaseVersion(2, leased[-1])), spoken.VersionLeased)
            with other.wait(timeout_s=PATIENCE_S) as version:
                assert version["w"].tolist() == [float(step)] * 2
        answers = [ask(FetchBytes(3, each, 0, 0, 8)) for each in leased]
        kept = [isinstance(each, spoken.BytesFetched) for each in answers]
        assert kept == [number >= len(leased) - spoken.MAX_LEASED - 1 for number in range(len(leased))]
        assert all(each.is_gone for each in answers if isinstance(each, ReaderRefused))


def test_what_is_not_there_is_refused_and_the_next_request_is_answered(tmp_path: Path) -> None:
    with job(tmp_path, carrier="tcp") as started, started.join(0) as ps:
        w = ps.table("w", shape=(4,), update=paceline.update.Add())
        ps.models.publish(w, "w", keep=1).wait()
        with reading(started) as rogue:

            def ask(message: object) -> object:
                rogue.send(spoken.encode(message), timeout_s=PATIENCE_S)
                return spoken.decode(rogue.receive(timeout_s=PATIENCE_S).header)

            found = ask(FindVersions(1, "w", (), PATIENCE_S))
            assert isinstance(found, spoken.VersionsFound)
            (there,) = found.ids
            for message in (
                LeaseVersion(2, KNOWN),
                FetchBytes(2, there, 0, 0, 1),  # without a lease
            ):
                refused = ask(message)
                assert isinstance(refused, ReaderRefused)
                assert refused.is_gone
            assert isinstance(ask(ChooseServer(2, 1)), ReaderRefused)
            assert isinstance(ask(LeaseVersion(3, there)), spoken.VersionLeased)
            assert ask(ChooseServer(3, 0)) == spoken.ServerChosen(3, 1)
            assert isinstance(ask(FetchBytes(3, there, 0, 0, 16)), ReaderRefused)  # as the lease has ended
            assert isinstance(ask(LeaseVersion(3, there)), spoken.VersionLeased)
            for part, start, size in ((0, 0, 17), (0, 16, 1), (1, 0, 1), (0, 1 << 62, 1), (1 << 62, 0, 1)):
                refused = ask(FetchBytes(4, there, part, start, size))
                assert isinstance(refused, ReaderRefused)
                assert not refused.is_gone
            for part, start, size in ((0, 0, 17), (0, 16, 1), (1, 0, 1), (0, 1 << 62, 1)):
                assert isinstance(ask(FetchDelta(4, there, there, part, start, size, 4)), ReaderRefused)
            for base, size, words in ((KNOWN, 16, None), (there, 15, None), (there, 16, 0)):  # absent; no whole words
                assert ask(FetchDelta(4, there, base, 0, 0, size, 4)) == spoken.DeltaFetched(4, words)
            assert isinstance(ask(FetchBytes(5, there, 0, 0, 16)), spoken.BytesFetched)
            rogue.send(spoken.encode(EndLease(KNOWN)), timeout_s=PATIENCE_S)  # of what it does not hold
            rogue.send(spoken.encode(EndLease(there)), timeout_s=PATIENCE_S)
            assert isinstance(ask(FetchBytes(6, there, 0, 0, 16)), ReaderRefused)


def test_a_reader_of_rows_gets_what_there_is_once_and_training_goes_on(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        ps.table("w", shape=(4,), update=paceline.update.Add())
        rows = ps.table("rows", rows=2, update=paceline.update.Add())
        rows.push([1, 2], [[1.0, 1.0], [2.0, 2.0]])
        ps.clock()
        with reading(started) as rogue:

            def ask(message: object) -> tuple[object, int]:
                rogue.send(spoken.encode(message), timeout_s=PATIENCE_S)
                frame = rogue.receive(timeout_s=PATIENCE_S)
                return spoken.decode(frame.header), len(frame.body)

            for message, is_gone in (
                (FetchRows(1, 0), False),  # which were not shown
                (FollowRows(1, "w"), False),
                (FollowRows(1, "absent"), False),
                (DescribeRows(1, "w"), True),
                (FetchChanges(1, "rows", "0" * 16, 0, 0.0), True),
                (FetchChanges(1, "w", "0" * 16, 0, 0.0), True),
                (FetchChanges(1, "absent", "0" * 16, 0, 0.0), False),
            ):
                refused, _ = ask(message)
                assert isinstance(refused, ReaderRefused)
                assert refused.is_gone == is_gone, message
            for _ in range(3 * MAX_SHOWN):  # each time instead of the one before
                shown, _ = ask(FollowRows(2, "rows"))
                assert isinstance(shown, spoken.RowsShown)
            refused, _ = ask(FetchRows(3, shown.num_pieces))
            assert isinstance(refused, ReaderRefused)
            assert ask(FetchRows(4, 0)) == (spoken.RowsFetched(4, 2), 2 * 8 + 2 * 2 * 4)
            assert isinstance(ask(FetchRows(5, 0))[0], ReaderRefused)
            for since, wait_s in ((1, 0.0), (1 << 62, 0.0), (0, float("nan")), (0, 1e300), (0, -1e300)):
                answer, _ = ask(FetchChanges(6, "rows", shown.log, since, wait_s))
                assert isinstance(answer, ReaderRefused) == (since > 0)
            for only in (RowChoice(b"", 0, 2), RowChoice(b"", 1, 2), RowChoice((1).to_bytes(8, "little"))):
                answer, _ = ask(FetchChanges(6, "rows", shown.log, 0, 0.0, only))
                assert isinstance(answer, spoken.ChangesFetched)
            shown, _ = ask(FollowRows(7, "rows"))  # of which nothing is fetched before the connection ends
        for only in (RowChoice(b"", 2, 2), RowChoice(b"", 1 << 62, 1), RowChoice(b"1234567")):
            with reading(started) as rogue:
                rogue.send(spoken.encode(FetchChanges(1, "rows", shown.log, 0, 0.0, only)), timeout_s=PATIENCE_S)
                with pytest.raises(PeerError):
                    rogue.receive(timeout_s=PATIENCE_S)
        with pytest.raises(PeerError):  # more than a reader may choose
            spoken.decode(spoken.encode(FetchRows(1, 0, RowChoice(bytes(8 * (spoken.MAX_CHOSEN_IDS + 1))))))
        for step in range(3):
            rows.push([1, 3], [[1.0, 1.0], [1.0, 1.0]])
            assert ps.clock() == step + 2
        assert rows.pull([1]).tolist() == [[4.0, 4.0]]
        with paceline.subscribe(ps) as reader, reader.table("rows", timeout_s=PATIENCE_S) as copy:
            assert copy.pull([1, 2, 3], timeout_s=PATIENCE_S)[:, 0].tolist() == [4.0, 2.0, 3.0]

    with job(tmp_path, carrier="tcp") as started:
        started.run(work)


def test_readers_that_are_shown_all_rows_at_once_are_few(tmp_path: Path) -> None:
    with job(tmp_path, carrier="tcp") as started, started.join(0) as ps, ExitStack() as opened:
        rows = ps.table("rows", rows=2, update=paceline.update.Add())
        rows.push([1], [[1.0, 1.0]])
        ps.clock()
        answers = list[object]()
        for _ in range(MAX_SHOWN + 1):
            rogue = opened.enter_context(reading(started))
            rogue.send(spoken.encode(FollowRows(1, "rows")), timeout_s=PATIENCE_S)
            answers.append(spoken.decode(rogue.receive(timeout_s=PATIENCE_S).header))
        assert [type(each).__name__ for each in answers] == ["RowsShown"] * MAX_SHOWN + ["ReaderRefused"]


def test_a_reader_that_falls_silent_gives_way_and_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are kept as they were for as long as it is shown them, and few readers may be."""
    with job(tmp_path, carrier="tcp") as started, started.join(0) as ps, ExitStack() as opened:
        rows = ps.table("rows", rows=2, update=paceline.update.Add())
        rows.push([1], [[1.0, 1.0]])
        ps.clock()
        silent = [opened.enter_context(reading(started)) for _ in range(MAX_SHOWN)]
        for rogue in silent:
            rogue.send(spoken.encode(FollowRows(1, "rows")), timeout_s=PATIENCE_S)
            assert isinstance(spoken.decode(rogue.receive(timeout_s=PATIENCE_S).header), spoken.RowsShown)
        monkeypatch.setattr(feeds, "SILENT_S", 0.0)
        with paceline.subscribe(ps) as reader, reader.table("rows", timeout_s=PATIENCE_S) as copy:
            assert copy.pull([1], timeout_s=PATIENCE_S).tolist() == [[1.0, 1.0]]
        silent[0].send(spoken.encode(FetchRows(2, 0)), timeout_s=PATIENCE_S)
        assert is_cut(silent[0])
        silent[1].send(spoken.encode(FetchRows(2, 0)), timeout_s=PATIENCE_S)
        assert isinstance(spoken.decode(silent[1].receive(timeout_s=PATIENCE_S).header), spoken.RowsFetched)


def test_readers_that_ask_for_pieces_that_there_are_not_keep_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "SILENT_S", 1.0)
    with job(tmp_path, carrier="tcp") as started, started.join(0) as ps, ExitStack() as opened:
        rows = ps.table("rows", rows=2, update=paceline.update.Add())
        rows.push([1], [[1.0, 1.0]])
        ps.clock()

        def ask(reader: Connection, message: object) -> object:
            reader.send(spoken.encode(message), timeout_s=PATIENCE_S)
            return spoken.decode(reader.receive(timeout_s=PATIENCE_S).header)

        rogues = [opened.enter_context(reading(started)) for _ in range(MAX_SHOWN)]
        for rogue in rogues:
            assert isinstance(ask(rogue, FollowRows(1, "rows")), spoken.RowsShown)
        late, shown, until_s = opened.enter_context(reading(started)), None, time.monotonic() + PATIENCE_S
        while not isinstance(shown, spoken.RowsShown) and time.monotonic() < until_s:
            with suppress(PeerError):  # one of them gives way
                for rogue in rogues:
                    ask(rogue, FetchRows(2, 1 << 40))
            shown = ask(late, FollowRows(3, "rows"))
        assert isinstance(shown, spoken.RowsShown)


def test_all_rows_are_kept_for_readers_a_few_times_a_second_at_most() -> None:
    shown = feeds.RowFeeds()
    turns_s = [shown.turn_s() for _ in range(3)]
    assert turns_s == pytest.approx([0.0, feeds._BETWEEN_SHOWS_S, 2 * feeds._BETWEEN_SHOWS_S], abs=0.1)


def test_a_worker_cannot_say_what_readers_say(tmp_path: Path) -> None:
    with job(tmp_path, carrier="tcp") as started, reading(started, "worker") as rogue:
        rogue.send(spoken.encode(FindVersions(1, "w", (), 0.0)), timeout_s=PATIENCE_S)
        assert is_cut(rogue)
