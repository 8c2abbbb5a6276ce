"""A namespace is kept by snapshots: its clients go on meanwhile, and jobs and namespaces go on from each other's."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.jobs import job
from tests.serve.daemon import Daemon, daemon

import paceline
from paceline.api.session import Session
from paceline.cli import answer
from paceline.serve import namespace as namespace_module
from paceline.serve.namespace import Namespace
from paceline.snapshots import writing
from paceline.snapshots.folder import Snapshot, newest, snapshots_in
from paceline.snapshots.reading import SavedDense, row_pieces
from paceline.snapshots.writing import CutOfTable, FolderWriter
from paceline.update.rules import RuleSpec
from paceline.worker.rows.table import RowTable
from paceline.worker.table import Table

WAIT_S = 100.0
IDS = torch.arange(100)


class HeldWriter:
    """Holds the thread that writes a snapshot, before its first table, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.began, self.goes_on = threading.Event(), threading.Event()
        real = FolderWriter.add

        def add(writer: FolderWriter, each: CutOfTable) -> None:
            self.threads.append(threading.current_thread().name)
            self.began.set()
            assert self.goes_on.wait(WAIT_S)
            real(writer, each)

        monkeypatch.setattr(FolderWriter, "add", add)


def open_tables(ps: Session) -> tuple[Table, RowTable]:
    dense = ps.table("w", shape=(200,), update=paceline.update.Adam(lr=0.5), scale="sum")
    return dense, ps.table("users", rows=4, update=paceline.update.Adagrad(lr=0.5), scale="sum")


def step(ps: Session, tables: tuple[Table, RowTable]) -> None:
    dense, rows = tables
    dense.push(torch.full((200,), 1.0))
    rows.push(IDS, torch.ones(100, 4))
    ps.clock()


def pulled(tables: tuple[Table, RowTable]) -> tuple[torch.Tensor, torch.Tensor]:
    return tables[0].pull().clone(), tables[1].pull(IDS).clone()


def kept(found: Snapshot) -> tuple[torch.Tensor, torch.Tensor]:
    dense, rows = found.table("w"), found.table("users")
    assert dense is not None
    assert rows is not None
    [(_, values)] = SavedDense(found.folder, dense).values()
    pieces = list(row_pieces(found, rows))
    order = torch.cat([piece.ids for piece in pieces]).argsort()
    return values, torch.cat([piece.values for piece in pieces])[order]


