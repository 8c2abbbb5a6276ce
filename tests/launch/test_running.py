import os
import time
from pathlib import Path

import pytest

from paceline.cli import answer
from paceline.errors import UsageError
from paceline.launch.guard import NUM_KEPT, Guard, keep_records
from paceline.launch.running import find_run, last_run, running


def run_with_records(place: Path, name: str = "paceline-abc1") -> Path:
    folder = place / name
    (folder / "trace").mkdir(parents=True)
    (folder / "trace" / "worker-0.jsonl").write_text("{}\n")
    (folder / "token").write_text("secret")
    return folder


def test_the_guard_of_a_run_keeps_its_records_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "state" / "paceline" / "runs"
    folder = run_with_records(tmp_path)
    guard = Guard(folder, temporary=True, keep_in=kept)
    guard.dismiss(60)
    assert not folder.exists()
    (found,) = kept.iterdir()
    assert [path.name for path in found.iterdir()] == ["trace"]
    assert (found / "trace" / "worker-0.jsonl").read_text() == "{}\n"
    assert found.stat().st_mode & 0o77 == 0
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PACELINE_KEEP_RUNS", "1")
    assert last_run() == found


def test_the_oldest_records_go_and_other_files_stay(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "notes.txt").write_text("mine")
    for number in range(NUM_KEPT + 3):
        assert keep_records(run_with_records(tmp_path, f"paceline-{number:03}"), kept, 1e9 + number) is not None
    names = sorted(path.name for path in kept.iterdir())
    assert len(names) == NUM_KEPT + 1
    assert names[0].endswith("-003")
    assert "notes.txt" in names


def test_a_run_without_records_and_a_place_that_cannot_be_written_keep_nothing(tmp_path: Path) -> None:
    empty = tmp_path / "paceline-empty"
    (empty / "trace").mkdir(parents=True)
    (empty / "trace" / "worker-0.jsonl").touch()
    assert keep_records(empty, tmp_path / "kept") is None
    assert not (tmp_path / "kept").exists()
    (tmp_path / "file").touch()
    folder = run_with_records(tmp_path)
    assert keep_records(folder, tmp_path / "file" / "kept") is None
    assert (folder / "trace" / "worker-0.jsonl").exists()


def test_a_run_is_found_by_its_guard_while_it_lasts(tmp_path: Path) -> None:
    folder = run_with_records(tmp_path)
    os.utime(folder / "trace", (time.time() + 1000,) * 2)
    guard = Guard(folder, temporary=False)
    try:
        deadline_s = time.monotonic() + 30.0
        while folder not in running():  # a process has no words yet for a moment while it begins
            assert time.monotonic() < deadline_s
        assert find_run(None) == folder
    finally:
        guard.dismiss(60)
    assert folder not in running()


def test_without_a_run_the_message_says_what_to_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("PACELINE_KEEP_RUNS", "1")
    with pytest.raises(UsageError, match="name the folder of a run"):
        last_run()


def test_the_records_of_a_run_are_drawn_told_and_written_for_perfetto(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.observe.stories import story
    from tests.observe.test_screen import write

    write(tmp_path / "run", story())
    assert answer(["trace", str(tmp_path / "run"), "--to", str(tmp_path / "trace.json")]) == 0
    assert (tmp_path / "trace.json").read_text().startswith('{"traceEvents":[')
    assert answer(["report", str(tmp_path / "run"), "--last"]) == 0
    told = capsys.readouterr().out
    assert "its last steps: healthy" in told
    assert "worker-1" in told
    assert answer(["report", str(tmp_path / "run"), "--to", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "report.html").exists()
