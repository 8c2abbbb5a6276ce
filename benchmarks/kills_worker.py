"""One worker of `kills.py`: every push leaves a mark of its own, and a model is trained beside.

Writes when each of its steps began and how long it took, and what became of the marks, to a file of its own.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import torch

import paceline

WIDTH = 1 << 20  # of the model: two chunks of an update
CLOCKS_TOLD = 10


def main() -> None:
    """Step as often as told, then look at what has become of all pushes."""
    folder, num_clocks, consistency = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    with paceline.connect() as ps:
        numbers = torch.Generator().manual_seed(ps.rank)
        add, momentum = paceline.update.Add(), paceline.update.SGD(lr=0.01, momentum=0.9)
        marks = ps.table("marks", rows=ps.size, update=add, consistency=consistency, scale="sum")
        count = ps.table("count", shape=(ps.size,), update=add, consistency=consistency, scale="sum")
        model = ps.table("model", shape=(WIDTH,), update=momentum, consistency=consistency, scale="mean")
        mine = torch.zeros(ps.size)
        mine[ps.rank] = 1.0
        ids, steps = torch.arange(num_clocks) * 7919, list[tuple[float, float]]()
        gradient = torch.empty(WIDTH)
        ps.barrier()
        for clock in range(num_clocks):
            began_s = time.monotonic()
            gradient.copy_(model.pull()).mul_(0.1).add_(torch.randn(1, generator=numbers))
            marks.push(ids[clock : clock + 1], mine.view(1, -1))
            count.push(mine)
            model.push(gradient)
            ps.clock()
            steps.append((began_s, time.monotonic() - began_s))
            if clock % CLOCKS_TOLD == 0 and ps.rank == 0:
                sys.stdout.write(f"clock {clock}\n")
                sys.stdout.flush()
        ps.barrier()
        exact = consistency != "asynchronous"
        rows, counts = marks.pull(ids, exact=exact), count.pull(exact=exact)
        lost = int((rows < 1).sum()) + int((num_clocks - counts).clamp(min=0).sum())
        doubled = int((rows > 1).sum()) + int((counts - num_clocks).clamp(min=0).sum())
        values = b"".join(part.numpy().tobytes() for part in (rows, counts, model.pull(exact=exact)))
        told = {"steps": steps, "lost": lost, "doubled": doubled, "digest": hashlib.sha256(values).hexdigest()}
        (folder / f"{ps.rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
