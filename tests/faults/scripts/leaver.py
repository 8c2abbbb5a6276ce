"""A worker's script for tests of preemption: pushes 1 at every clock, without end, and says how far it came.

`leaver.py CONSISTENCY`: worker 2 sees to its end itself, as it asks whether it was told to leave.
"""

import os
import sys

import torch

import paceline

ps = paceline.init()
ledger = ps.table("ledger", shape=(ps.size, 64), update=paceline.update.Add(), consistency=sys.argv[1], scale="sum")
ones = torch.zeros(ps.size, 64)
ones[ps.rank] = 1.0
acks = []


def say(*words: object) -> None:
    """Write a line as a whole, as workers may be threads of one process."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


ps.barrier()
say("begin", os.getpid())
try:
    while not (ps.rank == 2 and paceline.preempted()):
        acks.append(ledger.push(ones))
        ps.clock()
        counts = ledger.pull()[:, 0].int().tolist()
        if len(acks) % 20 == 0:
            say("counts", counts)
finally:
    say("left", len(acks), sum(ack.result(timeout=30).applied for ack in acks))
if ps.rank == 2:
    say("saved")
    sys.exit(143)
