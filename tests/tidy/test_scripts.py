"""Benchmarks and examples find what they import, and say which options they take."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.tidy.tree import ROOT, parsed, place, python_files

PROGRAM = Path(__file__).with_name("scripts") / "try_out.py"
# Of benchmarks that measure others; not among what the tests need.
FOREIGN = ("tensorflow", "torchft")


def scripts() -> list[Path]:
    """The files of all benchmarks and examples."""
    found = python_files("benchmarks", "examples")
    assert len(found) > 80
    return found


def is_there(module: str, name: str) -> bool:
    """Whether a module of Paceline has this name, or is a package with such a module."""
    try:
        return hasattr(import_module(module), name) or find_spec(f"{module}.{name}") is not None
    except ModuleNotFoundError:
        return False


def test_what_scripts_import_from_paceline_is_there() -> None:
    wanted = [
        (place(path, node.lineno), node.module or "", alias.name)
        for path in scripts()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "paceline"
        for alias in node.names
    ]
    assert len(wanted) > 50
    assert [f"{where}: {module}.{name}" for where, module, name in wanted if not is_there(module, name)] == []


@pytest.mark.campaign
def test_programs_are_imported_and_say_which_options_they_take() -> None:
    programs = [path for path in scripts() if "__main__" in path.read_text() and path.name != "__main__.py"]
    tried = [f"{'help' if 'ArgumentParser(' in path.read_text() else 'import'} {path}" for path in programs]
    command = [sys.executable, str(PROGRAM), str(ROOT / "benchmarks"), *FOREIGN]
    done = subprocess.run(command, input="\n".join(tried), capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
