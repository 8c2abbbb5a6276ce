"""Options of `paceline run` about records for `paceline replay`. Light, as the command line imports it."""

from dataclasses import dataclass
from typing import Annotated, Final

from cyclopts import Parameter

from paceline.errors import UsageError

_MOST_GIB: Final = 2.0**30  # more than any disk has


@dataclass(frozen=True, slots=True)
class RecordOptions:
    """What a job is asked about records.

    Parameters
    ----------
    record
        Keep in --run-dir what each server is told, so that `paceline replay` can do it again.
    record_gib
        How much disk the records of all servers may take, in GiB; what comes after that is not recorded.
    """

    record: Annotated[bool, Parameter(negative="")] = False
    record_gib: float = 10.0

    def validate(self, *, stays: bool) -> None:
        """Raise UsageError for no disk, and without a folder that stays."""
        if self.record and not stays:
            raise UsageError("--record needs a folder that stays: name one with --run-dir")
        if not 0 < self.record_gib <= _MOST_GIB:
            raise UsageError(f"--record-gib must be more than 0 and at most {_MOST_GIB:.0f}, got {self.record_gib:g}")

    def max_bytes(self, num_servers: int) -> int:
        """Return how much the record of each server may have; 0 keeps none."""
        return int(self.record_gib * 2**30) // num_servers if self.record else 0
