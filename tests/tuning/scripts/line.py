"""Reports how far --x is from 0, again and again, until it is stopped."""

import sys
from itertools import count

import paceline

x = float(sys.argv[1].removeprefix("--x="))
ps = paceline.init()
table = ps.table("w", shape=(2,), update=paceline.update.Add())
for turn in count():
    table.push([x, x])
    ps.clock()
    table.pull()
    if ps.rank == 0:
        paceline.report(loss=x / (turn + 1), accuracy=0.5)
