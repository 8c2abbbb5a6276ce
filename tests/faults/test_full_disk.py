"""A disk that is full when a command begins: it is named, and nothing is left that would be in the way next time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.cli import answer
from paceline.job.spec import write_private

PAGE_BYTES = 4096
ADVICE = (
    "No space left on device; free some space, or name another folder (TMPDIR, --run-dir, PACELINE_RUN_DIR, --state, "
    "--views)"
)


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder of a file system of its own, which holds names and not a byte more."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={PAGE_BYTES}", "tmpfs", str(tmp_path)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    try:
        (tmp_path / "fill").write_bytes(bytes(PAGE_BYTES))
        yield tmp_path
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_private_file_appears_whole_or_not_at_all(full: Path) -> None:
    with pytest.raises(OSError, match=rf"No space left on device: '{full / 'token'}'"):
        write_private(full / "token", bytes(32))
    (full / "fill").unlink()
    write_private(full / "token", bytes(32))
    assert [path.name for path in full.iterdir()] == ["token"]


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (("keys", "make", "{}/keys"), "keys/authority.key: {}"),
        (("serve", "--listen", "127.0.0.1:0", "--state", "{}/state"), "state/lock: {}"),
        (("run", "--quiet", "-n", "1", "--run-dir", "{}/run", __file__), "run/token: {}"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_the_file_is_named_and_the_command_can_be_repeated(
    command: tuple[str, ...], named: str, full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert answer([word.format(full) for word in command]) == 1
        assert capsys.readouterr().err == f"paceline: {full}/{named.format(ADVICE)}\n"


def test_a_batch_script_that_cannot_be_written_is_not_there(full: Path) -> None:
    for _ in range(2):
        assert answer(["launch", "--emit", "slurm", "--out", str(full / "job.sbatch"), __file__]) == 2
    assert not (full / "job.sbatch").exists()
