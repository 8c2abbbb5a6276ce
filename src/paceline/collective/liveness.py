"""Liveness of workers on one machine: each holds a lock on a file, which the kernel releases when it ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakMethod


@dataclass(slots=True, weakref_slot=True)
class Liveness:
    """The lock file of this worker, beside those of the others in the folder of the job.

    Args:
        run_dir: the folder; None if there is none: then all workers count as alive.
        rank: number of this worker.

    Example:
        >>> Liveness(None, 0).has_ended(1)
        False
    """

    run_dir: Path | None
    rank: int
    _descriptor: int | None = None

    def start(self) -> None:
        """Lock this worker's file, once it has connections that others rely on. May be repeated."""
        if self.run_dir is None or self._descriptor is not None:
            return
        self._descriptor = os.open(self._path(self.run_dir, self.rank), os.O_RDWR | os.O_CREAT, 0o600)
        # Blocks while another worker tests it. The lock belongs to the open file, which a forked child would keep open.
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        forget = WeakMethod(self._forget)
        os.register_at_fork(after_in_child=lambda: act() if (act := forget()) is not None else None)

    def stop(self) -> None:
        """Unlock it, as this worker has left. May be repeated."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self._forget()

    def has_ended(self, rank: int) -> bool:
        """Return whether a worker that had connections has left or its process has ended; False if unknown."""
        if self.run_dir is None:
            return False
        try:
            descriptor = os.open(self._path(self.run_dir, rank), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            with suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
            return False
        finally:
            os.close(descriptor)

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @staticmethod
    def _path(run_dir: Path, rank: int) -> Path:
        return run_dir / f"worker-{rank}.connected"
