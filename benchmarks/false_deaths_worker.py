"""One worker of `false_deaths.py`: trains for so many seconds, and says how many steps that were."""

import sys
import time

import torch

import paceline

WIDTH = 1 << 18
COMPUTE_S = 0.3


def main() -> None:
    """Step until the time is over; then leave, as the others do in their own time."""
    seconds = float(sys.argv[1])
    torch.set_num_threads(1)
    with paceline.connect() as ps:
        model = ps.table("model", shape=(WIDTH,), update=paceline.update.SGD(lr=0.01, momentum=0.9))
        rows = ps.table("rows", rows=8, update=paceline.update.SGD(lr=0.01))
        ids, ended_s, clock = torch.arange(64), time.monotonic() + seconds, 0
        while time.monotonic() < ended_s:
            values = model.pull()
            rows.push(ids, 0.1 * rows.pull(ids) + 1.0)
            time.sleep(COMPUTE_S)  # in the place of computing
            model.push(0.1 * values + 1.0)
            ps.clock()
            if clock == 0 and ps.rank == 0:
                print("clock 0", flush=True)
            clock += 1
    print(f"steps {clock}", flush=True)


if __name__ == "__main__":
    main()
