"""The batches that a worker is dealt in an epoch, read as they are dealt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from paceline.data.slicing import Walk
from paceline.data.tally import Tally
from paceline.feeding.batches import Ask, Batch
from paceline.feeding.reader import Reader


@dataclass(slots=True)
class DealtBatches:
    """What a loop gets, and what its optimizers ask whether more comes in the clock under way.

    A slice of which no record could be decoded is not handed out. So that the step before knows whether it is the last
    one of its clock, the slice that follows is read by then.
    """

    walk: Walk
    reader: Reader
    rank: int
    prefetch: int
    tally: Tally
    skips: bool  # records that could not be decoded are left out
    num_samples: int = 0  # of the batch under way, of those that could be decoded
    _rescale: float = 1.0  # of the batch under way, see `Walk.rescale`
    _held: tuple[Batch, float] | None = None  # what comes next, where that had to be known
    _pieces: Iterator[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        """Begin the walk."""
        self._pieces = iter(self.walk)
        self._expect()

    @property
    def weight(self) -> float:
        """What the batch under way weighs; see `Walk.weight`."""
        return self.num_samples * self._rescale

    @property
    def num_expected(self) -> int:
        """How many samples all have in the clock under way; 0 where others may have left out some of theirs."""
        return 0 if self.skips or not self.num_samples else self.walk.num_expected

    def more(self) -> bool:
        """Say whether another batch follows for this worker in the clock under way; blocks until that is read."""
        if not self.num_samples:
            return False
        while self._held is None and self.walk.more():
            batch = self._read(next(self._pieces))
            self._held = (batch, self.walk.rescale) if batch.num_samples else None
        return self._held is not None

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that have samples."""
        while True:
            coming, self._held = self._held or self._next(), None
            if coming is None:
                return
            batch, self._rescale = coming
            self.num_samples = batch.num_samples
            self.tally.num_samples += batch.num_samples
            yield batch

    def _next(self) -> tuple[Batch, float] | None:
        batch = next((batch for batch in map(self._read, self._pieces) if batch.num_samples), None)
        return None if batch is None else (batch, self.walk.rescale)

    def _read(self, indices: list[int]) -> Batch:
        batch = self.reader.read(Ask(self.tally.epoch, tuple(indices)))
        self.tally.num_skipped += batch.num_skipped
        if self.walk.is_again:
            self.tally.num_again += len(indices)
        self._expect()
        return batch

    def _expect(self) -> None:
        """Have the reader get ready what most likely comes: the rest of this worker's own share, and the next ones."""
        own = islice(self.walk.own_next(self.rank), self.prefetch + 1)
        self.reader.expect([Ask(self.tally.epoch, tuple(indices)) for indices in own])
