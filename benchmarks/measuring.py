"""What the benchmarks share: medians and their spread, this machine in words, its copy rate, and the last JSON line."""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

NUM_CORES: Final = len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True)
class Sample:
    """The median of some measurements, and between which numbers the middle half of them lies."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(numbers: Sequence[float]) -> "Sample":
        """Sum up some measurements.

        >>> Sample.of([3.0, 1.0, 2.0])
        Sample(median=2.0, low=1.5, high=2.5)
        """
        if len(numbers) == 1:
            return Sample(numbers[0], numbers[0], numbers[0])
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return Sample(median, low, high)

    def text(self, unit: str = "", digits: int = 1) -> str:
        """Write it as "median unit (low to high)"."""
        return f"{self.median:.{digits}f}{unit} ({self.low:.{digits}f} to {self.high:.{digits}f})"


def percentile(numbers: Sequence[float], share: float) -> float:
    """Return the least number that so great a share of the numbers does not exceed.

    >>> percentile([1.0, 3.0, 2.0], 0.99), percentile([1.0, 3.0, 2.0], 0.5)
    (3.0, 2.0)
    """
    ordered = sorted(numbers)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Copier:
    """Measures how fast this machine copies memory, with all its cores."""

    def __init__(self, num_elements: int) -> None:
        torch.set_num_threads(NUM_CORES)
        self._from = torch.randn(num_elements)
        self._to = torch.empty_like(self._from)
        self.bytes_per_s()

    def bytes_per_s(self) -> float:
        """Copy once; return the bytes read and written in a second."""
        start = time.perf_counter()
        self._to.copy_(self._from)
        return 2 * self._from.nbytes / (time.perf_counter() - start)


def machine() -> str:
    """Return this machine in one line, and how busy it is now: others' work makes numbers worse."""
    load = os.getloadavg()[0]
    return (
        f"{NUM_CORES} cores ({platform.machine()}), Python {platform.python_version()}, torch {torch.__version__}, "
        f"load {load:.1f}"
    )


def progress(text: str) -> None:
    """Say on stderr what is under way."""
    print(text, file=sys.stderr, flush=True)


def print_json(values: dict[str, object]) -> None:
    """Print the result as one line of JSON, with all numbers rounded to what they are good for."""
    print(json.dumps(_rounded(values)))


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return value
