"""A training step passes no more of Paceline than it does today: bounds that may only go down."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from benchmarks.__main__ import HERE

# Measured: 30 files, 264 functions, 320 calls. A change that shortens the way of a step lowers these.
MAX_FILES = 30
MAX_FUNCTIONS = 268
MAX_CALLS = 322
NUM_TURNS = 3  # a thread that comes late has looked around meanwhile: the shortest of these counts
TURN_TIMEOUT_S = 200


def counted() -> tuple[dict[str, int], str]:
    """The numbers of one count, and all that it has printed."""
    command = [sys.executable, str(HERE / "step_path.py"), "--steps", "15", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TURN_TIMEOUT_S, check=True)
    return json.loads(done.stdout.splitlines()[-1]), done.stdout


def is_within(path: dict[str, int]) -> bool:
    return path["files"] <= MAX_FILES and path["functions"] <= MAX_FUNCTIONS and path["calls"] <= MAX_CALLS


@pytest.mark.timeout(NUM_TURNS * TURN_TIMEOUT_S)
def test_the_way_of_a_step_does_not_grow() -> None:
    path, listed = counted()
    for _ in range(NUM_TURNS - 1):
        if is_within(path):
            break
        path, listed = counted()
    # Both ends are counted: the server runs in a thread of its own.
    for passed in ("training/parameter_server.py", "core/worker.py", "core/server.py", "update/shard.py"):
        assert passed in listed
    assert is_within(path), listed
