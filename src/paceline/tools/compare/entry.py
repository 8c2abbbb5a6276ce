"""One entry of a comparison: a strategy and a number of workers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from paceline.errors import UsageError
from paceline.job.strategy import Distribution

SINGLE: Final = "single"
_COUNT: Final = "@"
_NOT_OF_A_NAME: Final = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class ComparedEntry:
    """One run of a comparison.

    Args:
        strategy: how the workers share the work; None for one worker alone, with its server in the same process.
        num_workers: of the run.
    """

    strategy: Distribution | None
    num_workers: int

    @property
    def ranks_per_replica(self) -> int:
        """How many workers work on the same samples."""
        return 1 if self.strategy is None else self.strategy.ranks_per_replica

    @property
    def file_name(self) -> str:
        """What its folder is called.

        >>> ComparedEntry.parse("ssp:3+pipeline:2@4", 2).file_name
        'ssp-3-pipeline-2-4-workers'
        """
        return _NOT_OF_A_NAME.sub("-", f"{self.strategy or SINGLE} {self.num_workers} workers")

    def __str__(self) -> str:
        """Write it as it is read."""
        return SINGLE if self.strategy is None else f"{self.strategy}{_COUNT}{self.num_workers}"

    @staticmethod
    def parse(text: str, num_workers: int) -> ComparedEntry:
        """Read a strategy, behind which its own number of workers may stand.

        Args:
            text: "single", or a strategy as `paceline run` takes it, "all-reduce" or "ssp:3+pipeline:2@4".
            num_workers: where the text has none.

        Raises:
            UsageError: the strategy is not known, or so many workers cannot share the work like this.

        Example:
            >>> ComparedEntry.parse("pipeline:2+SSP:3@4", 2).num_workers
            4
        """
        name, separator, count = text.strip().lower().partition(_COUNT)
        if separator:
            if not count.isascii() or not count.isdigit() or int(count) < 1:
                raise UsageError(f"strategy '{text}': behind {_COUNT} stands a number of workers, as in all-reduce@2.")
            num_workers = int(count)
        if name == SINGLE:
            if separator and num_workers != 1:
                raise UsageError(f"strategy '{text}': {SINGLE} is one worker.")
            return ComparedEntry(None, 1)
        strategy = Distribution.parse(name)
        strategy.num_replicas(num_workers)
        return ComparedEntry(strategy, num_workers)


def parse_entries(text: str, num_workers: int) -> list[ComparedEntry]:
    """Read entries that are separated by commas.

    Raises:
        UsageError: there is none, one comes twice, or one cannot be read.

    Example:
        >>> [str(entry) for entry in parse_entries("single, all-reduce, ssp:3@4", 2)]
        ['single', 'all-reduce@2', 'ssp:3@4']
    """
    entries = [ComparedEntry.parse(one, num_workers) for one in text.split(",") if one.strip()]
    twice = [str(entry) for entry in dict.fromkeys(entries) if entries.count(entry) > 1]
    if not entries or twice:
        what = f"{', '.join(twice)} twice" if twice else "none"
        raise UsageError(f"--strategies '{text}': expected different strategies, separated by commas; got {what}.")
    return entries
