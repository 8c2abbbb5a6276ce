"""A worker on a host: takes a step, says so, and takes the rest once it is told to.

python worker.py FOLDER
"""

import sys
import threading
import time
from pathlib import Path

import torch

import paceline
from paceline.api.session import Session
from paceline.worker.table import Table

NUMEL, NUM_STEPS, PATIENCE_S = 64_000, 4, 200.0


def step(ps: Session, table: Table) -> None:
    table.push(torch.ones(NUMEL))
    ps.clock()
    table.pull()


def main() -> None:
    folder = Path(sys.argv[1])
    with paceline.connect() as ps:
        table = ps.table("w", shape=(NUMEL,), update=paceline.update.Add(), scale="sum")
        step(ps, table)
        (folder / f"ready-{ps.rank}").touch()
        deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
        while not (folder / "go").exists():
            pause.wait(0.01)
            assert time.monotonic() < deadline
        for _ in range(NUM_STEPS - 1):
            step(ps, table)
        assert table.pull().tolist() == [float(NUM_STEPS * ps.size)] * NUMEL
        (folder / f"done-{ps.rank}").touch()


if __name__ == "__main__":
    main()
