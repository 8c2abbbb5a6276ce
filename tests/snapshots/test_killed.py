"""A job of real processes that is killed as a whole goes on from its snapshot, to the bytes of a run without a kill."""

import signal
import sys
from pathlib import Path

import pytest
from tests.launch.warm import run_job

from paceline.snapshots.folder import newest

SCRIPT = Path(__file__).with_name("scripts") / "train.py"


def run(out: Path, *options: str, folder: Path, mode: str) -> int:
    return run_job("--workers", "2", *options, SCRIPT, folder, out, mode).returncode


@pytest.mark.skipif(sys.platform != "linux", reason="processes end with their launcher on Linux alone")
def test_a_job_that_is_killed_as_a_whole_resumes_with_the_bytes_of_the_uninterrupted_run(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    assert run(tmp_path / "whole", folder=folder, mode="run") == 0
    assert run(tmp_path / "killed", "--servers", "2", folder=folder, mode="kill") == -signal.SIGKILL
    assert not (tmp_path / "killed").exists()
    newest(folder).verify()
    assert run(tmp_path / "resumed", "--servers", "3", "--resume", str(folder), folder=folder, mode="run") == 0
    assert (tmp_path / "resumed").read_text() == (tmp_path / "whole").read_text()
