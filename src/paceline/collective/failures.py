"""Failures of workers on one group: locks that show which workers have ended, and reports of why they left."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from weakref import WeakMethod

from paceline.errors import DeadlineExceeded, PeerError
from paceline.torch_private import Store
from paceline.worker import waits


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
    _starting: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> None:
        """Lock this worker's file, once it has connections that others rely on. May be repeated, from any thread."""
        with self._starting:  # a second lock of the same file would wait for the first for ever
            if self.run_dir is not None and self._descriptor is None:
                self._lock_file(self._path(self.run_dir, self.rank))

    def _lock_file(self, path: Path) -> None:
        made = path.with_suffix(".new")
        self._descriptor = os.open(made, os.O_RDWR | os.O_CREAT, 0o600)
        # The lock belongs to the open file, which a forked child would keep open.
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        made.rename(path)  # locked from when others can find it, so that none takes this worker for one that has ended
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


ADVICE: Final = f"{waits.ADVICE}; timeout_s of a call holds for that call"
LEFT: Final = "has left the job"
STAY_ADVICE: Final = (
    "Every worker has to make the same number of steps and of collective calls: give each as many batches, as "
    "paceline.shard(loader) does, and make no such call on some workers only."
)
_GRACE_S: Final = 1.0
_POLL_INTERVAL_S: Final = 0.01


@dataclass(slots=True)
class FailureReports:
    """Reports of workers about why they left a group, one each, as a predicate: "has left the job".

    Nothing is written before a failure or the end.
    """

    store: Store
    rank: int
    liveness: Liveness
    _given: bool = False

    def write(self, report: str) -> None:
        """Write this worker's report, unless it has written one."""
        if not self._given:
            self._given = True
            self.store.set(f"failure/{self.rank}", report)

    def read(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the reports of these workers; blocks for a second at most, for reports about to be written.

        Returns earlier if a worker has ended without a report: that is the cause.
        """
        found: dict[int, str] = {}
        silent, deadline_s = set(ranks), time.monotonic() + _GRACE_S
        while silent:
            ended = {rank for rank in silent if self.liveness.has_ended(rank)}
            for rank in sorted(silent):
                if self.store.check([f"failure/{rank}"]):
                    found[rank] = self.store.get(f"failure/{rank}").decode()
                    silent.discard(rank)
            if not silent or ended & silent or time.monotonic() >= deadline_s:
                break
            time.sleep(_POLL_INTERVAL_S)
        return found

    def explain(self, where: str, suspects: Sequence[int], waited_s: float | None, detail: str) -> PeerError:
        """Write a report and return the error to raise, which names the workers that caused the failure.

        Args:
            where: "call 7, all_reduce".
            suspects: the workers that have not done their part, as far as this worker knows.
            waited_s: the timeout in seconds, if it has passed.
            detail: the message of torch.
        """
        failure_reports = self.read(suspects)
        silent = [rank for rank in suspects if rank not in failure_reports]
        gone = [rank for rank in silent if self.liveness.has_ended(rank)]
        about = f"worker {self.rank}, {where}"
        if gone:
            self.write(f"gave up: it lost {names(gone)} ({where})")
            return PeerError(f"{about}: {names(gone)} is gone: its connection has ended. {first_line(detail)}".rstrip())
        if silent and waited_s is not None:
            self.write(f"gave up: it waited {round(waited_s, 1):g} s for {names(silent)} ({where})")
            return DeadlineExceeded(
                f"{about}: waited {round(waited_s, 1):g} s for {names(silent)}, which did not come in time. {ADVICE}"
            )
        if silent and not failure_reports:
            self.write(f"gave up: it lost its connection to {names(silent)} ({where})")
            return PeerError(f"{about}: the connection to {names(silent)} has ended. {first_line(detail)}".rstrip())
        told = "; ".join(f"worker {rank} {report}" for rank, report in sorted(failure_reports.items()))
        self.write(f"gave up, as {told}" if len(told) < 200 else f"gave up ({where})")
        advice = f". {STAY_ADVICE}" if LEFT in told else ""
        return PeerError(f"{about}: {told or first_line(detail)}{advice}")


def names(ranks: Sequence[int]) -> str:
    """Name workers.

    >>> names([2]), names([0, 3])
    ('worker 2', 'workers 0, 3')
    """
    return f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"


def first_line(text: str) -> str:
    """Return the first line of a message of torch, without the place in its source.

    >>> first_line("[/pytorch/gloo/pair.cc:553] Connection closed by peer [::1]:59049. This is typically caused by x")
    'Connection closed by peer [::1]:59049.'
    """
    said = text.partition("\n")[0]
    said = said.split("] ", 1)[1] if said.startswith("[") and "] " in said else said
    return said.partition(" This is typically")[0]
