"""The moment from which a job is complete: all its workers and servers have come."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from paceline.errors import DeadlineExceeded
from paceline.launch.addresses import CLUSTER_NAME, AddressBook
from paceline.launch.presence import absent
from paceline.launch.spec import ClusterSpec

START_TIMEOUT_S: Final = 60.0
POLL_INTERVAL_S: Final = 0.005


def wait_complete(spec: ClusterSpec, each_turn: Callable[[], None], timeout_s: float = START_TIMEOUT_S) -> None:
    """Block until the job is complete, calling `each_turn` all the while.

    Raises DeadlineExceeded, with the names of those who are missing.
    """
    deadline_s = time.monotonic() + timeout_s
    while not (Path(spec.run_dir) / CLUSTER_NAME).exists():
        if time.monotonic() >= deadline_s:
            raise DeadlineExceeded(
                f"not all of {spec.num_workers} workers and {spec.num_servers} servers came within {timeout_s:g} s: "
                f"{missing(spec)} did not. Look at what they wrote, and whether they call paceline.init()"
            )
        each_turn()
        time.sleep(POLL_INTERVAL_S)


def declare_complete(spec: ClusterSpec) -> None:
    """Tell all that wait, if it is so. For the process that has set the job up."""
    if not absent(Path(spec.run_dir), "worker", spec.num_workers):
        AddressBook(spec).poll()


def missing(spec: ClusterSpec) -> str:
    """Name the processes of a job that have not come yet."""
    workers = [f"worker {index}" for index in absent(Path(spec.run_dir), "worker", spec.num_workers)]
    servers = [f"server {index}" for index in AddressBook(spec).missing()]
    return ", ".join(workers + servers) or "the process that sets the job up"
