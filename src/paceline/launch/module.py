"""Modules that are run by their names, as `python -m NAME` runs them."""

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Final

from paceline.errors import UsageError

OPTION: Final = "-m"


def search_path() -> list[str]:
    """Return where `python -m` would look from here: in the working folder first, unless Python is told not to."""
    return [*sys.path] if sys.flags.safe_path else [os.getcwd(), *sys.path]


def find_module(name: str, folders: Sequence[str]) -> ModuleSpec:
    """Return what Python runs under this name, of a package its `__main__`; imports nothing.

    Raises:
        UsageError: there is no such module, or it is not one that can be run.
    """
    found = _find(name, folders)
    if found is None:
        file = Path(name)
        hint = (
            f"; to run the file, leave out -m: paceline run {name}" if file.suffix == ".py" and file.is_file() else ""
        )
        raise UsageError(f"there is no module {name} (looked in {folders[0]} and where packages are installed){hint}")
    if found.submodule_search_locations is not None:
        found = _find(f"{name}.__main__", folders)
    if found is None:
        raise UsageError(f"{name} is a package without a __main__, so it cannot be run: name a module in it")
    return found


def source_of(name: str, folders: Sequence[str]) -> Path:
    """Return the file of the module that runs under this name; raises as `find_module` does."""
    found = find_module(name, folders)
    if not found.has_location or found.origin is None:
        raise UsageError(f"the module {name} is built into Python and has no code to run")
    return Path(found.origin)


def _find(name: str, folders: Sequence[str]) -> ModuleSpec | None:
    top, *inner = name.split(".")
    found = PathFinder.find_spec(top, folders) or (importlib.util.find_spec(top) if top else None)
    for number in range(len(inner)):
        if found is None or found.submodule_search_locations is None:
            return None
        full = ".".join((top, *inner[: number + 1]))
        found = PathFinder.find_spec(full, list(found.submodule_search_locations))
    return found
