"""Jobs that go on from a snapshot, with the bits of one that was never interrupted."""

import errno
import os
import re
from pathlib import Path
from threading import Barrier, Event, Thread
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from tests.jobs import job, run_job, start_and_join
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.api.session import Session
from paceline.errors import CheckpointError, Refused, UsageError
from paceline.snapshots.converting import to_torch
from paceline.snapshots.files import FileWriter
from paceline.snapshots.folder import Snapshot, SnapshotManifest, newest, snapshots_in
from paceline.snapshots.taking import SavedJob
from paceline.update import cuts
from paceline.worker.cuts import CutReader
from paceline.worker.rows.table import RowTable

WAIT_S = 60.0
NUM_CLOCKS, AT = 12, 5
Bits = list[list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "CHUNK", 128)


def model_of() -> torch.nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(16, 20), torch.nn.BatchNorm1d(20), torch.nn.Linear(20, 3))


def data_of() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(64, 16, generator=generator), torch.randint(0, 3, (64,), generator=generator))


def train(session: Session, rule: type[torch.optim.Optimizer], folder: Path | None) -> list[torch.Tensor]:
    """Train to the last clock, with a snapshot on the way where there is a folder; return all that was learned."""
    model, ends = model_of(), None
    loader = paceline.shard(DataLoader(data_of(), batch_size=8, shuffle=True))
    optimizer = paceline.distributed(rule(model.parameters(), lr=0.05), model=model)
    rows = session.table("rows", rows=4, update=paceline.update.Adam(lr=0.1), init=paceline.first.normal(0.1))
    while session.node.clock < NUM_CLOCKS:
        for images, labels in loader:
            ids = torch.arange(session.node.clock, session.node.clock + 5)
            rows.push(ids, rows.pull(ids) + session.rank)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            if session.node.clock == AT and folder is not None:
                ends = paceline.snapshot(folder, state={"best": 0.5})
            if session.node.clock == NUM_CLOCKS:
                break
    if ends is not None:
        assert ends.result(WAIT_S).parent == folder
    with optimizer.snapshot():
        state = model.state_dict().values()
        found = [value.detach().clone() for value in state if value.is_floating_point()]  # others are on no server
    found.append(rows.pull(torch.arange(NUM_CLOCKS + 5)))
    states = optimizer.state_dict()["state"]
    return [*found, *(value.clone() for each in states.values() for value in each.values())]


def run(directory: Path, rule: type[torch.optim.Optimizer], folder: Path | None = None, **settings: Any) -> Bits:
    directory.mkdir()
    with job(directory, **settings) as started:
        return started.run(lambda session: train(session, rule, folder))


def resuming(folder: Path) -> dict[str, Any]:
    found = newest(folder)
    found.verify()
    return {
        "resume": str(found.folder),
        "clock": found.manifest.clock,
        "generation": found.manifest.generation + 1,
    }


def same(one: Bits, other: Bits) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one[0], other[0], strict=True))


