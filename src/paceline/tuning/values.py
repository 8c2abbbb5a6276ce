"""What a script has reported so far, as the values that trials are compared by."""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING, Final, final

from paceline.observe.trace import Evaluated, Reported, Step

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.observe.trace import Record
    from paceline.tuning.space import Metric

_NO_NUMBER: Final = math.nan


@final
class Series:
    """Numbers that several workers report alike: the first of each, the second of each, and so on, as their means."""

    def __init__(self) -> None:
        self._by_worker: dict[int, list[float]] = {}
        # The means of the first rounds; looked at many times a second, so each is made once.
        self._means: list[float] = []

    def add(self, worker: int, number: float | None) -> None:
        """Take the next number of a worker; None is one that is not finite."""
        if worker not in self._by_worker:
            self._by_worker[worker] = []
            self._means.clear()  # it was in none of them
        self._by_worker[worker].append(_NO_NUMBER if number is None else number)

    def means(self, *, to_the_end: bool) -> list[float]:
        """Return the mean of each round: those that every worker has had which reports at all, or, at the end, all."""
        lengths = [len(numbers) for numbers in self._by_worker.values()] or [0]
        self._means += [self._mean(turn) for turn in range(len(self._means), min(lengths))]
        return self._means + [self._mean(turn) for turn in range(min(lengths), max(lengths) if to_the_end else 0)]

    def _mean(self, turn: int) -> float:
        return fmean(numbers[turn] for numbers in self._by_worker.values() if turn < len(numbers))


@final
class Values:
    """What one trial has reported.

    Args:
        metric: which of it counts.
        every: how many reports of training loss make one value.

    Example:
        >>> values = Values("loss", every=2)
        >>> for clock, loss in enumerate((4.0, 2.0, 1.0)):
        ...     values.add(Step(0.0, 0, clock, 8, loss, 0.0, 0.1))
        >>> values.so_far(measured=False), values.final(measured=False)
        ([3.0], 1.5)
    """

    def __init__(self, metric: Metric, every: int) -> None:
        self._metric = metric
        self._every = every
        self._training = Series()
        self._measured = Series()

    def add(self, record: Record) -> None:
        """Take one record of the trial's traces."""
        match record:
            case Evaluated():
                number = record.accuracy if self._metric == "accuracy" else record.loss
                self._measured.add(record.worker, number)
            case Step() if record.loss is not None:
                self._training.add(record.worker, record.loss)
            case Reported():
                self._training.add(record.worker, record.loss)
            case _:
                pass

    @property
    def has_measured(self) -> bool:
        """Whether something was measured on held-out data."""
        return bool(self._measured.means(to_the_end=True))

    def so_far(self, *, measured: bool, ended: bool = False) -> Sequence[float]:
        """Return all values up to now, in order: measurements, or the training loss; NaN is no finite number.

        Those that other workers may still add to are left out, until the trial has ended.
        """
        if measured or self._metric == "accuracy":
            return self._measured.means(to_the_end=ended)
        losses = self._training.means(to_the_end=ended)
        return [fmean(losses[end - self._every : end]) for end in range(self._every, len(losses) + 1, self._every)]

    def final(self, *, measured: bool) -> float | None:
        """Return the value of the whole trial, which has ended; None if it has reported nothing that counts."""
        if measured or self._metric == "accuracy":
            return next(reversed(self._measured.means(to_the_end=True)), None)
        losses = self._training.means(to_the_end=True)[-self._every :]
        return fmean(losses) if losses else None
