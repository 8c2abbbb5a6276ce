"""Hunts a mutant in the `paceline` that is imported: `python -m tests.mutants.hunt SEEDS` prints what killed it.

The seeded campaign knows nothing of the code; the direct checks see what it cannot. Exit code 1 means killed.
"""

from __future__ import annotations

import sys

from tests.mutants.checks import CHECKS
from tests.simulate.swarm import POINTS, draw

from paceline.core.consistency import backup, bsp
from paceline.errors import ProtocolBug
from paceline.simulate.history import Violation
from paceline.simulate.world import World

# Rare mistakes show where clocks close or quorums are short; these points come up more often here.
_POINTS = (*POINTS, bsp(), backup(1))


def hunt(num_seeds: int) -> str:
    """Return what was found to be wrong, or nothing: a few seeds find most, the checks are quick, then the rest."""
    few = min(num_seeds, 10)
    return rehearse(range(few)) or ask() or rehearse(range(few, num_seeds))


def rehearse(seeds: range) -> str:
    """Run the campaign over these seeds."""
    for seed in seeds:
        try:
            World(draw(seed, _POINTS, num_clocks=(3, 15))).run()
        except Violation as error:
            return f"seed {seed}: {error}"
        except (ProtocolBug, LookupError) as error:
            return f"seed {seed}: {type(error).__name__}: {error}"
    return ""


def ask() -> str:
    """Make the direct checks."""
    for check in CHECKS:
        try:
            check()
        except AssertionError:
            return f"check {check.__name__}"
    return ""


if __name__ == "__main__":
    found = hunt(int(sys.argv[1]))
    print(found)
    raise SystemExit(1 if found else 0)
