"""A long search: kills of servers at any moment, and of those that go on in their place, in jobs of every kind."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = Path(__file__).parents[2] / "benchmarks" / "kills.py"
NUM_KILLS = 20  # in each of twelve jobs, and a fifth of that of processes that have just come up
TIMEOUT_S = 1800.0


@pytest.mark.campaign
@pytest.mark.parametrize("consistency", ["bsp", "ssp:2", "asynchronous"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("servers", ["1", "2"])
def test_no_push_is_lost_or_counts_twice_however_often_servers_are_killed(
    consistency: str, transport: str, servers: str
) -> None:
    options = ["--kills", str(NUM_KILLS), "--consistency", consistency, "--transport", transport, "-m", servers]
    command = [sys.executable, str(KILLS), *options, "--parameters", "0", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["lost"], found["doubled"]) == (0, 0)
    assert found["kills"] >= NUM_KILLS
    assert found["same_bytes"] == (1 if consistency == "bsp" else None)
