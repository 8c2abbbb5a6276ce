"""Each strategy against plain torch: the page says what comes out, and what is equal alone is equal together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.equivalence.cells import AXES, Cell, in_pairs, one_by_one
from tests.equivalence.page import PAGE, entries_of, read, render
from tests.equivalence.running import STRATEGIES, run_cells

QUICK = {"bsp, 2 servers", "all-reduce", "fsdp", "ssp:3, alone", "local-sgd:1", "diloco:2"}
NAMES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.campaign) for name in STRATEGIES]

SEVERAL_BACKWARDS = {  # where a step may not have some on some workers only
    "all-reduce": {"without it"},
    "groups": {"without it"},
    "fsdp": {"without it", "in accumulate()"},
}


@pytest.mark.parametrize("name", NAMES)
def test_the_page_says_what_comes_out(tmp_path: Path, name: str) -> None:
    page = read(PAGE.read_text())
    assert entries_of(name, tmp_path) == {row: entry for (of, row), entry in page.items() if of == name}


def test_the_page_is_of_the_loops_and_strategies_that_there_are() -> None:
    text = PAGE.read_text()
    assert render(read(text)) == text, "run `python -m tests.equivalence.page`"


def test_pairs_are_all_there() -> None:
    found = [vars(cell) for cell in in_pairs()]
    assert len(found) < 100
    for axis, values in AXES.items():
        for other, others in AXES.items():
            if axis < other:
                met = {(cell[axis], cell[other]) for cell in found}
                wanted = {(value, another) for value in values[1:] for another in others[1:]}
                assert {pair for pair in wanted - met if "LBFGS" not in pair} == set()
    assert len(list(one_by_one())) == 1 + sum(len(values) - 1 for values in AXES.values())


@pytest.mark.campaign
@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_equal_alone_is_equal_together(tmp_path: Path, name: str) -> None:
    page = {row: entry for (of, row), entry in read(PAGE.read_text()).items() if of == name}
    surprises: list[str] = []
    for cell, outcome in run_cells(STRATEGIES[name], list(in_pairs()), tmp_path).items():
        alone = {page[row] for row in alone_of(cell)}
        may_differ = bool(alone - {"=", "refused"})
        may_be_refused = "refused" in alone or refused_together(name, cell)
        if str(outcome) != "=" and not (may_be_refused if outcome.refused else may_differ):
            surprises.append(f"{cell.name}: {outcome} {outcome.refused}")
    assert surprises == []


def alone_of(cell: Cell) -> list[str]:
    """Return the rows of the page for each change of a loop alone."""
    changes = {axis: value for axis, value in vars(cell).items() if value != getattr(Cell, axis)}
    return [replace(Cell(), **{axis: value}).name for axis, value in changes.items()]


def refused_together(name: str, cell: Cell) -> bool:
    """Return whether two changes are refused where they meet, as the page says."""
    some_only = cell.batches == "one missing" and cell.accumulation in SEVERAL_BACKWARDS.get(name, ())
    all_frozen = name == "groups" and (cell.optimizer, cell.parameters) == ("Muon", "frozen later")
    return some_only or all_frozen