@pytest.mark.parametrize("rule", [torch.optim.Adam, torch.optim.Adadelta])
def test_a_job_that_resumes_ends_with_the_bits_of_one_that_was_never_interrupted(
    rule: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    whole = run(tmp_path / "whole", rule, tmp_path / "snapshots", workers=2, servers=2)
    found = newest(tmp_path / "snapshots").manifest
    assert (found.clock, found.num_servers, found.generation) == (AT, 2, 1)
    for servers in (1, 3):
        after = run(tmp_path / f"{servers}", rule, workers=2, servers=servers, **resuming(tmp_path / "snapshots"))
        assert same(after, whole)


def test_it_goes_on_from_a_snapshot_of_its_own_and_with_other_workers(tmp_path: Path) -> None:
    folder, rule = tmp_path / "snapshots", torch.optim.SGD
    run(tmp_path / "first", rule, folder, workers=2)
    values = torch.arange(4.0)

    def work(session: Session) -> None:
        told = paceline.resumed()
        assert told is not None
        assert (told.clock, told.state, session.node.clock) == (AT, {"best": 0.5}, AT)
        table = session.table("new", shape=(4,), update=paceline.update.Add(), init=values)
        assert table.pull().tolist() == values.tolist(), "it was not there before"
        table.push(torch.ones(4))
        session.clock()
        again = paceline.snapshot(folder, keep=1)
        if session.rank == 0:
            assert again is not None
            again.result(WAIT_S)

    (tmp_path / "second").mkdir()
    with job(tmp_path / "second", workers=3, servers=2, **resuming(folder)) as started:
        started.run(work)
    manifest = newest(folder).manifest
    assert (manifest.clock, manifest.generation, manifest.num_workers) == (AT + 1, 2, 3)
    assert [table.name for table in manifest.tables] == ["new"], "what no worker has opened is not in the job"
    left = sorted(path.name for path in folder.glob("snapshot-*"))
    assert left == ["snapshot-1", "snapshot-2"], "what the job goes on from stays as long as it"


def open_rows(session: Session) -> RowTable:
    return session.table("rows", rows=1, update=paceline.update.Add(), consistency="asynchronous")


def save_rows(directory: Path) -> Path:
    """Make a snapshot of rows of one; return where it lies."""

    def work(session: Session) -> None:
        open_rows(session).push([3, -7], [[1.0], [1.0]]).result(WAIT_S)
        session.clock()
        ends = paceline.snapshot(directory / "snapshots")
        assert ends is not None
        ends.result(WAIT_S)

    (directory / "first").mkdir()
    with job(directory / "first") as started:
        started.run(work)
    return directory / "snapshots"


def test_the_next_life_of_a_worker_meets_the_others_at_rows_that_are_opened_late(tmp_path: Path) -> None:
    folder, found = save_rows(tmp_path), dict[int, float]()
    (tmp_path / "second").mkdir()
    with job(tmp_path / "second", workers=2, servers=2, **resuming(folder)) as started, started.join(0) as first:
        started.kill(started.join(1))
        with started.join(1, incarnation=1) as second:

            def live(session: Session) -> None:
                found[session.rank] = float(open_rows(session).pull([3]))

            start_and_join([Thread(target=live, args=(session,), daemon=True) for session in (first, second)])
    assert found == {0: 1.0, 1: 1.0}


def test_rows_of_a_snapshot_are_loaded_once_by_whichever_life_opens_their_table_first(tmp_path: Path) -> None:
    folder = save_rows(tmp_path)
    (tmp_path / "second").mkdir()
    with job(tmp_path / "second", servers=2, **resuming(folder)) as started:
        started.kill(started.join(0))
        second = started.join(0, incarnation=1)
        table = open_rows(second)
        assert table.pull([3, -7]).tolist() == [[1.0], [1.0]], "its former life had not opened it"
        table.push([3], [[10.0]]).result(WAIT_S)
        started.kill(second, incarnation=1)
        with started.join(0, incarnation=2) as third:
            assert open_rows(third).pull([3, -7]).tolist() == [[11.0], [1.0]], "its former life had pushed to it"


def test_its_files_open_without_paceline_under_the_names_of_the_model(tmp_path: Path) -> None:
    import json

    folder = tmp_path / "snapshots"
    run(tmp_path / "first", torch.optim.Adam, folder, workers=1, servers=3)
    found = newest(folder).folder
    index = json.loads((found / "model.safetensors.index.json").read_text())["weight_map"]
    shapes = {name: tuple(value.shape) for name, value in model_of().state_dict().items() if value.is_floating_point()}
    assert index.keys() == shapes.keys()
    values = {}
    for file in set(index.values()):
        with safe_open(found / file, framework="pt") as opened:
            values |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
    assert {name: tuple(value.shape) for name, value in values.items()} == shapes
    model_of().load_state_dict(values, strict=False)
    with safe_open(found / "optimizer-00001-exp_avg.safetensors", framework="pt") as opened:
        assert tuple(opened.get_tensor("0.weight.exp_avg").shape) == (20, 16)


def test_another_model_and_a_damaged_file_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    run(tmp_path / "first", torch.optim.SGD, folder, workers=1)

    def work(session: Session) -> None:
        with pytest.raises(UsageError, match=r"differs from the one in the snapshot .* the shape|parameter 0"):
            paceline.distributed(torch.optim.SGD(torch.nn.Linear(3, 3).parameters(), lr=0.1))

    (tmp_path / "second").mkdir()
    with job(tmp_path / "second", **resuming(folder)) as started:
        started.run(work)
    file = next(newest(folder).folder.glob("model-*.safetensors"))
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes((content[-1] ^ 1,)))
    with pytest.raises(CheckpointError, match="is damaged"):
        Snapshot.read(newest(folder).folder).verify()


