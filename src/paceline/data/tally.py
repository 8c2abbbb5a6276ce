"""Counts of the samples of an epoch that one worker received, lost or skipped."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.observe.trace import Epoch, Trace


@dataclass(slots=True)
class SampleTally:
    """Counts samples as they are handed out.

    Args:
        worker: who counts.
        epoch: of the pass.
        num_samples: that were handed out.
        num_skipped: that were left out because they could not be decoded.
        num_again: that were dealt again, because whoever had them before had died with them. Under bsp they count once
            all the same; where updates show on arrival, servers may have got some of them twice.

    What was read and then not handed out, as the loop was left, counts as skipped and as dealt again all the same.
    """

    worker: int
    epoch: int
    num_samples: int = 0
    num_skipped: int = 0
    num_again: int = 0

    def tell(self, trace: Trace, tell: Callable[[str], None], reasons: tuple[str, ...]) -> None:
        """Record it, and say what is not as it should be: records with the first reason why they were skipped."""
        trace.record(
            Epoch(time.monotonic(), self.worker, self.epoch, self.num_samples, self.num_skipped, self.num_again)
        )
        trace.flush()  # what was told is to be there, whatever becomes of this process
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
