"""Machines are taken away: a worker that is told to leave finishes its step and leaves, and no other waits for it."""

import ast
import os
import re
import signal
from pathlib import Path

import psutil
from tests.faults.running import LEFT_WITHIN_S, SCRIPTS, Run, running
from tests.launch.launching import wait_gone

LEAVER = SCRIPTS / "leaver.py"
GRACE_S = "60"  # less than any wait of the script: what does not leave by itself fails


def left(run: Run, rank: int) -> int:
    """Wait until a worker has said how many pushes it made; all of them must be applied."""
    [line] = run.wait_for(f"[worker {rank}] left")
    made, applied = map(int, line.split()[-2:])
    assert made == applied
    return made


def counts_after(run: Run, words: str) -> list[int]:
    """Wait for the next counts that worker 0 tells after these words."""
    told = len(run.saying("[worker 0] counts"))
    run.wait_for(words)
    line = run.wait_for("[worker 0] counts", told + 2)[-1]
    return ast.literal_eval(re.findall(r"\[[\d, ]+\]", line)[-1])


def test_a_worker_and_then_all_are_told_to_leave(tmp_path: Path) -> None:
    options = ("-n", "3", "--transport", "tcp", "--grace-s", GRACE_S)
    with running(tmp_path / "run", LEAVER, "bsp", options=options) as run:
        pids = {int(line.split()[1][0]): int(line.split()[-1]) for line in run.wait_for("begin", 3)}
        os.kill(pids[1], signal.SIGTERM)
        counts = counts_after(run, "[worker 1] left")
        assert counts[1] == left(run, 1), "whatever it pushed counts, and the others go on without it"
        os.kill(pids[2], signal.SIGUSR1)
        run.wait_for("[worker 2] saved")
        assert wait_gone({pids[1], pids[2]}, LEFT_WITHIN_S) == set()
        run.wait_for("paceline: worker 1")  # the launcher hears of an end after the process has ended

        for pid in run.family():  # as Slurm, systemd and a container's runtime do it: every process is told
            tell(pid)
        run.process.send_signal(signal.SIGTERM)

        assert run.end() == 143
        assert left(run, 0)
        told = sorted(run.told())
        assert told[:2] == [
            "paceline: stopped by SIGTERM",
            "paceline: worker 1 was told to leave, and has; the others go on without it",
        ]
        # Unless the launcher is told to stop before it hears of that end, which the end of a process does not tell.
        assert told[2:] in ([], ["paceline: worker 2 was told to leave, and has; the others go on without it"])
        assert "Traceback" not in run.output


def tell(pid: int) -> None:
    """Send SIGTERM, unless the process has ended by now."""
    if psutil.pid_exists(pid):
        os.kill(pid, signal.SIGTERM)


def test_threads_of_one_process_are_told_together(tmp_path: Path) -> None:
    options = ("-n", "2", "--transport", "memory", "--grace-s", GRACE_S)
    with running(tmp_path / "run", LEAVER, "bsp", options=options) as run:
        [pid] = {int(line.split()[-1]) for line in run.wait_for("begin", 2)}
        os.kill(pid, signal.SIGTERM)
        assert run.end() == 143
        assert len(run.saying("] left")) == 2
        assert run.told() == [
            "paceline: the process of workers 0-1 was told to leave, and has; no worker is left, and the run ends",
        ]
