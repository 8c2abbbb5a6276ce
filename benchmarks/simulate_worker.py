"""A worker of `simulate.py`: each clock it reads, sleeps for as long as the simulator would compute, pushes and ticks."""

import argparse
import time
from random import Random

import paceline
from paceline.simulate.scenario import Stragglers


def main() -> None:
    """Work through the clocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clocks", type=int, default=100)
    parser.add_argument("--compute-ms", type=float, default=50.0)
    parser.add_argument("--stragglers", default="transient:0.1:4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=1000)
    parser.add_argument("--lazy", action="store_true", help="read the cached copy while the bound allows it")
    options = parser.parse_args()
    compute_s, stragglers = options.compute_ms / 1000, Stragglers.parse(options.stragglers)
    with paceline.connect() as ps:
        pace = Random(f"{options.seed}.{ps.rank}.0")
        table = ps.table("w", shape=(options.size,), update=paceline.update.Add(), scale="sum")
        ps.barrier()
        while ps.node.clock < options.clocks:
            values = table.pull(refresh=not options.lazy)
            time.sleep(pace.uniform(0.9 * compute_s, 1.1 * compute_s) * stragglers.slowdown(ps.rank, pace))
            table.push(values.new_ones(options.size))
            ps.clock()
        ps.barrier()


if __name__ == "__main__":
    main()
