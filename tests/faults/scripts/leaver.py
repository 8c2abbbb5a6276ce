"""A worker's script for tests of preemption: pushes 1 at every clock, without end, and says how far it came.

`leaver.py CONSISTENCY`: worker 2 sees to its end itself, as it asks whether it was told to leave.
"""

import os
import sys
import time

import torch

import paceline

ps = paceline.init()
ledger = ps.table("ledger", shape=(ps.size, 64), update=paceline.update.Add(), consistency=sys.argv[1], scale="sum")
ones = torch.zeros(ps.size, 64)
ones[ps.rank] = 1.0
acks = []
ps.barrier()
print("begin", os.getpid(), flush=True)
try:
    while not (ps.rank == 2 and paceline.preempted()):
        time.sleep(0.01)
        acks.append(ledger.push(ones))
        ps.clock()
        counts = ledger.pull()[:, 0].int().tolist()
        if len(acks) % 20 == 0:
            print("counts", counts, flush=True)
finally:
    print("left", len(acks), sum(ack.result(timeout=30).applied for ack in acks), flush=True)
if ps.rank == 2:
    print("saved", flush=True)
    sys.exit(143)