def test_a_full_disk_is_said_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(_: FileWriter, _bytes: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work(session: Session) -> None:
        table = session.table("w", shape=(6,), update=paceline.update.Add())
        table.push(torch.ones(6))
        session.clock()
        with monkeypatch.context() as patched:
            patched.setattr(FileWriter, "write", write)
            error = paceline.snapshot(tmp_path / "snapshots").exception(WAIT_S)
        assert isinstance(error, CheckpointError)
        assert re.search(
            r"of clock 1 was not written to .*snapshots: No space left on device. Those before", str(error)
        )
        table.push(torch.ones(6))
        session.clock()
        assert paceline.snapshot(tmp_path / "snapshots").result(WAIT_S).exists()

    (tmp_path / "job").mkdir()
    with job(tmp_path / "job") as started:
        started.run(work)


@pytest.mark.parametrize("consistency", ["ssp:1", "essp:1", "asynchronous", "backup:1", "bound=none,visible=on_clock"])
def test_under_every_policy_a_snapshot_is_made_while_workers_push(consistency: str, tmp_path: Path) -> None:
    def work(session: Session) -> None:
        table = session.table("w", shape=(600,), update=paceline.update.Add(), consistency=consistency)
        ends = None
        for clock in range(6):
            table.push(torch.ones(600))
            session.clock()
            table.pull()
            if clock == 2:
                ends = paceline.snapshot(tmp_path / "snapshots")
        if ends is not None:
            error = ends.exception(WAIT_S)
            assert error is None or (consistency == "backup:1" and "cannot be cut at clock" in str(error))

    (tmp_path / "job").mkdir()
    with job(tmp_path / "job", workers=2, servers=2) as started:
        started.run(work)
    if consistency != "backup:1":
        found = newest(tmp_path / "snapshots")
        found.verify()
        (table,) = found.manifest.tables
        assert sum(table.versions) >= (0 if consistency == "asynchronous" else 2 * 3)  # updates of two servers


@pytest.mark.parametrize("is_mixed", [False, True], ids=["", "beside bsp"])
def test_a_worker_that_a_quorum_has_left_behind_takes_its_snapshot_of_the_clock_that_they_have_reached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, is_mixed: bool
) -> None:
    others_are_ahead, is_taken = Barrier(3), Event()

    def work(session: Session) -> None:
        add, late = paceline.update.Add(), "backup:1"
        dense = session.table("w", shape=(600,), update=add, consistency=late, scale="sum")
        rows = session.table("users", rows=1, update=add, consistency=late, scale="sum")
        session.table("free", shape=(6,), update=add, consistency="asynchronous").push(torch.ones(6)).result(WAIT_S)
        if is_mixed:
            session.table("all", shape=(6,), update=add)
        session.barrier()
        if session.rank == 0:
            session.snapshots.take_planned([])
            session.snapshots._wait_last()
        session.barrier()
        while session.rank > 0 and session.node.clock < AT:
            dense.push(torch.ones(600))
            rows.push([session.node.clock], [[1.0]])
            session.clock()
            dense.pull()
        others_are_ahead.wait(WAIT_S)
        if session.rank == 0:
            session.clock()
            session.snapshots.take_planned([])
            session.snapshots._wait_last()
            is_taken.set()
        assert is_taken.wait(WAIT_S)

    (tmp_path / "job").mkdir()
    folder = tmp_path / "snapshots"
    with job(tmp_path / "job", workers=3, servers=2, snapshots=str(folder), snapshot_every_s=3600.0) as started:
        started.run(work)
    assert [Snapshot.read(path).manifest.clock for path in snapshots_in(folder)] == ([0] if is_mixed else [0, AT])
    said = capsys.readouterr().err
    assert ("no snapshot was made, the one before counts" in said) == is_mixed
    assert ("cannot be cut at clock 1 any more" in said) == is_mixed
    if not is_mixed:
        found = newest(folder)
        found.verify()
        assert {table.name: table.clock for table in found.manifest.tables if table.name != "free"} == {
            "w": AT,
            "users": AT,
        }
        with safe_open(folder / "snapshot-2" / "model-00001-of-00002.safetensors", "pt") as file:
            assert file.get_tensor("w").tolist() == [2.0 * AT] * 600


def test_where_no_snapshot_is_there_none_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def work(session: Session) -> None:
        session.table("w", shape=(6,), update=paceline.update.Add())
        for is_full in (True, False, True):
            with monkeypatch.context() as patched:
                if is_full:
                    patched.setattr(FileWriter, "write", write)
                session.snapshots.take_planned([])
                session.snapshots._wait_last()

    (tmp_path / "job").mkdir()
    with job(tmp_path / "job", snapshots=str(tmp_path / "snapshots"), snapshot_every_s=3600.0) as started:
        started.run(work)
    told = [line for line in capsys.readouterr().err.splitlines() if "no snapshot was made" in line]
    assert [line.split(", ")[1] for line in told] == ["there is none yet", "the one before counts"]


