"""Means of what scripts report, which may be beyond what floats add up."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def mean(values: Iterable[float]) -> float:
    """Return the mean of one or more values; infinite or NaN where `fmean` raises, as the sum has no finite value.

    >>> mean([1.0, 2.0]), mean([1e308, 1e308]), mean([float("inf"), -float("inf")])
    (1.5, inf, nan)
    """
    known = tuple(values)
    try:
        return fmean(known)
    except (OverflowError, ValueError):
        return sum(known) / len(known)
