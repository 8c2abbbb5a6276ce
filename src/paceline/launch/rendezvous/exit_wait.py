"""Waits for the end of a job that has no supervisor: until no worker holds its liveness lock."""

import threading
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline.core.standstill import names
from paceline.job.carriers import tell_user
from paceline.job.spec import ClusterSpec
from paceline.launch.rendezvous.liveness_lock import takes_part, wait_end, wait_end_elsewhere

_TELL_AFTER_S: Final = 10.0


def wait_worker_ended(spec: ClusterSpec, worker: int) -> bool:
    """Block until a worker takes part no longer; False when nothing was heard of it for so long that it must be so."""
    if spec.encrypted:
        return wait_end_elsewhere(Path(spec.run_dir), "worker", worker)
    wait_end(Path(spec.run_dir), "worker", worker)
    return True


def wait_all_ended(spec: ClusterSpec) -> None:
    """Block until no worker takes part any longer."""
    for worker in range(spec.num_workers):
        wait_worker_ended(spec, worker)


@contextmanager
def announcing_wait(spec: ClusterSpec, worker: int, after_s: float = _TELL_AFTER_S) -> Generator[None]:
    """Say once, if the others go on for a while, why this worker's process stays though its script has ended."""

    def tell() -> None:
        others = [rank for rank in range(spec.num_workers) if takes_part(Path(spec.run_dir), "worker", rank)]
        tell_user(
            f"worker {worker} has ended its script; its process stays until {names(others)} will have left the job, as "
            "others need its servers or its folder"
        )

    timer = threading.Timer(after_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