def are_equal(one: tuple[torch.Tensor, ...], other: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def namespace_of(served: Daemon) -> Namespace:
    [namespace] = served.namespaces._open.values()
    return namespace


def save_now(served: Daemon) -> Namespace:
    """Have the next look at the namespace find that a snapshot is due."""
    namespace = namespace_of(served)
    namespace._due_s = 0.0
    return namespace


def wait_for(served: Daemon, num: int) -> Snapshot:
    """Wait until so many snapshots were written."""
    folder, pause = served.state / "namespaces" / "job", threading.Event()
    for _ in range(int(WAIT_S / 0.05)):
        found = snapshots_in(folder)
        if found and int(found[-1].name.removeprefix("snapshot-")) >= num:
            return newest(folder)
        pause.wait(0.05)
    raise AssertionError(f"there was no snapshot {num} after {WAIT_S} s: {served.told.lines}")


def test_clients_go_on_while_a_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = HeldWriter(monkeypatch)
    with daemon(tmp_path / "state", snapshot_every_s=3600.0) as served:
        with served.connect("job") as ps:
            tables = open_tables(ps)
            step(ps, tables)
            before = pulled(tables)
            save_now(served)
            assert held.began.wait(WAIT_S)
            for _ in range(3):
                step(ps, tables)  # while nothing is on disk yet
            after = pulled(tables)
            assert not are_equal(before, after)
            assert not snapshots_in(tmp_path / "state" / "namespaces" / "job")
            held.goes_on.set()
            found = wait_for(served, 1)
            assert are_equal(kept(found), before), "what there was at the cut, and nothing of later"
            assert found.manifest.clock == 1
        served.wait_empty()
        assert are_equal(kept(wait_for(served, 2)), after), "the last one has all"
        assert {name[:18] for name in held.threads} == {"paceline-snapshot-", "paceline-namespace"}
        with served.connect("job") as ps:
            tables = open_tables(ps)
            assert are_equal(pulled(tables), after)
            assert newest(served.state / "namespaces" / "job").manifest.generation < ps.node.settings.sender.generation


def test_after_a_snapshot_that_was_given_up_clients_wait_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWriter(monkeypatch)
    monkeypatch.setattr("paceline.server.dense_table.has_plenty", lambda _: False)
    with daemon(tmp_path / "state", snapshot_every_s=3600.0) as served, served.connect("job") as ps:
        tables = open_tables(ps)
        step(ps, tables)
        save_now(served)
        assert held.began.wait(WAIT_S)
        step(ps, tables)  # which finds no room for what it changes
        pulled(tables)  # so that it is applied
        held.goes_on.set()
        served.told.wait("could not be saved, no snapshot of it is there: a cut was given up")
        step(ps, tables)
        values = pulled(tables)
        save_now(served)
        assert are_equal(kept(wait_for(served, 1)), values)
        assert held.threads[-1].startswith("paceline-namespace"), "on the thread that serves"
        namespace = namespace_of(served)
        assert not namespace._ask(lambda _: namespace._holds_workers, WAIT_S)


def test_an_end_in_the_middle_of_a_snapshot_saves_what_came_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = HeldWriter(monkeypatch)
    with daemon(tmp_path / "state", snapshot_every_s=3600.0) as served:
        ps = served.connect("job")
        tables = open_tables(ps)
        step(ps, tables)
        save_now(served)
        assert held.began.wait(WAIT_S)
        step(ps, tables)
        values = pulled(tables)
        real = namespace_module.wait

        def wait(*asked: Any) -> object:
            held.goes_on.set()  # once the end has begun, and not before
            return real(*asked)

        monkeypatch.setattr(namespace_module, "wait", wait)
        namespace_of(served).close()
        ps.close(politely=False)
    assert are_equal(kept(newest(tmp_path / "state" / "namespaces" / "job")), values)


def test_jobs_and_namespaces_go_on_from_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "state" / "namespaces" / "job"
    for name in ("first", "second"):
        (tmp_path / name).mkdir()

    def train(session: Session) -> tuple[torch.Tensor, torch.Tensor]:
        tables = open_tables(session)
        step(session, tables)
        ends = paceline.snapshot(tmp_path / "kept")
        values = pulled(tables)
        if ends is not None:
            ends.result(WAIT_S)
        return values

    with job(tmp_path / "first", servers=3) as started:
        [values] = started.run(train)
    with daemon(tmp_path / "state") as served:
        folder.mkdir(parents=True)
        shutil.copytree(newest(tmp_path / "kept").folder, folder / "snapshot-1")
        with served.connect("job") as ps:
            tables = open_tables(ps)
            assert are_equal(pulled(tables), values)
            generation = ps.node.settings.sender.generation
            assert generation > 1, "no client of the job is taken for one of this server"
            step(ps, tables)
            values = pulled(tables)
        served.wait_empty()
    assert answer(["snapshot", "verify", str(folder)]) == 0
    assert answer(["snapshot", "show", str(folder)]) == 0
    assert "table users: 100 rows of 4 float32" in capsys.readouterr().out
    manifest = newest(folder).manifest
    assert (manifest.clock, manifest.generation) == (2, generation)
    going_on = {"resume": str(newest(folder).folder), "clock": 2, "generation": generation + 1}
    with job(tmp_path / "second", servers=2, **going_on) as started:
        [found] = started.run(lambda session: pulled(open_tables(session)))
    assert are_equal(found, values)


FAILING = frozenset({"tests.nodes.failing_rules:Dense", "tests.nodes.failing_rules:PositiveRows"})


def open_failing(ps: Session) -> tuple[Table, RowTable]:
    dense = ps.table(
        "own", shape=(8,), update=RuleSpec("tests.nodes.failing_rules:Dense", ({},)), consistency="asynchronous"
    )
    rows = ps.table(
        "own rows", rows=2, update=RuleSpec("tests.nodes.failing_rules:PositiveRows", ({},)), consistency="asynchronous"
    )
    return dense, rows


def pushed(tables: tuple[Table, RowTable], amount: float) -> list[str]:
    """Push to both, and return why that was refused, "" where it was not."""
    dense = tables[0].push(torch.full((8,), amount)).result(WAIT_S)
    rows = tables[1].push(IDS[:3], torch.full((3, 2), amount)).result(WAIT_S)
    return [dense.reason, rows.reason]


@pytest.mark.parametrize("has_links", [True, False])
def test_a_table_whose_update_has_failed_keeps_no_other_from_being_saved(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, asked = tmp_path / "state", list[Path]()

    def refuse(file: Path, _name: Path) -> None:
        asked.append(file)
        raise OSError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(writing, "hard_link", refuse)
    with daemon(state, snapshot_every_s=3600.0, allowed_paths=FAILING) as served:
        with served.connect("job") as ps:
            others, own = open_tables(ps), open_failing(ps)
            assert pushed(own, 1.0) == ["", ""]
            step(ps, others)
            save_now(served)
            wait_for(served, 1)
            assert own[1].push(IDS[2:4], torch.full((2, 2), 4.0)).result(WAIT_S).applied
            step(ps, others)
            save_now(served)
            changed = wait_for(served, 2).table("own rows")
            assert changed is not None
            assert changed.changed_only
            assert all("the rule gives up" in reason for reason in pushed(own, -1.0))
            for number in (3, 4, 5):
                step(ps, others)
                save_now(served)
                found = wait_for(served, number)
            after = pulled(others)
        served.wait_empty()
        assert are_equal(kept(found), after)
    told = [line for line in served.told.lines if "is saved as it was in the snapshot before: " in line]
    assert [line.partition(" is ")[0] for line in told] == [
        "table 'own' of namespace 'job'",
        "table 'own rows' of namespace 'job'",
    ], "each once"
    assert bool(asked) != has_links
    found.verify()
    with daemon(state, allowed_paths=FAILING) as served, served.connect("job") as ps:
        dense, rows = open_failing(ps)
        assert torch.equal(dense.pull(), torch.ones(8))
        assert torch.equal(rows.pull(IDS[:4]), torch.tensor([[1.0], [1.0], [5.0], [4.0]]).expand(4, 2))
        assert are_equal(pulled(open_tables(ps)), after)


def test_a_table_that_failed_before_the_first_snapshot_is_left_out(tmp_path: Path) -> None:
    with daemon(tmp_path / "state", snapshot_every_s=3600.0, allowed_paths=FAILING) as served:
        with served.connect("job") as ps:
            own = open_failing(ps)
            assert all("the rule gives up" in reason for reason in pushed(own, -1.0)[1:])
            others = open_tables(ps)
            step(ps, others)
            after = pulled(others)
        served.wait_empty()
        found = newest(tmp_path / "state" / "namespaces" / "job")
        assert are_equal(kept(found), after)
        assert found.table("own rows") is None
    assert any("table 'own rows' of namespace 'job' is not saved: " in line for line in served.told.lines)
