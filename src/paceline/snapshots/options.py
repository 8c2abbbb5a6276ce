"""Options of `paceline run` about snapshots. Light, as the command line imports it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.errors import UsageError

_SECONDS: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AUTO: Final = "auto"
LEAST_AUTO_S: Final = 60.0
DEFAULT_KEEP: Final = 3
# While a snapshot is written, steps of a dense model take half as long again or more, of rows a tenth.
_AUTO_TIMES: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotOptions:
    """What a job is asked about snapshots.

    Parameters
    ----------
    snapshots
        Folder for snapshots of all tables, which are written while training goes on; with several machines, a folder
        that all of them see.
    snapshot_every
        Time between two snapshots, 10m or 90s for example, or auto (the default): so long that writing takes a tenth
        of the time at most.
    keep
        How many snapshots stay, by default 3; older ones are removed.
    resume
        Go on from the newest snapshot in this folder, with any number of workers and servers.
    """

    snapshots: Path | None = None
    snapshot_every: str | None = None
    keep: int | None = None
    resume: Path | None = None

    @property
    def num_kept(self) -> int:
        """How many snapshots stay."""
        return DEFAULT_KEEP if self.keep is None else self.keep

    @property
    def every_s(self) -> float:
        """Seconds between two snapshots; 0 to choose by what one takes.

        Raises:
            UsageError: it is not a valid interval.

        >>> SnapshotOptions(snapshot_every="10m").every_s, SnapshotOptions().every_s
        (600.0, 0.0)
        """
        return interval_s(self.snapshot_every or _AUTO)

    def validate(self) -> None:
        """Raise UsageError for options that do not go together, or make no sense."""
        if self.num_kept < 1:
            raise UsageError(f"--keep is {self.keep}, expected 1 or more")
        for option, value in (("--snapshot-every", self.snapshot_every), ("--keep", self.keep)):
            if value is not None and self.snapshots is None:
                raise UsageError(f"{option} is {value}, and nothing says where snapshots go: add --snapshots DIR")
        assert self.every_s >= 0


def interval_s(text: str) -> float:
    """Return the seconds of an interval as it is typed; 0 for `auto`.

    Raises:
        UsageError: it is not a valid interval.
    """
    if text == _AUTO:
        return 0.0
    number, unit = (text[:-1], text[-1:]) if text[-1:] in _SECONDS else (text, "s")
    try:
        seconds = float(number) * _SECONDS[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UsageError(f"--snapshot-every is '{text}', expected auto, or a time such as 90s, 10m or 2h")
    return seconds


def auto_interval_s(took_s: float) -> float:
    """Return the seconds between two snapshots, by how long the last one took.

    >>> auto_interval_s(0.2), auto_interval_s(30.0)
    (60.0, 300.0)
    """
    return max(LEAST_AUTO_S, _AUTO_TIMES * took_s)
