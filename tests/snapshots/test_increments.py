"""Snapshots that have only the rows which have changed: with those before them they are the whole one, bit for bit."""

import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import job
from tests.launch.warm import run_job

import paceline
from paceline.api.session import Session
from paceline.cli import answer
from paceline.errors import CheckpointError
from paceline.server.row_table import ServedRowTable
from paceline.snapshots.converting import state_of
from paceline.snapshots.files import FileWriter
from paceline.snapshots.folder import Snapshot, newest, snapshots_in
from paceline.snapshots.reading import row_pieces
from paceline.worker.rows.table import RowTable

WAIT_S = 60.0
NUM_ROWS = 400
SCRIPT = Path(__file__).with_name("scripts") / "rows.py"
Rows = dict[int, tuple[bytes, ...]]


def rows_in(found: Snapshot) -> Rows:
    """All columns of all rows, as bytes, by id."""
    table = found.table("users")
    assert table is not None
    rows = Rows()
    for piece in row_pieces(found, table):
        for at, each in enumerate(piece.ids.tolist()):
            assert each not in rows, "a row comes once"
            rows[each] = tuple(piece.columns[name][at].numpy().tobytes() for name in sorted(piece.columns))
    return rows


@contextmanager
def planned(tmp_path: Path, **settings: Any) -> Iterator[Any]:
    """A job that keeps snapshots in a folder, whenever it is told to."""
    (tmp_path / "job").mkdir(exist_ok=True)
    folder = str(tmp_path / "snapshots")
    with job(tmp_path / "job", snapshots=folder, snapshot_every_s=3600.0, **settings) as started:
        yield started


def take(session: Session) -> Path | None:
    """Take the snapshot that is planned for this clock; return its folder, None where it failed."""
    session.snapshots.take_planned([])
    last = session.snapshots._last
    assert last is not None
    return None if last.exception(WAIT_S) else last.result()


def wait_told(session: Session) -> None:
    """Wait until what has become of the last snapshot is noted, in the thread that writes them one by one."""
    writer = session.snapshots._writer
    assert writer is not None
    writer.submit(lambda: None).result(WAIT_S)


def open_rows(session: Session, **settings: Any) -> RowTable:
    return session.table("users", rows=3, update=paceline.update.Adam(lr=0.1), **settings)


def push(session: Session, rows: RowTable, ids: range) -> None:
    rows.push(torch.tensor(ids), torch.randn(len(ids), 3))
    session.clock()


@pytest.mark.parametrize("life", [{}, {"expire_after": 3}, {"max_rows": 300, "evict": "lfu"}])
def test_a_chain_has_the_bytes_of_the_whole_snapshot(life: dict[str, Any], tmp_path: Path) -> None:
    def work(session: Session) -> None:
        rows = open_rows(session, life=paceline.Lifecycle(**life))
        push(session, rows, range(NUM_ROWS))
        for clock in range(6):
            push(session, rows, range(7 * clock, 7 * clock + 20))
            folder = take(session)
            whole = paceline.snapshot(tmp_path / "whole")
            assert folder is not None
            assert whole is not None
            found, expected = Snapshot.read(folder), Snapshot.read(whole.result(WAIT_S))
            assert expected.manifest.base == ""
            assert rows_in(found) == rows_in(expected)
            if not life:
                assert [table.changed_only for table in found.manifest.tables] == [clock > 0]
                assert (clock > 0) == (found.manifest.size_bytes < expected.manifest.size_bytes / 4)

    with planned(tmp_path, servers=2) as started:
        started.run(work)
    assert state_of(newest(tmp_path / "snapshots"))["rows"].keys() == {"users"}


