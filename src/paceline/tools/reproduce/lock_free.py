"""One process that adds to numbers in shared memory without locks: `python -m paceline.tools.reproduce.lock_free`.

It prints a line of JSON. What several such processes have lost is the difference to the sum in memory.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np

SIZE: Final = 1 << 24
_TOUCHED: Final = 2048  # numbers that an update changes
_UPDATES: Final = 16  # that a process makes in turn: so few that two processes share one cache line in 64
_WAIT_S: Final = 60.0


def main(arguments: list[str]) -> int:
    """Add 1 to chosen numbers again and again, at the same time as the others; return 2 if these do not come.

    The arguments are: the file of the numbers, sparse or dense, the rank of this process, the number of processes, the
    number of updates, and a seed.
    """
    path, kind, rank, num_processes, num_updates, seed = arguments
    numbers = np.memmap(path, dtype=np.int64, mode="r+", shape=(SIZE,))
    random = np.random.default_rng((int(seed), int(rank)))
    room = SIZE if kind == "sparse" else _TOUCHED
    updates = [np.unique(random.integers(room, size=_TOUCHED)) for _ in range(_UPDATES)]
    Path(f"{path}.{rank}").touch()
    if not _all_there(Path(path), int(num_processes)):
        print(f"only some of {num_processes} processes came within {_WAIT_S:.0f} s", file=sys.stderr)
        return 2
    added, began_s = 0, time.process_time()
    for number in range(int(num_updates)):
        chosen = updates[number % len(updates)]
        numbers[chosen] += 1
        added += len(chosen)
    print(json.dumps({"added": added, "core_s": time.process_time() - began_s}))
    return 0


def _all_there(path: Path, num_processes: int) -> bool:
    """Wait until all processes have made their file; return whether they did in time."""
    deadline_s = time.monotonic() + _WAIT_S
    while len(list(path.parent.glob(f"{path.name}.*"))) < num_processes:
        if time.monotonic() > deadline_s:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
