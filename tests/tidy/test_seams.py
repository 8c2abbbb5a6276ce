"""Where a new rule, policy, carrier or kind of table goes: one or two files, named on the page about the architecture.

Held by what is there: no other module names one of several implementations.
"""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest
from tests.tidy.tree import ROOT, SOURCE, parsed, python_files

# By row of the page: implementations that its files alone may name, beside the faces of folders (`__init__.py`).
IMPLEMENTATIONS = {
    "Kind of table on servers": (
        "paceline.server.dense_table:ServedDenseTable",
        "paceline.server.row_table:ServedRowTable",
    ),
    "Kind of table on workers": (
        "paceline.worker.dense:DenseClient",
        "paceline.worker.rows.client:RowClient",
        "paceline.core.table_reads:DenseReads",
        "paceline.core.table_reads:RowReads",
    ),
    "Carrier": ("paceline.transport.shm:CARRIER", "paceline.transport.tcp:CARRIER", "paceline.transport:tcp"),
    "Policy": ("paceline.core.consistency:ssp", "paceline.core.consistency:essp", "paceline.core.consistency:backup"),
    "Update rule": ("paceline.update.named_rules:Adam", "paceline.update.kernels:AdamKernel"),
    "Row rule": ("paceline.update.named_rules:FTRL", "paceline.update.rows.rules:FTRLRows"),
    "Filter": ("paceline.update.filters:TopK", "paceline.update.filters.pipeline:Selection"),
    "Launcher": ("paceline.launch.rendezvous.detect:_slurm",),
}


def rows() -> dict[str, set[str]]:
    """The files by row of the table on the page."""
    text = (ROOT / "docs" / "architecture.md").read_text().partition("## Where a new part goes")[2]
    found = re.findall(r"^\| ([A-Z][\w ]+) \| (.*`.*) \|$", text, re.MULTILINE)
    return {name: set(re.findall(r"`([\w/]+\.py)`", files)) for name, files in found}


@cache
def imports() -> frozenset[tuple[str, str]]:
    """Each module, and the full name of what it imports, as `module:name`."""
    return frozenset(
        (path.relative_to(SOURCE).as_posix(), f"{node.module}:{alias.name}")
        for path in python_files("src")
        if path.is_relative_to(SOURCE) and path.name != "__init__.py"
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    )


@pytest.mark.parametrize("row", IMPLEMENTATIONS)
def test_only_the_files_that_the_page_names_know_an_implementation(row: str) -> None:
    files = rows()[row]
    homes = {
        name.partition(":")[0].removeprefix("paceline.").replace(".", "/") + ".py" for name in IMPLEMENTATIONS[row]
    }
    users = {place for place, name in imports() if name in IMPLEMENTATIONS[row]}
    assert users - homes <= files
    assert all((SOURCE / file).is_file() for file in files)


def test_every_implementation_is_there() -> None:
    for name in (name for names in IMPLEMENTATIONS.values() for name in names):
        module, _, own = name.partition(":")
        path = SOURCE.joinpath(*module.split(".")[1:])
        source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert (path / f"{own}.py").is_file() or re.search(
            rf"^(?:def |class )?{own}\b", source.read_text(), re.MULTILINE
        )
