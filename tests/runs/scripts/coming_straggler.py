"""Four workers that read, compute and push; in the middle third of the clocks one of them, by turns, is slow."""

import sys
import time

import paceline

NUM_CLOCKS, SIZE = int(sys.argv[1]), 16
QUICK_S, SLOW_S = 0.001, 0.012

with paceline.connect() as ps:
    table = ps.table("w", shape=(SIZE,), update=paceline.update.Add(), scale="sum")
    ps.barrier()
    for clock in range(NUM_CLOCKS):
        values = table.pull()
        is_middle = NUM_CLOCKS <= 3 * clock < 2 * NUM_CLOCKS
        time.sleep(SLOW_S if is_middle and clock // 2 % ps.size == ps.rank else QUICK_S)
        table.push(values.new_ones(SIZE))
        ps.clock()
    ps.barrier()
    total = table.pull(exact=True)
    assert (total == NUM_CLOCKS * ps.size).all(), f"pushes were lost or doubled: {total[:3]}"
