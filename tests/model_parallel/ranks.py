"""Ranks that find each other through a file: forked by one process once it has imported what all of them need."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from tests.tidy.tree import ROOT

DEADLINE_S = 200.0


def run_ranks(script: Path, directory: Path, num_ranks: int) -> list[str]:
    """Run a script that calls `fork_ranks`; return what each rank printed, once all ended well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    command = [sys.executable, "-W", "error", str(script), str(directory)]
    with subprocess.Popen(command, env=environment, start_new_session=True) as forking:
        try:
            code = forking.wait(DEADLINE_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forking.pid, signal.SIGKILL)
    told = [_output(directory, rank).read_text() for rank in range(num_ranks)]
    assert code == 0, "\n".join(f"rank {rank}: {text}" for rank, text in enumerate(told))
    return told


def fork_ranks(directory: Path, num_ranks: int, live: Callable[[int], None]) -> None:
    """Call `live` with each rank in a process of its own; exit with 1 when it raises in one of them."""
    torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports as much again as torch
    ranks = [os.fork() or _live_and_die(directory, rank, live) for rank in range(num_ranks)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    sys.exit(any(codes))


def _live_and_die(directory: Path, rank: int, live: Callable[[int], None]) -> int:
    with _output(directory, rank).open("w", buffering=1) as output, contextlib.redirect_stdout(output):
        try:
            live(rank)
            code = 0
        except BaseException:
            traceback.print_exc(file=output)
            code = 1
    os._exit(code)


def _output(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank}.txt"
