"""The types of the package hold in scripts of users, for more than the checker that the package is written with."""

from __future__ import annotations

import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest

import paceline

SCRIPT = Path(__file__).with_name("script.py")


def test_the_package_says_that_it_has_types() -> None:
    assert Path(paceline.__file__).with_name("py.typed").is_file()


@pytest.mark.campaign
@pytest.mark.skipif(util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_finds_nothing_in_a_script(tmp_path: Path) -> None:
    options = ["--strict", "--untyped-calls-exclude=torch", f"--cache-dir={tmp_path}"]
    done = subprocess.run([sys.executable, "-m", "mypy", *options, str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
