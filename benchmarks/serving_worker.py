"""The worker of `serving.py`: fills a table of rows, then pushes rows at a rate, until the file that ends it is there.

`serving_worker.py FOLDER NUM_ROWS WIDTH ROWS_PER_S`: row -1 has the number of the push; writes when each was
acknowledged.
"""

import json
import sys
import time
from pathlib import Path

import torch

import paceline

BATCH_ROWS = 1000


def main() -> None:
    """Push, and write when servers had what was pushed."""
    folder, num_rows, width, rate = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    torch.set_num_threads(1)
    with paceline.connect() as ps:
        table = ps.table("users", rows=width, update=paceline.update.Add(), consistency="asynchronous")
        for start in range(0, num_rows, 50_000):
            ids = torch.arange(start, min(start + 50_000, num_rows))
            table.push(ids, torch.randn(len(ids), width)).result()
        (folder / "filled").touch()
        acknowledged, number, began_s = dict[int, float](), 0, time.monotonic()
        while not (folder / "end").exists():
            ids = torch.randint(num_rows, (BATCH_ROWS,))
            ids[0] = -1
            values = torch.randn(BATCH_ROWS, width)
            values[0] = 1.0
            table.push(ids, values).result()
            number += 1
            acknowledged[number] = time.monotonic()
            time.sleep(max(0.0, began_s + number * BATCH_ROWS / rate - time.monotonic()))
        (folder / "written").write_text(json.dumps(acknowledged))
        (folder / "written").rename(folder / "acknowledged.json")


if __name__ == "__main__":
    main()
