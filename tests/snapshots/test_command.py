"""`paceline snapshot`, on a snapshot of a small job."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from tests.jobs import job
from torch.distributed.checkpoint import load as load_distributed

import paceline
from paceline.api.session import Session
from paceline.cli import answer
from paceline.errors import UsageError
from paceline.snapshots.files import write_file
from paceline.snapshots.folder import MANIFEST, SnapshotManifest, SnapshotTable, newest, write_snapshot
from paceline.snapshots.options import SnapshotOptions
from paceline.update.rules import RuleSpec
from paceline.update.table import Segment, TableSpec, encode_table

WAIT_S = 60.0


def learn(session: Session, folder: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = paceline.distributed(torch.optim.Adam(model.parameters(), lr=0.1), model=model)
    rows = session.table("users", rows=2, update=paceline.update.Add())
    for _ in range(2):
        rows.push(torch.tensor([7, 9]), torch.ones(2, 2))
        model(torch.ones(3)).sum().backward()
        optimizer.step()
    ends = paceline.snapshot(folder)
    assert ends is not None
    ends.result(WAIT_S)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "expected.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("snapshots")
    with job(tmp_path_factory.mktemp("job"), servers=2) as started:
        started.run(lambda session: learn(session, made))
    return made


def test_snapshots_are_listed_and_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["snapshot", "ls", str(folder)]) == 0
    assert answer(["snapshot", "show", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "snapshot-1              2" in said
    assert "table model: 8 float32 in 2 tensors, torch.optim.Adam, exp_avg, exp_avg_sq" in said
    assert "table users: 2 rows of 2 float32, add" in said


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_folder_without_snapshots_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert answer(["snapshot", command, str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"paceline: there is no snapshot in {tmp_path}: name a folder")
    assert said.out == ""


def test_names_are_shown_without_what_a_terminal_obeys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fill(unfinished: Path) -> SnapshotManifest:
        spec = TableSpec("w", (Segment("w", (1,)),), "float32", RuleSpec("add", ({},)), "bsp", "mean", "reject")
        table = SnapshotTable("w\x1b[2J", "shape", encode_table(spec), 1, (1,), b"", ("w",), "w", {"m\x1b[2J": "w"})
        return SnapshotManifest(1, 1, 1, 1, (table,), (write_file(unfinished / "w", b""),), written_by="\x1b[2J")

    write_snapshot(tmp_path, fill)
    assert answer(["snapshot", "show", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said
    assert said.count("?[2J") == 3


def test_verify_ends_with_1_for_a_damaged_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(["snapshot", "verify", str(folder)]) == 0
    file = newest(folder).folder / "rows-00002-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content + b"x")
    assert answer(["snapshot", "verify", str(folder)]) == 1
    file.write_bytes(content)
    assert "rows-00002-00000.safetensors is damaged" in capsys.readouterr().out


def test_a_snapshot_that_cannot_be_read_does_not_hide_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = newest(folder).folder
    shutil.copytree(whole, tmp_path / "snapshot-1")
    shutil.copytree(whole, tmp_path / "snapshot-2")
    (tmp_path / "snapshot-1" / MANIFEST).unlink()
    assert answer(["snapshot", "ls", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "snapshot-1       the snapshot" in said
    assert "snapshot-2              2" in said


def test_torch_reads_what_convert_writes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "all"  # torch alone would take no name without a dot
    assert answer(["snapshot", "convert", str(folder), str(out)]) == 0
    found, expected = torch.load(out, weights_only=True), torch.load(folder / "expected.pt", weights_only=True)
    model = torch.nn.Linear(3, 2)
    model.load_state_dict(found["model"])
    assert all(torch.equal(value, expected["model"][name]) for name, value in model.state_dict().items())
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(found["optimizer"]["model"])
    mine, theirs = optimizer.state_dict()["state"], expected["optimizer"]["state"]
    assert all(torch.equal(value, theirs[number][name]) for number in mine for name, value in mine[number].items())
    assert mine.keys() == theirs.keys()
    assert found["rows"]["users"]["values"].tolist() == [[2.0, 2.0]] * 2


@pytest.mark.parametrize("form", ["torch", "dcp", "parquet"])
def test_what_cannot_be_written_is_told_and_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    (tmp_path / "file").touch()
    assert answer(["snapshot", "convert", str(folder), str(tmp_path / "file" / "out"), "--to", form]) == 2
    assert "out cannot be written: Not a directory. Name another place." in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("form", ["torch", "dcp", "parquet"])
def test_a_name_that_no_file_can_have_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    assert answer(["snapshot", "convert", str(folder), str(tmp_path / ("x" * 300)), "--to", form]) == 2
    assert "cannot be written: File name too long. Name another place." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "folder"])
def test_torch_gets_no_folder_for_a_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    assert answer(["snapshot", "convert", str(folder), name]) == 2
    assert "cannot be written: it is there, and is not a file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_rows_are_needed_for_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow")

    def fill(unfinished: Path) -> SnapshotManifest:
        return SnapshotManifest(1, 1, 1, 1, (), (write_file(unfinished / "w", b""),))

    write_snapshot(tmp_path / "made", fill)
    assert answer(["snapshot", "convert", str(tmp_path / "made"), str(tmp_path / "out"), "--to", "parquet"]) == 2
    assert "has no rows, and Parquet takes nothing else" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_distributed_checkpoints_and_parquet_have_the_same_values(folder: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    assert answer(["snapshot", "convert", str(folder), str(tmp_path / "dcp"), "--to", "dcp"]) == 0
    wanted = {"model": {"weight": torch.zeros(2, 3)}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it takes this for a single process, which it is
        load_distributed(wanted, checkpoint_id=tmp_path / "dcp", no_dist=True)
    expected = torch.load(folder / "expected.pt", weights_only=True)["model"]["weight"]
    assert torch.equal(wanted["model"]["weight"], expected)
    assert answer(["snapshot", "convert", str(folder), str(tmp_path / "rows"), "--to", "parquet"]) == 0
    rows = parquet.read_table(tmp_path / "rows" / "rows-00000.parquet").to_pydict()
    assert sorted(rows["ids"]) == [7, 9]
    assert rows["values"] == [[2.0, 2.0]] * 2


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (SnapshotOptions(snapshot_every="10m"), "add --snapshots DIR"),
        (SnapshotOptions(keep=5), "--keep is 5, and nothing says where snapshots go: add --snapshots DIR"),
        (SnapshotOptions(keep=3, resume=Path("x")), "--keep is 3, .*: add --snapshots DIR"),
        (SnapshotOptions(snapshots=Path("x"), snapshot_every="often"), "expected auto, or a time"),
        (SnapshotOptions(snapshots=Path("x"), snapshot_every="-3s"), "expected auto, or a time"),
        (SnapshotOptions(snapshots=Path("x"), keep=0), "--keep is 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: SnapshotOptions, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        options.validate()
