"""Rows as readers see them: at most so old, each update whole, and those of a dense version where that is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.jobs import Job
from tests.serve.daemon import daemon
from tests.versions.publishing import wait_seen
from tests.versions.test_subscription import readable
from torch import Tensor

import paceline
from paceline.api.session import Session
from paceline.errors import DeadlineExceeded, Refused, UsageError
from paceline.transport.deadline import Deadline
from paceline.update.cuts import NO_ROOM
from paceline.update.rows import changes, cuts
from paceline.update.rows.torch_ops import hash_of
from paceline.versions.feed import RowChanges, RowFeed
from paceline.versions.rows import RowCopy, SubscribedRows
from paceline.worker.rows.table import RowTable

PATIENCE_S = 60.0
IDS = torch.arange(-20, 60) * 7919


def users(ps: Session, **settings: object) -> RowTable:
    rule = paceline.update.Adam(lr=0.1)
    init = paceline.first.uniform(0.5, seed=3)
    return ps.table("users", rows=3, update=rule, init=init, **settings)  # pyright: ignore[reportArgumentType]


def push(table: RowTable, step: int) -> None:
    some = IDS[torch.randperm(len(IDS), generator=torch.Generator().manual_seed(step))[:25]]
    table.push(some, torch.full((25, 3), float(step)))


def came(rows: SubscribedRows, wanted: Tensor) -> bool:
    """Read until an update is there, which no clock says, at most as often as it takes a minute."""
    return any(torch.equal(rows.pull(IDS, timeout_s=PATIENCE_S), wanted) for _ in range(10**7))


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "PIECE_BYTES", 100)


@pytest.mark.parametrize(("carrier", "servers"), [("shm", 1), ("tcp", 2), ("tls", 1)])
def test_a_reader_has_the_rows_of_the_trainer_and_holds_up_no_clock(carrier: str, servers: int, tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        table = users(ps)
        if ps.rank == 0:
            with paceline.subscribe(tmp_path) as reader, reader.table("users", timeout_s=PATIENCE_S) as rows:
                assert torch.equal(rows.pull(IDS, timeout_s=PATIENCE_S), table.pull(IDS)), "rows that were never pushed"
                for step in range(1, 6):
                    push(table, step)
                    ps.clock()
                    now = table.pull(IDS)
                    assert came(rows, now)
                    assert torch.equal(rows.pull([[7919], [5]], max_age_s=None)[0], now[21:22])
                assert 0 < len(rows) < len(IDS)
                assert rows.age_s < PATIENCE_S
        else:
            for step in range(1, 6):  # the reader is none of the workers that this one waits for
                push(table, 10 * step)
                ps.clock()
                table.pull(IDS)

    with readable(tmp_path, workers=2, servers=servers, carrier=carrier) as started:
        started.run(work)


def test_rows_and_a_dense_version_are_of_one_clock(tmp_path: Path) -> None:
    def work(ps: Session) -> None:
        table, w = users(ps), ps.table("w", shape=(2,), update=paceline.update.Add())
        seen = dict[int, Tensor]()

        def step() -> None:
            push(table, ps.node.clock + 1)
            w.push([1.0, 1.0])
            ps.clock()
            seen[ps.node.clock] = table.pull(IDS)
            wait_seen(ps, ps.models.publish(w, "w", keep=20))

        step()
        with (
            paceline.subscribe(tmp_path, name="w") as reader,
            reader.table("users", follow=False, timeout_s=PATIENCE_S) as rows,
        ):
            assert rows.advance(timeout_s=PATIENCE_S) == 1
            for _ in range(6):
                step()
            ps.clock()  # without a push
            for number in (2, 4, 7):
                with reader.pull(number) as version:
                    assert version["w"][0] == number
                    assert rows.advance(version.number, timeout_s=PATIENCE_S) == number
                assert torch.equal(rows.pull(IDS, max_age_s=None), seen[number])
            assert rows.advance(8, timeout_s=PATIENCE_S) == 8
            with pytest.raises(UsageError, match="are at clock 8 already: take version 8 or a newer one"):
                rows.advance(7)
            with pytest.raises(DeadlineExceeded, match=r"did not come to clock 9 within 0\.2 s"):
                rows.advance(9, timeout_s=0.2)

    with readable(tmp_path, servers=2, carrier="tcp") as started:
        started.run(work)


def test_one_thread_at_a_time_advances_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    poll, entered, go = RowFeed.poll, threading.Semaphore(0), threading.Event()

    def held(self: RowFeed, wait_s: float, deadline: Deadline) -> list[RowChanges]:
        entered.release()
        assert go.wait(PATIENCE_S)
        return poll(self, wait_s, deadline)

    with paceline.connect() as ps, paceline.subscribe(ps) as reader:
        table = users(ps)
        push(table, 1)
        ps.clock()
        with reader.table("users", follow=False, timeout_s=PATIENCE_S) as rows, ThreadPoolExecutor(1) as others:
            monkeypatch.setattr(RowFeed, "poll", held)
            first = others.submit(rows.advance, 1, timeout_s=PATIENCE_S)
            assert entered.acquire(timeout=PATIENCE_S)
            with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for another thread to bring rows of 'users'"):
                rows.advance(1, timeout_s=0.1)
            assert not entered.acquire(blocking=False), "the feed is for one thread at a time"
            go.set()
            assert first.result(PATIENCE_S) == 1
            assert rows.advance(1, timeout_s=PATIENCE_S) == 1


def test_rows_whose_thread_cannot_start_are_pulled_once_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def none(self: threading.Thread) -> None:
        if self.name == "paceline-rows":
            raise RuntimeError("can't start new thread")
        start(self)

    with paceline.connect() as ps, paceline.subscribe(ps) as reader:
        users(ps)
        with reader.table("users", timeout_s=PATIENCE_S) as rows:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", none)
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    rows.pull([1], timeout_s=PATIENCE_S)
            assert rows.pull([1], timeout_s=PATIENCE_S).shape == (1, 3)


def test_closed_rows_go_on_to_no_clock_and_return_no_changes() -> None:
    with paceline.connect() as ps, paceline.subscribe(ps) as reader:
        table = users(ps)
        push(table, 1)
        ps.clock()
        rows = reader.table("users", follow=False, timeout_s=PATIENCE_S)
        assert rows.advance(timeout_s=PATIENCE_S) == 1
        going = rows.changes(timeout_s=PATIENCE_S)
        next(going)
        rows.close()
        calls: list[Callable[[], object]] = [
            lambda: rows.advance(timeout_s=PATIENCE_S),
            lambda: rows.advance(1, timeout_s=PATIENCE_S),  # where they are
            lambda: next(rows.changes(timeout_s=PATIENCE_S)),
            lambda: next(going),
        ]
        for call in calls:
            with pytest.raises(UsageError, match="the subscription to rows of 'users' is closed"):
                call()


class Consumer:
    """Keeps a copy by handling changes one by one, and its cursor, as a process would that may be killed."""

    def __init__(self, rows: SubscribedRows, **choice: Any) -> None:
        self.copy, self.cursor, self.choice = RowCopy(rows.spec), "", choice
        self.num_resets = self.num_removed = 0

    def handle(self, rows: SubscribedRows, wanted: dict[int, list[float]]) -> None:
        """Go on from the cursor until the copy is what it should be."""
        feed = rows.changes(self.cursor, **self.choice, wait_s=0.2, timeout_s=PATIENCE_S)
        with closing(feed):  # pyright: ignore[reportArgumentType]
            for found in feed:
                if found is not None:
                    self._handle(rows, found)
                if self.cursor and self.held() == wanted:
                    return

    def _handle(self, rows: SubscribedRows, found: RowChanges) -> None:
        if found.resets:
            self.copy, self.num_resets = RowCopy(rows.spec), self.num_resets + 1
        self.copy.apply(found)
        self.num_removed += len(found.removed)
        self.cursor = found.cursor or self.cursor

    def held(self) -> dict[int, list[float]]:
        ids, values = self.copy.items()
        return dict(zip(ids.tolist(), values.tolist(), strict=True))


@pytest.fixture
def consumer(tmp_path: Path) -> Iterator[tuple[Job, RowTable, Session, SubscribedRows]]:
    with readable(tmp_path, servers=2, carrier="tcp") as started, started.join(0) as ps:
        table = users(ps, life=paceline.Lifecycle(expire_after=2))
        with paceline.subscribe(tmp_path) as reader, reader.table("users", timeout_s=PATIENCE_S) as rows:
            yield started, table, ps, rows


def held_by(table: RowTable, folder: Path) -> dict[int, list[float]]:
    """The rows that the servers have; to export them is no use of them."""
    table.export(folder / "rows.safetensors")
    found = load_file(folder / "rows.safetensors")
    return dict(zip(found["ids"].tolist(), found["values"].tolist(), strict=True))


def test_a_consumer_goes_on_from_its_cursor_and_is_told_when_it_has_expired(
    consumer: tuple[Job, RowTable, Session, SubscribedRows], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started, table, ps, rows = consumer
    one = Consumer(rows)

    def step(number: int) -> dict[int, list[float]]:
        push(table, number)
        ps.clock()
        return held_by(table, tmp_path)

    one.handle(rows, step(1))
    assert one.num_resets == 1
    for number in range(2, 8):  # each time from its cursor, as after a restart
        one.handle(rows, step(number))
    assert one.num_resets == 1
    assert one.num_removed > 0
    monkeypatch.setattr(changes, "LEAST_LOG_BYTES", 1)
    for node in started.servers:
        for served in node._tables.values():
            assert served.log is not None
            served.log._limit_bytes = 1
    for number in range(8, 11):
        wanted = step(number)
    one.handle(rows, wanted)
    assert one.num_resets == 2
    for wrong in ("?", "abc", one.cursor + ",", "x" * 100_000):
        with pytest.raises(UsageError, match="is no cursor of changes"):
            next(iter(rows.changes(wrong)))
    absent = ",".join(f"{'0' * 16}:3" for _ in range(2))
    first = next(each for each in rows.changes(absent) if each is not None)
    assert first.resets


def test_consumers_of_parts_have_each_row_once_together(
    consumer: tuple[Job, RowTable, Session, SubscribedRows], tmp_path: Path
) -> None:
    _, table, ps, rows = consumer
    parts = [Consumer(rows, part=(number, 3)) for number in range(3)]
    for step in range(1, 6):
        push(table, step)
        ps.clock()
        wanted = held_by(table, tmp_path)
        of_part = hash_of(torch.tensor(list(wanted))).remainder(3).tolist()
        for number, one in enumerate(parts):  # each from its cursor
            mine = [each for each, part in zip(wanted, of_part, strict=True) if part == number]
            one.handle(rows, {each: wanted[each] for each in mine})
        assert sum(len(one.held()) for one in parts) == len(wanted)
    assert [one.num_resets for one in parts] == [1, 1, 1]
    assert all(one.num_removed for one in parts)


def test_changes_of_chosen_rows_leave_out_others_and_cursors_go_on(
    consumer: tuple[Job, RowTable, Session, SubscribedRows], tmp_path: Path
) -> None:
    _, table, ps, rows = consumer
    chosen = IDS[[3, 7, 20]]

    def push_to(ids: Tensor) -> dict[int, list[float]]:
        table.push(ids, torch.ones(len(ids), 3))
        ps.clock()
        held = held_by(table, tmp_path)
        return {each: held[each] for each in chosen.tolist() if each in held}

    one = Consumer(rows, ids=chosen)
    one.handle(rows, push_to(IDS))
    before = one.cursor
    push_to(IDS[30:60])  # others alone
    feed = rows.changes(before, ids=chosen, wait_s=0.2, timeout_s=PATIENCE_S)
    with closing(feed):  # pyright: ignore[reportArgumentType]
        skipped = next(each for each in feed if each is not None)
    assert (len(skipped.ids), len(skipped.removed), skipped.resets) == (0, 0, False)
    assert skipped.cursor != before, "it is not left behind"
    one.cursor = skipped.cursor
    one.handle(rows, push_to(chosen[:1]))
    assert one.num_resets == 1
    whole = Consumer(rows)
    whole.cursor = one.cursor  # which says nothing of the rows that were wanted
    push_to(IDS)
    feed, ids = rows.changes(whole.cursor, wait_s=0.2, timeout_s=PATIENCE_S), set[int]()
    with closing(feed):  # pyright: ignore[reportArgumentType]
        while not ids >= set(IDS.tolist()):
            found = next(feed)
            assert found is None or not found.resets
            ids |= set() if found is None else set(found.ids.tolist())


@pytest.mark.parametrize(
    "choice", [{"part": (3, 3)}, {"part": (-1, 3)}, {"part": (0, 0)}, {"ids": []}, {"ids": range(4097)}]
)
def test_a_choice_of_rows_that_makes_no_sense_is_refused(
    choice: dict[str, Any], consumer: tuple[Job, RowTable, Session, SubscribedRows]
) -> None:
    with pytest.raises(UsageError, match=r"expected a number and how many parts|expected 1 to 4096 ids, or a part"):
        consumer[3].changes(**choice)


def test_what_has_no_rows_and_what_is_too_old_is_said(tmp_path: Path) -> None:
    with readable(tmp_path, carrier="tcp") as started:
        with started.join(0) as ps:
            ps.table("w", shape=(2,), update=paceline.update.Add())
            users(ps, consistency="asynchronous")
            with paceline.subscribe(tmp_path) as reader:
                with pytest.raises(UsageError, match="table 'w' has a shape, and no rows"):
                    reader.table("w")
                with pytest.raises(Refused, match="there is no table 'absent' here"):
                    reader.table("absent", timeout_s=0.1)
                with reader.table("users", follow=False) as still, pytest.raises(UsageError, match="clock by clock"):
                    still.advance(1)
                rows = reader.table("users", timeout_s=PATIENCE_S)
                assert rows.pull([1], timeout_s=PATIENCE_S).shape == (1, 3)
                for wrong in ({"max_age_s": 0.0}, {"max_age_s": float("nan")}):
                    with pytest.raises(UsageError, match=r"expected at least 0\.01 s, or None"):
                        rows.pull([1], **wrong)
                with pytest.raises(UsageError, match="expected integers of at most 64 bits"):
                    rows.pull([0.5])  # pyright: ignore[reportArgumentType]
        for node in started.servers:
            node.stop()
        while rows.age_s < 0.1:
            rows.pull([1], max_age_s=None)
        with pytest.raises(DeadlineExceeded, match=r"'users' are .* s old after 0\.1 s, expected at most 0\.05 s"):
            rows.pull([1], max_age_s=0.05, timeout_s=0.1)
        assert rows.pull([1], max_age_s=None).shape == (1, 3), "what is here is read however old it is"
        rows.close()
        rows.close()
        with pytest.raises(UsageError, match="is closed"):
            rows.pull([1], max_age_s=None)


def test_a_copy_that_could_not_take_a_change_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed, real = threading.Event(), RowCopy.apply

    def apply(self: RowCopy, found: RowChanges) -> None:
        if not found.is_snapshot and len(found.ids) and not failed.is_set():
            failed.set()
            raise MemoryError("none is left")
        real(self, found)

    with readable(tmp_path, servers=2, carrier="tcp") as started, started.join(0) as ps:
        table = users(ps)
        monkeypatch.setattr(RowCopy, "apply", apply)
        with paceline.subscribe(tmp_path) as reader, reader.table("users", timeout_s=PATIENCE_S) as rows:
            rows.pull(IDS, timeout_s=PATIENCE_S)
            for step in range(1, 4):
                push(table, step)
                ps.clock()
            assert failed.wait(PATIENCE_S)
            assert came(rows, table.pull(IDS))


def test_readers_whose_cuts_are_given_up_begin_anew_and_lock_out_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real, given_up = cuts.RowsCut.read_columns, list[cuts.RowsCut]()

    def short_of_memory(self: cuts.RowsCut, index: int) -> cuts.Columns:
        if index == 1 and len(given_up) < 4:
            given_up.append(self)
            self._give_up(NO_ROOM)
        return real(self, index)

    with paceline.connect() as ps, paceline.subscribe(ps) as reader:
        table = users(ps)
        table.push(IDS, torch.ones(len(IDS), 3))
        ps.clock()
        monkeypatch.setattr(cuts.RowsCut, "read_columns", short_of_memory)
        rows = [reader.table("users", timeout_s=PATIENCE_S) for _ in range(3)]
        with ThreadPoolExecutor(len(rows)) as pulling:
            pulled = list(pulling.map(lambda each: each.pull(IDS, timeout_s=PATIENCE_S), rows))
        assert len({id(each) for each in given_up}) == 4, "each was asked for once after it was given up"
        assert all(torch.equal(each, table.pull(IDS)) for each in pulled)
        for each in rows:
            each.close()


def test_rows_of_a_standalone_server_come_while_workers_take_part_and_go_on_with_the_next(tmp_path: Path) -> None:
    with daemon(tmp_path) as served, paceline.subscribe(served.address("job"), token=tmp_path / "token") as reader:
        rows: SubscribedRows | None = None
        for life in range(2):
            with served.connect("job") as ps:
                table = users(ps)
                push(table, life + 1)
                ps.clock()
                rows = rows or reader.table("users", timeout_s=PATIENCE_S)
                assert came(rows, table.pull(IDS))
            served.wait_empty("job")
        assert rows is not None
        rows.close()


def test_changes_that_ctrl_c_keeps_from_the_copy_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    poll = RowFeed.poll

    def interrupted(self: RowFeed, wait_s: float, deadline: Deadline) -> list[RowChanges]:
        found = poll(self, wait_s, deadline)
        if found:
            raise KeyboardInterrupt
        return found

    with paceline.connect() as ps, paceline.subscribe(ps) as reader:
        table = users(ps)
        push(table, 1)
        ps.clock()
        with reader.table("users", follow=False, timeout_s=PATIENCE_S) as rows:
            assert rows.advance(1, timeout_s=PATIENCE_S) == 1
            push(table, 2)
            ps.clock()
            with monkeypatch.context() as patch:
                patch.setattr(RowFeed, "poll", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    rows.advance(2, timeout_s=PATIENCE_S)
            assert rows.advance(2, timeout_s=PATIENCE_S) == 2
            assert torch.equal(rows.pull(IDS, max_age_s=None), table.pull(IDS))
