"""How it is known that a job which nobody watches over is over."""

from pathlib import Path

from paceline.launch.entering.presence import wait_end, wait_end_elsewhere
from paceline.launch.spec import ClusterSpec


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
