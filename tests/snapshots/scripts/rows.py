"""Push a few of many rows each clock; be killed in the middle of snapshots, or check what came back."""

import os
import signal
import sys
import threading
from pathlib import Path

import torch

import paceline
from paceline.snapshots.folder import Snapshot, snapshots_in

NUM_ROWS, STEP = 20_000, 50
folder, mode = Path(sys.argv[1]), sys.argv[2]
session = paceline.init()
rows = session.table("users", rows=4, update=paceline.update.Add(), scale="sum")
ids = torch.arange(NUM_ROWS)


def expected(clock: int) -> torch.Tensor:
    """What every row has before a clock: one for the first clock, and one for each later clock that has pushed it."""
    found = torch.full((NUM_ROWS,), float(clock > 0))
    for each in range(1, clock):
        found[torch.arange(each, each + STEP) % NUM_ROWS] += 1.0
    return found


if mode == "check":
    told = paceline.resumed()
    assert told is not None
    assert torch.equal(rows.pull(ids), expected(told.clock).view(-1, 1).expand(-1, 4))
    sys.exit(0)
for clock in range(100_000):
    pushed = ids if clock == 0 else torch.arange(clock, clock + STEP) % NUM_ROWS
    rows.push(pushed, torch.ones(len(pushed), 4))
    session.clock()
    rows.pull(ids[:1])
    is_chained = any(Snapshot.read(path).manifest.base for path in snapshots_in(folder)[-1:])
    if is_chained and list(folder.glob(".unfinished-*")):
        os.kill(int(os.environ["PACELINE_LAUNCHER_PID"]), signal.SIGKILL)
        threading.Event().wait(60)  # this process ends with the launcher
