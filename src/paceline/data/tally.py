"""Counts of the samples of an epoch that one worker received, lost or skipped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.observe.trace import Epoch, Trace


@dataclass(slots=True)
class SampleTally:
    """Sample counts of one pass.

    Args:
        worker: rank of the worker that counts.
        epoch: of the pass.
        num_samples: returned to the loop.
        num_skipped: left out because they could not be decoded.
        num_again: read again after a worker died with them. Under bsp their updates count once all the same; where
            updates show on arrival, servers may have applied some of them twice.

    Samples that were read but not returned, because the loop was left, count as skipped and as read again all the same.
    """

    worker: int
    epoch: int
    num_samples: int = 0
    num_skipped: int = 0
    num_again: int = 0

    def tell(self, trace: Trace, tell: Callable[[str], None], reasons: tuple[str, ...]) -> None:
        """Record the counts, and report skipped samples, with the first reason, and those read again."""
        trace.record(
            Epoch(time.monotonic(), self.worker, self.epoch, self.num_samples, self.num_skipped, self.num_again)
        )
        trace.flush()  # so that a report on stderr has its record, also if this process is killed
        if self.num_skipped:
            why = f": {reasons[0]}" if reasons else ""
            tell(
                f"worker {self.worker} left out {self.num_skipped} of {self.num_samples + self.num_skipped} records of "
                f"epoch {self.epoch} that could not be decoded{why}"
            )
        if self.num_again:
            tell(
                f"worker {self.worker} was dealt {self.num_again} samples of epoch {self.epoch} again, which a worker "
                "had that has died"
            )
