"""A worker of a job whose servers are killed: python replicas_worker.py FOLDER

It waits at some clocks until the test has killed what it wants to kill there.
"""

import sys
import threading
import time
from pathlib import Path

import torch

import paceline
from paceline.api.session import Session

NUMEL, NUM_CLOCKS, PATIENCE_S = 1000, 40, 200.0
STOPS = (10, 25)  # clocks before which workers wait
IDS = torch.arange(5)


def train(ps: Session, folder: Path | None = None) -> str:
    """Train a dense table and some rows, each worker with gradients of its own; return the bits of what comes of it."""
    dense = ps.table("w", shape=(NUMEL,), update=paceline.update.SGD(lr=0.1, momentum=0.9))
    rows = ps.table("rows", rows=4, update=paceline.update.Add(), consistency="bsp", scale="sum")
    gradients = torch.Generator().manual_seed(ps.rank)
    for clock in range(ps.node.clock, NUM_CLOCKS):  # one that comes again begins where the others are
        if folder is not None and clock in STOPS:
            (folder / f"at-{clock}-{ps.rank}").touch()
            wait_for(folder / f"go-{clock}")
        dense.push(torch.randn(NUMEL, generator=gradients))
        rows.push(IDS + ps.rank, torch.ones(len(IDS), 4) * (clock + 1))
        ps.clock()
        dense.pull()
    return dense.pull().numpy().tobytes().hex() + rows.pull(torch.arange(8)).numpy().tobytes().hex()


def wait_for(path: Path) -> None:
    deadline, pause = time.monotonic() + PATIENCE_S, threading.Event()
    while not path.exists():
        pause.wait(0.01)
        assert time.monotonic() < deadline


def main() -> None:
    folder = Path(sys.argv[1])
    with paceline.connect() as ps:
        (folder / f"bits-{ps.rank}").write_text(train(ps, folder))


if __name__ == "__main__":
    main()
