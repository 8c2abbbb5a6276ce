"""Compiled models train as others do, whatever hooks a strategy puts on them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "compiled.py"
TIMEOUT_S = 280.0


def loss(folder: Path, strategy: str, *words: str) -> float:
    """The loss after a run on two workers."""
    command = [sys.executable, "-m", "paceline", "run", "-n", "2", "--quiet", "--strategy", strategy, str(SCRIPT)]
    done = subprocess.run([*command, *words], cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = re.search(r"loss (\d+\.\d+)", done.stdout)
    assert found is not None, done.stdout
    return float(found[1])


def test_hooks_of_all_reduce_are_not_compiled(tmp_path: Path) -> None:
    assert loss(tmp_path, "all-reduce", "eager") == pytest.approx(loss(tmp_path, "all-reduce", "none"), abs=1e-6)


@pytest.mark.campaign
@pytest.mark.parametrize("words", [("bsp",), ("bsp", "overlap"), ("all-reduce",), ("fsdp",)], ids=" ".join)
def test_the_default_compiler_learns_the_same(tmp_path: Path, words: tuple[str, ...]) -> None:
    strategy, *more = words
    plain = loss(tmp_path, strategy, "none", *more)
    assert loss(tmp_path, strategy, "inductor", *more) == pytest.approx(plain, abs=1e-6)


@pytest.mark.campaign
def test_the_default_compiler_learns_under_staleness(tmp_path: Path) -> None:
    assert loss(tmp_path, "ssp:2", "inductor") < 20.0
