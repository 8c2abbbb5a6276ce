"""The tour of mistakes: each is told, ends with the exit code that is promised, and leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOUR = Path(__file__).parents[2] / "examples" / "careless.py"


def tour(folder: Path, *names: str, timeout_s: float) -> str:
    """What it prints, once everything in it was told."""
    done = subprocess.run(
        [sys.executable, str(TOUR), *names],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(folder.iterdir()) == []
    assert "Warning" not in done.stdout  # of Python, which would stand above every message
    return done.stdout


def test_some_mistakes_are_told(tmp_path: Path) -> None:
    assert "2 of 2 mistakes were told" in tour(tmp_path, "clock", "killed", timeout_s=200)


@pytest.mark.campaign
@pytest.mark.timeout(600)
def test_all_mistakes_are_told(tmp_path: Path) -> None:
    assert "11 of 11 mistakes were told" in tour(tmp_path, timeout_s=600)