@pytest.mark.parametrize(("every_s", "said"), [(3600.0, "in 3600 s"), (0.3, "in 0.3 s")])
def test_training_goes_on_where_the_system_has_no_thread_that_writes_a_snapshot(
    every_s: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start = Thread.start

    def refuse(thread: Thread) -> None:
        if thread.name.startswith("paceline-snapshot"):
            raise RuntimeError("can't start new thread")
        start(thread)

    def work(session: Session) -> None:
        session.table("w", shape=(6,), update=paceline.update.Add())
        with monkeypatch.context() as patched:
            patched.setattr(Thread, "start", refuse)
            session.snapshots.take_planned([])
        with pytest.raises(Refused, match="has no cut of table 'w'"):
            list(CutReader(session.node, "w", []).pieces(0, 1))
        session.snapshots.take_planned([])
        session.snapshots._wait_last()

    (tmp_path / "job").mkdir()
    with job(tmp_path / "job", snapshots=str(tmp_path / "snapshots"), snapshot_every_s=every_s) as started:
        started.run(work)
    told = [line for line in capsys.readouterr().err.splitlines() if "no snapshot was made" in line]
    assert [line.split(": ")[-1] for line in told] == ["can't start new thread. Those before it are whole."]
    assert f"the next is due {said}: " in told[0]
    assert len(snapshots_in(tmp_path / "snapshots")) == 1


def test_the_state_of_a_scheduler_comes_back_as_it_was(tmp_path: Path) -> None:
    def schedulers() -> list[Any]:
        optimizer = torch.optim.SGD(model_of().parameters(), lr=1.0)
        chosen = torch.optim.lr_scheduler
        return [chosen.MultiStepLR(optimizer, [2, 4]), chosen.ReduceLROnPlateau(optimizer)]

    given = [each.state_dict() for each in schedulers()]

    def save(session: Session) -> None:
        session.table("w", shape=(6,), update=paceline.update.Add())
        ends = paceline.snapshot(tmp_path / "snapshots", state={"schedulers": given, "best": float("-inf")})
        assert ends is not None
        ends.result(WAIT_S)

    def go_on(_: Session) -> None:
        told = paceline.resumed()
        assert told is not None
        assert told.state == {"schedulers": given, "best": float("-inf")}
        steps, _ = schedulers()
        steps.load_state_dict(told.state["schedulers"][0])
        for _ in range(4):
            steps.optimizer.step()
            steps.step()
        assert steps.get_last_lr() == pytest.approx([0.01])

    run_job(_made(tmp_path / "first"), save)
    run_job(_made(tmp_path / "second"), go_on, **resuming(tmp_path / "snapshots"))


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_a_state_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    manifest = SnapshotManifest(1, 1, 1, 1, (), (), state=msgspec.Raw(b'{"best": 0.5}'))
    assert SavedJob(Snapshot(tmp_path, manifest)).resumed.state == {"best": 0.5}
    with pytest.raises(CheckpointError, match="the state of the script in a snapshot cannot be read"):
        SavedJob(Snapshot(tmp_path, msgspec.structs.replace(manifest, packed_state=b"\xc1")))


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    endless = list[Any]()
    endless.append(endless)

    def work(session: Session) -> None:
        session.table("w", shape=(6,), update=paceline.update.Add())
        for state in (torch.ones(1), 1 << 64, endless):
            with pytest.raises(UsageError, match="the state for a snapshot cannot be written"):
                paceline.snapshot(tmp_path / "snapshots", state=state)

    run_job(_made(tmp_path / "job"), work)


def test_a_table_that_a_resumed_job_begins_anew_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def save(session: Session) -> None:
        session.table("model", shape=(6,), update=paceline.update.Add())
        open_rows(session)
        ends = paceline.snapshot(tmp_path / "snapshots")
        assert ends is not None
        ends.result(WAIT_S)

    def go_on(session: Session) -> None:
        open_rows(session)
        session.table("model.0", shape=(6,), update=paceline.update.Add())
        session.table("more", rows=1, update=paceline.update.Add())

    run_job(_made(tmp_path / "first"), save)
    assert "begins anew" not in capsys.readouterr().err
    run_job(_made(tmp_path / "second"), go_on, workers=2, **resuming(tmp_path / "snapshots"))
    told = capsys.readouterr().err
    for name in ("model.0", "more"):
        assert told.count(f"table '{name}' is not in the snapshot that this job goes on from, and begins anew") == 1
    assert told.count("begins anew: that has 'model', 'rows'") == 2


OTHERWISE: dict[str, dict[str, Any]] = {
    "all-reduce": {"strategy": "all-reduce"},
    "groups": {"strategy": {"0.*": "bsp", "*": "all-reduce"}},
    "overlap": {"overlap": True},
}


@pytest.mark.parametrize("options", OTHERWISE.values(), ids=OTHERWISE)
def test_an_optimizer_that_takes_nothing_of_a_snapshot_is_refused(
    options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "snapshots"
    run(tmp_path / "first", torch.optim.SGD, folder, workers=1)

    def go_on(session: Session) -> None:
        model = model_of()
        refused = (
            rf"'model': the snapshot {newest(folder).folder} .* has table 'model', and this strategy takes nothing .*"
            "paceline snapshot convert"
        )
        with pytest.raises(UsageError, match=refused):
            paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model, **options)

    run_job(_made(tmp_path / "second"), go_on, **resuming(folder))
    told = re.findall(r"no worker has opened (.*) of the snapshot", capsys.readouterr().err)
    assert len(told) == 1
    assert "'model'" in told[0]
    assert "'rows'" in told[0]


@pytest.mark.parametrize("strategy", ["bsp", {"0.*": "bsp", "*": "all-reduce"}], ids=["bsp", "groups"])
def test_a_part_of_groups_that_is_kept_in_workers_now_is_refused(strategy: Any, tmp_path: Path) -> None:
    def distribute(session: Session, strategy: Any) -> None:
        model = model_of()
        paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model, strategy=strategy)
        session.clock()

    def save(session: Session) -> None:
        distribute(session, {"0.*": "bsp", "*": "ssp:1"})
        made = paceline.snapshot(tmp_path / "snapshots")
        assert made is not None
        made.result(WAIT_S)

    def go_on(session: Session) -> None:
        owner = "'model'" if strategy == "bsp" else r"'model\.\*'"
        with pytest.raises(UsageError, match=f"worker 0, {owner}: the snapshot"):
            distribute(session, strategy)

    run_job(_made(tmp_path / "first"), save)
    run_job(_made(tmp_path / "second"), go_on, **resuming(tmp_path / "snapshots"))


