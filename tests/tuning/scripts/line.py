"""Reports how far --x is from 0, again and again; a trial that is worse than others goes on until it is stopped."""

import sys

import paceline

x = float(sys.argv[1].removeprefix("--x="))
ps = paceline.init()
table = ps.table("w", shape=(2,), update=paceline.update.Add())
for turn in range(100_000 if x > 1 else 2):
    table.push([x, x])
    ps.clock()
    table.pull()
    if ps.rank == 0:
        paceline.report(loss=x / (turn + 1), accuracy=0.5)
ps.barrier()
