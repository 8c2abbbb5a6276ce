"""Which cores of this machine a process of a job uses, and with how many threads."""

import os
import sys
from collections.abc import Sequence

from paceline.core.consistency import Consistency


def cores_here() -> list[int]:
    """Return the numbers of the cores that this process may run on."""
    if sys.platform == "linux":
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def share_of(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    """Return the cores of one of `count` processes: neighbours, at least one, and not shared while they suffice.

    >>> share_of(range(8), index=1, count=3)
    (2, 3)
    >>> share_of(range(2), index=2, count=4)
    (0,)
    """
    size = max(1, len(cores) // count)
    start = index * size % len(cores)
    return tuple(cores[start : start + size])


def server_threads(consistency: Consistency, num_cores: int, num_servers: int, num_workers: int) -> int:
    """Return with how many threads a server updates a table, so that it never takes cores from workers that compute.

    In lockstep all workers wait while servers update, so these have the machine; else they have what workers leave.

    >>> from paceline.core.consistency import asynchronous, bsp
    >>> [server_threads(c, num_cores=8, num_servers=1, num_workers=6) for c in (bsp(), asynchronous())]
    [8, 2]
    """
    free = num_cores if consistency.lockstep else num_cores - num_workers
    return max(1, free // num_servers)
