"""What this process finds of those that have fallen to it."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.forkserver import subreaper


def test_a_thread_that_ends_while_children_are_looked_for_hides_none(monkeypatch: pytest.MonkeyPatch) -> None:
    glob = Path.glob

    def first_with_one_that_has_ended(folder: Path, pattern: str) -> Iterator[Path]:
        monkeypatch.setattr(Path, "glob", glob)
        yield folder / "0" / "children"  # whose children have come to a thread that was looked at before, say

    monkeypatch.setattr(Path, "glob", first_with_one_that_has_ended)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert child.pid in subreaper._children()
        assert child.stdin is not None
        child.stdin.close()
