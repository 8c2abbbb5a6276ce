"""How long the steps of a trainer took that `publishes.py` runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from tests.faults.running import Run

MOST_S: Final = 5.0  # of a step on a machine with other work
_TOLD: Final = re.compile(r"(\d+) steps of ([\d.]+) s, (\d+) held up, the longest ([\d.]+) s")


@dataclass(frozen=True, slots=True)
class Steps:
    """How many steps a worker took, how long they usually were, and how many took longer by more than a whole step."""

    num: int
    usual_s: float
    num_held_up: int
    longest_s: float


def steps_of(run: Run) -> list[Steps]:
    """Return those of each worker that has ended by itself."""
    found = (_TOLD.search(line) for line in run.lines)
    return [Steps(int(each[1]), float(each[2]), int(each[3]), float(each[4])) for each in found if each]
