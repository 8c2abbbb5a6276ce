"""A training step passes no more of Paceline than it does today: bounds that may only go down."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.__main__ import HERE

# Measured: 43 files, 249 functions, 301 calls; some more where other programs use the cores. A change that shortens the
# way of a step lowers these.
MAX_FILES = 47
MAX_FUNCTIONS = 275
MAX_CALLS = 330


def test_the_way_of_a_step_does_not_grow() -> None:
    command = [sys.executable, str(HERE / "step_path.py"), "--steps", "15", "--list"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    *listed, last = done.stdout.splitlines()
    path = json.loads(last)
    # Both ends are counted: the server runs in a thread of its own.
    for passed in ("training/parameter_server.py", "core/worker.py", "core/server.py", "update/shard.py"):
        assert any(passed in line for line in listed), passed
    assert path["files"] <= MAX_FILES, done.stdout
    assert path["functions"] <= MAX_FUNCTIONS, done.stdout
    assert path["calls"] <= MAX_CALLS, done.stdout
