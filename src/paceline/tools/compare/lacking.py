"""What a script lacks for a comparison, found in its text before anything runs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from paceline.errors import UsageError
from paceline.tools.compare.runs import ComparedEntry

_REPORT: Final = "report"
_PARALLELIZE: Final = "parallelize"


def check_imports(script: Path) -> None:
    """Raise UsageError for a module that a script imports as it starts, and that is not there: every run would fail.

    Imports that may fail, or that run later, are not looked at: those in `try`, in `if` and in functions.
    """
    for node, name in _imported(_body(script)):
        if not (script.parent / name).is_dir() and not (script.parent / f"{name}.py").is_file() and not _is_there(name):
            raise UsageError(
                f"{script}, line {node.lineno}: it imports {name}, which is not installed here; install it, or run the "
                "comparison in the environment that has it."
            )


def notes_on(script: Path, entries: Iterable[ComparedEntry]) -> list[str]:
    """Return a sentence for each thing that the script names nowhere, and that a comparison or a strategy needs.

    A module of its own that the script imports may have it, so these are notes and no errors.
    """
    names = {part for node in ast.walk(ast.Module(_body(script), [])) for part in _names(node)}
    notes: list[str] = []
    if _REPORT not in names:
        notes.append(
            f"{script} names no paceline.report: unless a module of its own calls paceline.report(loss=...) in each "
            "step, the comparison has no losses."
        )
    split = [str(entry) for entry in entries if entry.ranks_per_replica > 1]
    if split and _PARALLELIZE not in names:
        notes.append(f"{script} names no paceline.parallelize, which {', '.join(split)} need to cut the model.")
    return notes


def _body(script: Path) -> list[ast.stmt]:
    if script.suffix != ".py":  # an archive, or code that was compiled
        return []
    try:
        return ast.parse(script.read_bytes(), str(script)).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):  # told by what starts it
        return []


def _imported(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, str]]:
    """Yield each module that is imported whenever this is run, with its statement: the first part of its name."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node, node.module.partition(".")[0]


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):  # a module without a spec is there
        return True


def _names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Attribute():
            yield node.attr
        case ast.Name():
            yield node.id
        case ast.alias():
            yield node.name
        case _:
            pass
