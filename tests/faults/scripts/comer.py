"""A worker's script for tests of workers that come and go: pushes 1 in its row at every clock until a file is there.

`comer.py FILE`: says how many of its pushes were applied, and worker 0 at the end what the ledger holds.
"""

import os
import sys
from pathlib import Path

import torch

import paceline

ps = paceline.init()
ledger = ps.table("ledger", shape=(ps.size, 64), update=paceline.update.Add(), consistency="bsp", scale="sum")
ones = torch.zeros(ps.size, 64)
ones[ps.rank] = 1.0
acks = []


def say(*words: object) -> None:
    """Write a line as a whole."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


say("begin", os.getpid())
try:
    while not Path(sys.argv[1]).exists():
        acks.append(ledger.push(ones))
        ps.clock()
        counts = ledger.pull()
        if len(acks) % 20 == 0:
            say("counts", counts[:, 0].int().tolist())
finally:
    say("applied", len(acks), sum(ack.result(timeout=30).applied for ack in acks))
ps.barrier()
ps.clock()
if ps.rank == 0:
    values = ledger.pull()
    assert (values == values[:, :1]).all()
    say("ledger", *values[:, 0].int().tolist())
