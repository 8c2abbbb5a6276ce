"""Workers come and go while a job runs, beside the death of a server: every push counts once, and the run ends well."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.faults.running import SCRIPTS, SOURCES, TIMEOUT_S, Run, running


def scale(run_dir: Path, num: int) -> str:
    asked = subprocess.run(
        [sys.executable, "-m", "paceline", "scale", str(run_dir), "--workers", str(num)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
    )
    return asked.stdout + asked.stderr


def kill_server(run: Run) -> None:
    os.kill(run.wait_for_server(0), signal.SIGKILL)


def test_every_push_counts_once_whichever_workers_are_there(tmp_path: Path) -> None:
    run_dir, enough = tmp_path / "run", tmp_path / "enough"
    with running(run_dir, SCRIPTS / "comer.py", str(enough), options=("-n", "1:3", "--grace-s", "60")) as run:
        run.wait_for("[worker 0] counts")
        assert scale(run_dir, 3) == "paceline: 3 workers from now on: worker 1, worker 2 to come\n"
        run.wait_for("[worker 1] counts")
        run.wait_for("[worker 2] counts")
        assert scale(run_dir, 1) == "paceline: 1 worker from now on: worker 1, worker 2 to leave\n"
        run.wait_for("was told to leave, and has; the others go on without it", 2)
        kill_server(run)
        run.wait_for("another process goes on in its place")
        assert scale(run_dir, 2) == "paceline: 2 workers from now on: worker 1 to come\n"
        run.wait_for("[worker 1] begin", 2)
        run.wait_for("[worker 1] counts", 2)
        enough.touch()

        assert run.end() == 0
        [ledger] = run.wait_for("[worker 0] ledger")
        counts = [int(word) for word in ledger.split()[3:]]
        for rank in range(3):
            pairs = [tuple(map(int, line.split()[3:])) for line in run.saying(f"[worker {rank}] applied")]
            assert len(pairs) == (2 if rank == 1 else 1)
            assert all(made == applied for made, applied in pairs)
            assert counts[rank] == sum(made for made, _ in pairs), run.output
