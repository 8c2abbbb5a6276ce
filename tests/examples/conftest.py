"""Runs examples alone, forked from a process that has imported torch."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.launch.warm import start_module

from paceline.job.environment import child_environment

EXAMPLES = Path(__file__).parents[2] / "examples"

Alone = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def alone() -> Alone:
    """Runs an example of this name, with these arguments, to its end."""
    environment = {**child_environment(1, 1), "OMP_NUM_THREADS": "1"}

    def run(name: str, *args: str | Path) -> subprocess.CompletedProcess[str]:
        words = (str(EXAMPLES / name), *map(str, args))
        started = start_module("paceline.launch.worker", *words, environment=environment)
        with started.stdout, started.stderr:
            told, complained = started.stdout.read().decode(), started.stderr.read().decode()
        return subprocess.CompletedProcess(words, started.wait(), told, complained)

    return run
