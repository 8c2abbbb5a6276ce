"""Hunts a mutant in row tables: `python -m tests.mutants.row_hunt cores|order|nodes SEEDS` prints what killed it.

Exit code 1 means killed. The cores are asked directly first, and then rehearsed; neither needs torch. "order" is the
simulator alone, whose checkers know nothing of the code.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.simulate.history import Violation

_OF_CORES = ("tests.core.test_row_reads", "tests.core.test_row_readers")
_OF_NODES = ("tests.worker.rows.test_reads", "tests.worker.rows.test_cache", "tests.worker.rows.test_orders")


def hunt_cores(num_seeds: int) -> str:
    """Return what was found to be wrong, or nothing."""
    from tests.core.row_chance import chance

    return _ask(_OF_CORES) or next(
        (f"seed {seed}" for seed in range(num_seeds) if _fails(lambda seed=seed: chance(seed))), ""
    )


def hunt_order(num_seeds: int) -> str:
    """Return what was found to be wrong, or nothing."""
    from tests.simulate.row_swarm import draw_rows

    from paceline.simulate.world import World

    return next((f"seed {seed}" for seed in range(num_seeds) if _fails(World(draw_rows(seed)).run)), "")


def hunt_nodes(num_seeds: int) -> str:
    """Return what was found to be wrong, or nothing."""
    import torch
    from tests.worker.rows.rehearsal import Rehearsal

    from paceline.core.consistency import essp, ssp

    torch.set_num_threads(1)
    points = (essp(1), ssp(1), essp(2), ssp(2), essp(0))

    def rehearse(seed: int) -> None:
        run = Rehearsal(seed, points[seed % 5], num_servers=1 + seed % 3, roughness=0.05, max_rows=6 * (seed % 2))
        run.run(400)

    return _ask(_OF_NODES) or next(
        (f"seed {seed}" for seed in range(num_seeds) if _fails(lambda seed=seed: rehearse(seed))), ""
    )


def _ask(modules: tuple[str, ...]) -> str:
    """Make the direct checks."""
    for name in modules:
        for test, check in vars(importlib.import_module(name)).items():
            if test.startswith("test_") and _fails(check):
                return f"check {test}"
    return ""


def _fails(check: Callable[[], object]) -> bool:
    try:
        check()
    except (AssertionError, PacelineError, LookupError, Violation):
        return True
    return False


if __name__ == "__main__":
    found = {"cores": hunt_cores, "order": hunt_order, "nodes": hunt_nodes}[sys.argv[1]](int(sys.argv[2]))
    print(found)
    raise SystemExit(1 if found else 0)
