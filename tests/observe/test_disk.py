"""What took the room on the disk of a run."""

import os
from pathlib import Path

import pytest
from tests.observe.stories import story

from paceline.observe import story as story_of_run
from paceline.observe.disk import DiskUse, look_at_disk
from paceline.observe.progress import RunView
from paceline.observe.story import story_lines
from paceline.observe.trace import ENDED, Trace, trace_path


def run_of(folder: Path) -> Path:
    """Return the folder of a run whose records have ended, in which a file of the script's is the largest."""
    with Trace(trace_path(folder, "worker", 0)) as trace:
        for record in story(1):
            trace.record(record)
    (folder / "trace" / ENDED).touch()
    (folder / "saved" / "deep").mkdir(parents=True)
    (folder / "saved" / "deep" / "model").write_bytes(os.urandom(3_000_000))
    (folder / "filling").write_bytes(os.urandom(2_000_000))
    return folder


def test_the_largest_files_and_folders_are_named_with_all_in_them(tmp_path: Path) -> None:
    found = look_at_disk(run_of(tmp_path))
    assert found is not None
    assert [name for name, _ in found.largest] == ["saved/", "filling"]
    assert found.largest[0][1] >= 3_000_000
    assert found.of_run_bytes >= 5_000_000
    assert found.total_bytes >= found.free_bytes


def test_links_are_not_followed_and_a_folder_that_is_gone_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "elsewhere").symlink_to("/usr")
    found = look_at_disk(tmp_path / "run")
    assert found is not None
    assert found.of_run_bytes < 1_000_000
    assert look_at_disk(tmp_path / "none") is None


def test_a_run_that_has_little_of_a_full_disk_says_so() -> None:
    use = DiskUse(0, 500_000_000_000, 904_000, (("trace/", 904_000),))
    assert use.text == "0 MB of 500.0 GB are free, and this run takes 0.9 MB of it: trace/ takes 0.9 MB"
    assert DiskUse(5, 10, 0, ()).text == "0 MB of 0 MB are free"


def test_the_screen_and_the_story_of_a_run_name_what_took_the_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = RunView(run_of(tmp_path) / "trace")
    view.refresh(0.0)
    assert "saved/ takes 3.0 MB, filling 2.0 MB" in view.verdict().text
    told = "\n".join(story_lines(tmp_path))
    assert "records ended early" in told
    assert "saved/ takes 3.0 MB" in told
    monkeypatch.setattr(story_of_run, "look_at_disk", lambda _: None)
    assert "records ended early, as the disk was full or a limit of files was reached" in story_lines(tmp_path)
