"""Processes that find each other through a file, each a rank that runs the same script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.tidy.tree import ROOT

DEADLINE_S = 120.0


def run_ranks(script: Path, directory: Path, num_ranks: int) -> list[str]:
    """Run a script as so many ranks, given its rank and a file; return what each printed, once all ended well."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "error", str(script), str(rank), str(directory / "ranks.store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        told = [rank.communicate(timeout=DEADLINE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    for number, (rank, output) in enumerate(zip(ranks, told, strict=True)):
        assert rank.returncode == 0, f"rank {number}: {output}"
    return told
