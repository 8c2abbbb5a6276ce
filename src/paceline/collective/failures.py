"""Who is to blame when a call fails: workers that run leave an account, and one that has ended without any is gone."""

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
    """What workers say of their end in a group, each once, as a predicate: "has left the job".

    Nothing is written while all is well.
    """

    store: Store
    rank: int
    liveness: Liveness
    _given: bool = False

    def give(self, account: str) -> None:
        """Leave this worker's account, unless it has left one."""
        if not self._given:
            self._given = True
            self.store.set(f"account/{self.rank}", account)

    def read(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the accounts of these workers; blocks for a second at most, for those who are about to leave one.

        Once a worker has ended without one, there is no need to wait for others: it is to blame.
        """
        found: dict[int, str] = {}
        silent, deadline_s = set(ranks), time.monotonic() + _GRACE_S
        while silent:
            ended = {rank for rank in silent if self.liveness.has_ended(rank)}
            for rank in sorted(silent):
                if self.store.check([f"account/{rank}"]):
                    found[rank] = self.store.get(f"account/{rank}").decode()
                    silent.discard(rank)
            if not silent or ended & silent or time.monotonic() >= deadline_s:
                break
            time.sleep(_POLL_INTERVAL_S)
        return found

    def explain(self, where: str, suspects: Sequence[int], waited_s: float | None, detail: str) -> PeerError:
        """Leave an account and return the error to raise, which names those who are to blame.

        Args:
            where: "call 7, all_reduce".
            suspects: those who have not done their part, as far as this worker knows.
            waited_s: how long the deadline was, if it has come.
            detail: what torch said.
        """
        failure_reports = self.read(suspects)
        silent = [rank for rank in suspects if rank not in failure_reports]
        gone = [rank for rank in silent if self.liveness.has_ended(rank)]
        about = f"worker {self.rank}, {where}"
        if gone:
            self.give(f"gave up: it lost {names(gone)} ({where})")
            return PeerError(f"{about}: {names(gone)} is gone: its connection has ended. {first_line(detail)}")
        if silent and waited_s is not None:
            self.give(f"gave up: it waited {round(waited_s, 1):g} s for {names(silent)} ({where})")
            return DeadlineExceeded(
                f"{about}: waited {round(waited_s, 1):g} s for {names(silent)}, which did not come in time. {ADVICE}"
            )
        if silent and not failure_reports:
            self.give(f"gave up: it lost its connection to {names(silent)} ({where})")
            return PeerError(f"{about}: the connection to {names(silent)} has ended. {first_line(detail)}")
        told = "; ".join(f"worker {rank} {account}" for rank, account in sorted(failure_reports.items()))
        self.give(f"gave up, as {told}" if len(told) < 200 else f"gave up ({where})")
        return PeerError(f"{about}: {told or first_line(detail)}")


def names(ranks: Sequence[int]) -> str:
    """Name workers.

    >>> names([2]), names([0, 3])
    ('worker 2', 'workers 0, 3')
    """
    return f"worker {ranks[0]}" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))}"


def first_line(text: str) -> str:
    """Return what torch says without the place in its source.

    >>> first_line("[/pytorch/gloo/pair.cc:553] Connection closed by peer [::1]:59049. This is typically caused by x")
    'Connection closed by peer [::1]:59049.'
    """
    said = text.partition("\n")[0]
    said = said.split("] ", 1)[1] if said.startswith("[") and "] " in said else said
    return said.partition(" This is typically")[0]
