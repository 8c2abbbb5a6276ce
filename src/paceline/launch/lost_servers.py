"""How the workers of a job hear from their launcher that a server has ended: by a file in the folder of the job."""

from contextlib import suppress
from pathlib import Path


def tell_server_ended(run_dir: Path, rank: int, how: str) -> None:
    """Have the workers of this job know that a server has ended, and how.

    Where the file cannot be written, a full disk for example, they find out by themselves, some seconds later.
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
