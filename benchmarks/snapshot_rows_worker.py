"""Times snapshots of rows of which few change: `snapshot_rows_worker.py OUT MILLION PERCENT ROUNDS`."""

import json
import sys
import time
from pathlib import Path

import torch

import paceline
from paceline.snapshots.folder import Snapshot

WIDTH = 16


def main() -> None:
    """Take one snapshot with all rows, then one after each push of some of them."""
    out, million, percent, rounds = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    num = int(million * 1e6)
    session = paceline.init()
    rows = session.table("users", rows=WIDTH, update=paceline.update.Adagrad(lr=0.1))
    for part in torch.arange(num).split(100_000):
        rows.push(part, torch.ones(len(part), WIDTH))
    session.clock()
    found = []
    for number in range(rounds + 1):
        chosen = torch.randperm(num)[: int(num * percent / 100)]
        if number:
            rows.push(chosen, torch.ones(len(chosen), WIDTH))
            session.clock()
        rows.pull(chosen[:1])
        began_s = time.perf_counter()
        session.snapshots.take_planned([])
        taken = session.snapshots._last
        assert taken is not None
        manifest = Snapshot.read(taken.result()).manifest
        took_s = time.perf_counter() - began_s
        size_bytes = sum(entry.size_bytes for entry in manifest.files if entry.name.startswith("rows-"))
        found.append({"bytes": size_bytes, "seconds": took_s, "is_whole": not manifest.base})
    row_bytes = 8 + 2 * 4 * WIDTH  # id, values, and the state of Adagrad
    out.write_text(json.dumps({"snapshots": found, "touched_bytes": len(chosen) * row_bytes}))


if __name__ == "__main__":
    main()