def test_chains_are_bounded_and_what_they_need_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bases = list[str]()

    def work(session: Session) -> None:
        rows = open_rows(session)
        push(session, rows, range(NUM_ROWS))
        for number in range(20):
            push(session, rows, range(number, number + 2))
            folder = take(session)
            assert folder is not None
            bases.append(Snapshot.read(folder).manifest.base)
            for path in snapshots_in(folder.parent):
                Snapshot.read(path).verify()
        push(session, rows, range(NUM_ROWS - 100))
        assert take(session) is not None
        push(session, rows, range(2))
        whole = take(session)
        assert whole is not None
        bases.append(Snapshot.read(whole).manifest.base)

    with planned(tmp_path, snapshots_kept=2) as started:
        started.run(work)
    assert [bool(base) for base in bases[:17]] == [False, *7 * [True], False, *7 * [True], False]
    assert bases[-1] == "", "its chain has more than half of all rows by now"
    folder = tmp_path / "snapshots"
    assert answer(["snapshot", "verify", str(folder)]) == 0
    assert answer(["snapshot", "ls", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "changes since snapshot-20" in said
    assert [path.name for path in snapshots_in(folder)] == [*(f"snapshot-{number}" for number in range(17, 23))]


def test_a_base_that_is_gone_or_another_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def work(session: Session) -> None:
        rows = open_rows(session)
        for _ in range(2):
            push(session, rows, range(10))
            assert take(session) is not None

    with planned(tmp_path) as started:
        started.run(work)
    folder = tmp_path / "snapshots"
    base = folder / "snapshot-1"
    alone = shutil.copytree(folder / "snapshot-2", tmp_path / "copied" / "snapshot-2")
    with pytest.raises(CheckpointError, match=r"has only the rows that have changed since .*snapshot-1, and it is not"):
        Snapshot.read(alone).verify()
    manifest = base / "manifest.sha256"
    said = manifest.read_text()
    manifest.write_text("0" * 64)
    with pytest.raises(CheckpointError, match="and another one is there"):
        newest(folder).verify()
    assert answer(["snapshot", "verify", str(folder)]) == 1
    manifest.write_text(said)
    file = next(base.glob("rows-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match=r"snapshot-1/rows.* is damaged"):
        newest(folder).verify()
    assert "snapshot-2: whole" not in capsys.readouterr().out


def test_after_one_that_failed_or_a_server_without_marks_the_next_has_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    cut, lost = ServedRowTable.cut, list[int]()

    def cut_without_marks(table: ServedRowTable, *, values_only: bool = False, since: str | None = None) -> object:
        is_lost = bool(lost) and table.host.settings.server == lost[0]
        return cut(table, values_only=values_only, since="" if is_lost else since)

    monkeypatch.setattr(ServedRowTable, "cut", cut_without_marks)

    def bases(session: Session, rows: RowTable, num: int) -> list[str | None]:
        found = list[str | None]()
        for _ in range(num):
            push(session, rows, range(5))
            folder = take(session)
            found.append(None if folder is None else Snapshot.read(folder).manifest.base)
            wait_told(session)
        return found

    def work(session: Session) -> None:
        rows = open_rows(session)
        push(session, rows, range(NUM_ROWS))
        assert bases(session, rows, 2) == ["", "snapshot-1"]
        with monkeypatch.context() as patched:
            patched.setattr(FileWriter, "write", fail)
            assert bases(session, rows, 1) == [None]
        assert not session.snapshots.is_due, "the disk may be full for a while"
        assert bases(session, rows, 2) == ["", "snapshot-3"]
        lost.append(1)
        assert bases(session, rows, 1) == [None], "one server of two has all rows"
        assert session.snapshots.is_due, "at the next clock"
        lost.clear()
        assert bases(session, rows, 2) == ["", "snapshot-5"]
        assert not session.snapshots.is_due

    with planned(tmp_path, servers=2) as started:
        started.run(work)
    assert len(rows_in(newest(tmp_path / "snapshots"))) == NUM_ROWS


def test_a_namespace_keeps_chains_and_goes_on_from_them(tmp_path: Path) -> None:
    from tests.serve.daemon import daemon

    folder = tmp_path / "state" / "namespaces" / "job"
    with daemon(tmp_path / "state", snapshot_every_s=3600.0) as served:
        with served.connect("job") as ps:
            rows = open_rows(ps)
            push(ps, rows, range(NUM_ROWS))
            [namespace] = served.namespaces._open.values()
            namespace._ask(lambda held: namespace._save(held, waits=True), WAIT_S)
            push(ps, rows, range(5))
            values = rows.pull(torch.arange(NUM_ROWS)).clone()
        served.wait_empty()
        assert [Snapshot.read(path).manifest.base for path in snapshots_in(folder)] == ["", "snapshot-1"]
        with served.connect("job") as ps:
            assert torch.equal(open_rows(ps).pull(torch.arange(NUM_ROWS)), values)


@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their launcher on Linux alone")
def test_a_job_that_is_killed_resumes_from_a_chain(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    options = ("--workers", "1", "--snapshots", str(folder), "--snapshot-every", "0.02")
    assert run_job(*options, SCRIPT, folder, "kill").returncode == -signal.SIGKILL
    found = newest(folder)
    assert found.manifest.base
    for path in snapshots_in(folder):
        Snapshot.read(path).verify()
    assert run_job("--workers", "1", "--servers", "2", "--resume", str(folder), SCRIPT, folder, "check").returncode == 0
