"""What the environment asks about snapshots, under launchers that have no options of Paceline's."""

from pathlib import Path

import pytest

from paceline.errors import CheckpointError, UsageError
from paceline.job.spec import ClusterSpec
from paceline.launch.snapshots import options_of_environment, with_snapshots
from paceline.snapshots.folder import MANIFEST, SnapshotManifest, write_snapshot


def spec_as_asked(folder: Path, monkeypatch: pytest.MonkeyPatch, **variables: str) -> ClusterSpec:
    for name in ("PACELINE_SNAPSHOTS", "PACELINE_SNAPSHOT_EVERY", "PACELINE_RESUME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    spec = ClusterSpec(job="3f", num_workers=2, num_servers=1, transport="shm", run_dir=str(folder))
    return with_snapshots(spec, options_of_environment())


def test_variables_are_as_the_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not spec_as_asked(tmp_path, monkeypatch).snapshots
    kept = str(tmp_path / "kept")
    spec = spec_as_asked(tmp_path, monkeypatch, PACELINE_SNAPSHOTS=kept, PACELINE_SNAPSHOT_EVERY="90s")
    assert (spec.snapshots, spec.snapshot_every_s, spec.resume) == (kept, 90.0, "")


def test_a_job_begins_anew_where_it_is_to_go_on_from_its_own_snapshots_and_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kept in (tmp_path / "missing", tmp_path):
        own = {"PACELINE_SNAPSHOTS": str(kept), "PACELINE_RESUME": str(kept)}
        assert spec_as_asked(tmp_path, monkeypatch, **own).resume == ""


def test_jobs_that_go_on_from_one_snapshot_are_of_different_generations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = SnapshotManifest(clock=5, generation=3, num_workers=2, num_servers=1, tables=(), files=())
    write_snapshot(tmp_path, lambda unfinished: held)
    specs = [spec_as_asked(tmp_path, monkeypatch, PACELINE_RESUME=str(tmp_path)) for _ in range(2)]
    assert [spec.clock for spec in specs] == [5, 5]
    assert held.generation < specs[0].generation != specs[1].generation > held.generation


def test_where_the_newest_snapshot_is_damaged_the_one_before_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = SnapshotManifest(clock=5, generation=3, num_workers=2, num_servers=1, tables=(), files=())
    first, second = (write_snapshot(tmp_path, lambda unfinished: held).folder for _ in range(2))
    (second / MANIFEST).write_text("{}")
    with pytest.raises(CheckpointError, match=f"name it: --resume {first}"):
        spec_as_asked(tmp_path, monkeypatch, PACELINE_RESUME=str(tmp_path))
    assert spec_as_asked(tmp_path, monkeypatch, PACELINE_RESUME=str(first)).clock == 5
    with pytest.raises(CheckpointError) as named:
        spec_as_asked(tmp_path, monkeypatch, PACELINE_RESUME=str(second))
    assert "--resume" not in str(named.value)


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"PACELINE_RESUME": "HERE"}, "there is no snapshot in .*: name a folder"),
        ({"PACELINE_SNAPSHOT_EVERY": "10m"}, "nothing says where snapshots go"),
        ({"PACELINE_SNAPSHOTS": "HERE", "PACELINE_SNAPSHOT_EVERY": "soon"}, "is 'soon', expected auto, or a time"),
        ({"PACELINE_SNAPSHOTS": "/proc/none"}, "--snapshots: no files can be made in /proc/none: No such file"),
        ({"PACELINE_SNAPSHOTS": __file__}, "--snapshots: no files can be made in .*py: File exists"),
    ],
)
def test_what_makes_no_sense_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], problem: str
) -> None:
    here = {name: value.replace("HERE", str(tmp_path)) for name, value in variables.items()}
    with pytest.raises(UsageError, match=problem):
        spec_as_asked(tmp_path, monkeypatch, **here)
