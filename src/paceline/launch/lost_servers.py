"""Files in the folder of the job by which the launcher tells workers that a server has ended."""

from contextlib import suppress
from pathlib import Path


def record_server_ended(run_dir: Path, rank: int, how: str) -> None:
    """Record that a server has ended, and how, for the workers of this job.

    If the file cannot be written, because the disk is full for example, workers find out seconds later by themselves.
    """
    with suppress(OSError):
        _path(run_dir, rank).write_text(how, encoding="utf-8")


def how_server_ended(run_dir: Path, rank: int) -> str:
    """Return how a server of this job has ended, or nothing where it is not known to have ended."""
    try:
        return _path(run_dir, rank).read_text(encoding="utf-8")
    except OSError:
        return ""


def _path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"server-{rank}.ended"
