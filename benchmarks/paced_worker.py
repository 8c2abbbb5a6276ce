"""A worker whose computing is a sleep, so that many fit on few cores: each clock it reads, sleeps, pushes and ticks.

Worker 1 is transiently slow, as in the demonstration: three times as long in a seeded quarter of its clocks, half as
long in the others. On average it keeps up; a worker that is always slow would cost every bounded policy the same.
"""

import argparse
import time

import paceline
from paceline.tools.demo.runs import SLOW_WORKER, ComputePace

SIZE = 1000


def main() -> None:
    """Work through the clocks; worker 0 prints the seconds from the first clock to the end of the last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clocks", type=int, default=100)
    parser.add_argument("--compute-ms", type=float, default=10.0)
    parser.add_argument("--lazy", action="store_true", help="read the cached copy while the bound allows it")
    options = parser.parse_args()
    with paceline.connect() as ps:
        computing = ComputePace(options.compute_ms / 1000, fitful=ps.rank == SLOW_WORKER, seed=0).clocks()
        table = ps.table("w", shape=(SIZE,), update=paceline.update.Add(), scale="sum")
        ps.barrier()
        start = time.monotonic()
        for _ in range(options.clocks):
            values = table.pull(refresh=not options.lazy)
            time.sleep(next(computing))
            table.push(values.new_ones(SIZE))
            ps.clock()
        ps.barrier()
        if ps.rank == 0:
            print(f"seconds {time.monotonic() - start:.4f}", flush=True)
        total = table.pull(exact=True)
        assert (total == options.clocks * ps.size).all(), f"pushes were lost or doubled: {total[:3]}"


if __name__ == "__main__":
    main()
