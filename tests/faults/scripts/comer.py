"""A worker's script for tests of workers that come and go: pushes 1 in its row at every clock until a file is there.

`comer.py FILE [CONSISTENCY]`: says how many of its pushes were applied, and worker 0 at the end what the ledger holds.
That the file is there is told by worker 0 in the last row, so that under bsp all stop at the same clock.
"""

import os
import sys
from pathlib import Path

import torch

import paceline

ps = paceline.init()
consistency = sys.argv[2] if len(sys.argv) > 2 else "bsp"
ledger = ps.table("ledger", shape=(ps.size + 1, 64), update=paceline.update.Add(), consistency=consistency, scale="sum")
ones = torch.zeros(ps.size + 1, 64)
ones[ps.rank] = 1.0
acks = []


def say(*words: object) -> None:
    """Write a line as a whole."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


say("begin", os.getpid())
try:
    values = ledger.pull()
    while not values[ps.size, 0]:
        if ps.rank == 0 and Path(sys.argv[1]).exists():
            ones[ps.size] = 1.0
        acks.append(ledger.push(ones))
        ps.clock()
        values = ledger.pull()
        if len(acks) % 20 == 0:
            say("counts", values[: ps.size, 0].int().tolist())
finally:
    say("applied", len(acks), sum(ack.result(timeout=30).applied for ack in acks))
ps.barrier()
values = ledger.pull()
if ps.rank == 0:
    assert (values == values[:, :1]).all()
    say("ledger", *values[: ps.size, 0].int().tolist())
