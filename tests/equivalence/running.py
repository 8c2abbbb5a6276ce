"""Running the loops of the equivalence suite under each strategy, many in one job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tests.equivalence.cells import Cell, Outcome, Strategy, distance
from tests.equivalence.loops import train, train_alone
from tests.faults.running import running
from tests.jobs import run_job
from torch import Tensor

import paceline
from paceline.api.session import Session
from paceline.errors import UsageError

_PATIENCE_S = 300.0
SCRIPT = Path(__file__).with_name("scripts") / "processes.py"

STRATEGIES = {
    one.name: one
    for one in (
        Strategy("bsp", {}),
        Strategy("bsp, 2 servers", {}, {"servers": 2}),
        Strategy("bsp, shm", {}, {"servers": 2, "carrier": "shm"}),
        Strategy("bsp, overlap", {"overlap": True}, {"servers": 2}),
        Strategy("all-reduce", {"strategy": "all-reduce"}),
        Strategy("fsdp", {"strategy": "fsdp"}, processes=True),
        Strategy("groups", {"strategy": {"1.*": "bsp", "*": "all-reduce"}}),
        Strategy("ssp:3, alone", {"consistency": "ssp:3"}, num_workers=1),
        Strategy("asynchronous, alone", {"consistency": "asynchronous"}, num_workers=1),
        Strategy("downpour:1, alone", {"strategy": "downpour:1"}, num_workers=1),
        Strategy("local-sgd:1", {"strategy": "local-sgd:1"}),
        Strategy("local-sgd:2", {"strategy": "local-sgd:2"}),
        Strategy("diloco:2", {"strategy": "diloco:2"}),
    )
}


@cache
def expected(cell: Cell, num_workers: int) -> tuple[Tensor, ...]:
    """Return what plain torch learns in a loop."""
    return tuple(train_alone(cell, num_workers))


def run_cells(strategy: Strategy, cells: Sequence[Cell], directory: Path) -> dict[Cell, Outcome]:
    """Return how each loop ends under a strategy; after one that leaves a job unusable, the rest is run in another."""
    outcomes: dict[Cell, Outcome] = {}
    while len(outcomes) < len(cells):
        left, own = cells[len(outcomes) :], directory / str(len(outcomes))
        own.mkdir()
        outcomes |= _run_processes(strategy, left, own) if strategy.processes else _run_threads(strategy, left, own)
    return outcomes


def _run_threads(strategy: Strategy, cells: Sequence[Cell], directory: Path) -> dict[Cell, Outcome]:
    settings = {"workers": strategy.num_workers, **strategy.job}
    return merged(cells, run_job(directory, lambda worker: compared(worker, strategy, cells), **settings))


def compared(worker: Session, strategy: Strategy, cells: Iterable[Cell]) -> list[Outcome]:
    """Return how each loop ends on one worker, up to the first that leaves this job unusable."""
    outcomes: list[Outcome] = []
    for number, cell in enumerate(cells):
        worker._optimizers.clear()  # a loop that is over takes no more steps with the batches of the next
        if worker.node.clock % 2:  # rounds of two steps begin anew with each loop
            worker.clock()
        paceline.barrier()
        try:
            found = train(worker, cell, strategy.settings, f"loop {number}")
        except UsageError as error:
            outcomes.append(Outcome(refused=str(error)))
            if worker._optimizers:  # in the middle of a step, which no worker will finish
                break
        else:
            outcomes.append(Outcome(distance(found, list(expected(cell, strategy.num_workers)))))
    return outcomes


def merged(cells: Sequence[Cell], found: Sequence[Sequence[Outcome]]) -> dict[Cell, Outcome]:
    """Return the outcome of each loop over all workers: refused on all or on none, and the furthest off."""
    outcomes: dict[Cell, Outcome] = {}
    for cell, told in zip(cells, zip(*found, strict=True), strict=False):
        refusals = [one.refused for one in told if one.refused]
        assert len(refusals) in (0, len(told)), f"{cell.name}: some workers are refused only: {told}"
        outcomes[cell] = Outcome(refused=refusals[0]) if refusals else Outcome(max(one.off for one in told))
    return outcomes


def _run_processes(strategy: Strategy, cells: Sequence[Cell], directory: Path) -> dict[Cell, Outcome]:
    asked = directory / "asked.json"
    asked.write_text(json.dumps({"strategy": strategy.name, "cells": [vars(cell) for cell in cells]}))
    with running(directory / "run", SCRIPT, str(asked), options=("-n", str(strategy.num_workers))) as run:
        code = run.end(_PATIENCE_S)
    assert code == 0, run.output
    told = [json.loads(line.partition("outcomes ")[2]) for line in run.saying("outcomes ")]
    return merged(cells, [[Outcome(**one) for one in outcomes] for outcomes in told])