def test_an_optimizer_of_another_name_loads_what_a_snapshot_has_under_any_strategy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = tmp_path / "snapshots", tmp_path / "model.pt"
    run(tmp_path / "first", torch.optim.Adam, folder, workers=1)
    to_torch(newest(folder), file)
    saved = torch.load(file, weights_only=True)

    def go_on(session: Session) -> None:
        model = model_of()
        model.load_state_dict(saved["model"], strict=False)
        plain = torch.optim.Adam(model.parameters())
        optimizer = paceline.distributed(plain, model=model, strategy="all-reduce", name="again")
        optimizer.load_state_dict(saved["optimizer"]["model"])
        assert all(torch.equal(saved["model"][name], own) for name, own in model.named_parameters())
        states = optimizer.state_dict()["state"]
        for number, of in saved["optimizer"]["model"]["state"].items():
            assert all(torch.equal(value, states[number][key]) for key, value in of.items())

    run_job(_made(tmp_path / "second"), go_on, **resuming(folder))
    assert capsys.readouterr().err.count("no worker has opened") == 1


def test_tables_beside_an_optimizer_that_workers_keep_are_no_part_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(session: Session) -> None:
        model = model_of()
        paceline.distributed(torch.optim.SGD(model.parameters(), lr=0.1), model=model, strategy="all-reduce")
        session.table("model.steps", shape=(1,), update=paceline.update.Add())
        open_rows(session)
        made = paceline.snapshot(tmp_path / "snapshots")
        assert made is None or made.result(WAIT_S)

    run_job(_made(tmp_path / "first"), work)
    run_job(_made(tmp_path / "second"), work, **resuming(tmp_path / "snapshots"))
    assert "snapshot" not in capsys.readouterr().err


@pytest.mark.parametrize("kind", [{"shape": (2,)}, {"rows": 2}])
def test_a_job_with_very_many_tables_is_saved(tmp_path: Path, kind: dict[str, Any]) -> None:
    """All are asked for before the first answer has come."""

    def work(session: Session) -> list[str]:
        rule = paceline.update.Add()
        tables = [session.table(f"t{number}", update=rule, **kind) for number in range(150)]
        if "rows" in kind:
            for table in tables:
                table.push([1], [[1.0, 2.0]])
        session.clock()
        made = paceline.snapshot(tmp_path / "saved").result(WAIT_S)
        session.clock()
        return [each.name for each in Snapshot.read(made).manifest.tables]

    assert run_job(tmp_path, work) == [[f"t{number}" for number in range(150)]]
