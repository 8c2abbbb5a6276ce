"""Failure reports: a worker that gives up writes why, so a worker that has ended without a report is the cause."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from torch._C._distributed_c10d import Store

from paceline.collective.liveness import Liveness
from paceline.errors import DeadlineExceeded, PeerError
from paceline.worker import waits

ADVICE: Final = f"{waits.ADVICE}; timeout_s of a call holds for that call"
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
            return PeerError(f"{about}: {names(gone)} is gone: its connection has ended. {first_line(detail)}")
        if silent and waited_s is not None:
            self.write(f"gave up: it waited {round(waited_s, 1):g} s for {names(silent)} ({where})")
            return DeadlineExceeded(
                f"{about}: waited {round(waited_s, 1):g} s for {names(silent)}, which did not come in time. {ADVICE}"
            )
        if silent and not failure_reports:
            self.write(f"gave up: it lost its connection to {names(silent)} ({where})")
            return PeerError(f"{about}: the connection to {names(silent)} has ended. {first_line(detail)}")
        told = "; ".join(f"worker {rank} {report}" for rank, report in sorted(failure_reports.items()))
        self.write(f"gave up, as {told}" if len(told) < 200 else f"gave up ({where})")
        return PeerError(f"{about}: {told or first_line(detail)}")


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
