"""Real processes, four workers and two servers, one worker slow now and then: the bound holds, and shows in reads."""

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.observe.runs import Run, read_run
from paceline.observe.summary import summarize

WORKER = Path(__file__).parents[2] / "benchmarks" / "paced_worker.py"
NUM_CLOCKS, BOUND, TIMEOUT_S = 60, 2, 90


def run_job(run_dir: Path, policy: str) -> Run:
    """Run the paced workers with lazy reads, as the papers' SSP has them, and return what was recorded."""
    command = [sys.executable, "-m", "paceline", "run", "-n", "4", "-m", "2", "--consistency", policy]
    command += ["--run-dir", str(run_dir), "--quiet", "--no-progress", str(WORKER)]
    command += ["--clocks", str(NUM_CLOCKS), "--lazy"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_run(run_dir)


@pytest.mark.parametrize("kind", ["ssp", "essp"])
def test_no_read_is_older_than_the_bound_and_eager_reads_are_fresh(kind: str, tmp_path: Path) -> None:
    run = run_job(tmp_path / "run", f"{kind}:{BOUND}")
    training = [read for read in run.reads if read.clock < NUM_CLOCKS]
    summary = summarize(run)
    assert len(training) >= 4 * NUM_CLOCKS
    assert max(read.staleness for read in training) <= BOUND
    assert summary.max_lead <= BOUND
    seen = {read.staleness for read in training}
    if kind == "ssp":
        # A lazy read is refetched only when the bound forces it, so its age saws through the whole bound.
        assert seen >= set(range(1, BOUND + 1))
    else:
        assert summary.freshest_share >= 0.8
