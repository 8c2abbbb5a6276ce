"""Collective calls among real processes: one that dies, calls that do not match, and what travels."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.faults.running import run_to_end, went_on_without

from paceline.errors import EXIT_LOST

SCRIPTS = Path(__file__).with_name("scripts")


def test_calls_that_do_not_match_and_a_worker_that_dies_are_told_by_name(tmp_path: Path) -> None:
    code, run = run_to_end(tmp_path / "run", SCRIPTS / "perils.py", options=("-n", "3"))

    assert code == EXIT_LOST, run.output
    assert "Traceback" not in run.output
    for what, words, times in (
        ("shape: UsageError", "all_reduce (sum) of float32 (3,) from worker 1", 2),
        ("shape: UsageError", "worker 1, call 2: expected all_reduce (sum) of float32 (3,) of every worker", 1),
        ("pattern: UsageError", "got broadcast of float32 (2,) from worker 0 from worker 1", 2),
        ("death: PeerError", "worker 2 is gone", 2),
        ("after: PeerError", "an earlier call has failed", 2),
    ):
        assert len([line for line in run.saying(what) if words in line]) == times, run.output
    assert run.told() == went_on_without("worker 2")


@pytest.mark.parametrize("asked", ["gloo", "shm"])
def test_the_launcher_can_say_all_reduce_and_a_ring_or_nothing_travels(
    tmp_path: Path, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_workers = 3
    monkeypatch.setenv("PACELINE_COLLECTIVES", asked)
    options = ("-n", str(num_workers), "--strategy", "all-reduce")
    code, run = run_to_end(tmp_path / "run", SCRIPTS / "ring.py", "later", options=options)

    assert code == 0, run.output
    assert run.told() == [], run.output
    learned = {line.split("learned ")[1] for line in run.wait_for("learned", num_workers)}
    assert len(learned) == 1, run.output
    assert "ReplicatedOptimizer" in learned.pop()
    for line in run.wait_for("of a ring", num_workers):
        assert float(line.split()[-4]) == pytest.approx(1.0 if asked == "gloo" else 0.0, abs=0.02)


def test_plain_scripts_of_torch_use_the_backend_and_a_killed_worker_is_named(tmp_path: Path) -> None:
    told = [sys.executable, str(SCRIPTS / "plain_torch.py"), str(tmp_path / "meeting")]
    done = subprocess.run(
        told, env={**os.environ, "TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=250, check=False
    )

    lines = done.stdout.splitlines()
    assert len(lines) == 5, done.stdout + done.stderr
    learned = {line.partition(": ")[2] for line in lines if "learned" in line}
    assert len(learned) == 1, "replicas differ"
    assert sorted(line for line in lines if "PeerError" in line) == [
        f"{rank}: PeerError worker {rank}, all_reduce: worker 2 is gone" for rank in range(2)
    ]
    assert not list(tmp_path.glob("paceline-*")), "sockets are left behind"
