"""Finds, checks and looks into what the user wants to run: a script, or a module by its name as `python -m` does."""

import ast
import difflib
import importlib.util
import os
import re
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence, Set
from importlib.machinery import ModuleSpec, PathFinder
from itertools import takewhile
from pathlib import Path
from typing import Final

from paceline.errors import UsageError
from paceline.launch.limits import explain

OPTION: Final = "-m"
NUM_SUGGESTIONS: Final = 3
MAX_QUOTED: Final = 100
MAX_MODULES: Final = 64
PACKAGE: Final = "__init__.py"
ENVIRONS: Final = frozenset({"environ", "environb"})
SETTERS: Final = {"load_dotenv", "putenv", "unsetenv"}
KNOWN_MODULES: Final = {"numpy", "paceline", "torch", *sys.stdlib_module_names}
OPTIMIZERS: Final = re.compile(r"optim|update\.(?!Add\b)")  # every rule but Add is made by way of torch.optim


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
    found = PathFinder.find_spec(top, folders) or _built_in(top)
    for number in range(len(inner)):
        if found is None or found.submodule_search_locations is None:
            return None
        full = ".".join((top, *inner[: number + 1]))
        found = PathFinder.find_spec(full, list(found.submodule_search_locations))
    return found


def _built_in(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name) if name else None
    except ValueError:  # it is imported and comes from nowhere, as `__main__` of this process
        return None


def check_script(script: Path) -> None:
    """Raise UsageError, with what may have been meant, when the script is not there."""
    if script.is_file():
        _check_readable(script)
        return
    if script.is_dir():
        raise UsageError(f"{script} is a folder, not a script; name the .py file to run")
    similar = _similar_files(script)
    hint = f"; did you mean {' or '.join(similar)}?" if similar else ""
    raise UsageError(f"there is no script {script} (looked from {Path.cwd()}){hint}")


def _check_readable(script: Path) -> None:
    """Raise UsageError for a script that no worker could even begin, so that it is told once."""
    try:
        content = script.read_bytes()
        if script.suffix == ".py":  # not an archive, or code that was compiled
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # each worker shows those that it is asked for
                ast.parse(content, str(script))
    except OSError as error:
        raise UsageError(f"cannot read the script {script}: {explain(error)}") from error
    except (RecursionError, MemoryError):  # too deep for this parser; Python, which may take it, says so itself
        return
    except (SyntaxError, ValueError) as error:  # ValueError: it has null bytes
        line = getattr(error, "lineno", None)
        where = f", line {line}" if line else ""
        text = ((getattr(error, "text", None) or "").strip())[:MAX_QUOTED]
        problem = f"{getattr(error, 'msg', None) or error}"
        raise UsageError(f"{script}{where}: {problem}{f': {text}' if text else ''}") from error


def _similar_files(script: Path) -> list[str]:
    if not script.parent.is_dir():
        return []
    beside = {path.name: str(path) for path in script.parent.glob("*.py")}
    names = difflib.get_close_matches(script.name, beside, n=NUM_SUGGESTIONS, cutoff=0.5)
    return [beside[name] for name in names]


def may_make_optimizers(script: Path) -> bool:
    """Return whether a script names an optimizer, or imports what might make one; True when it cannot be read."""
    try:
        text = script.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: too deep for the parser
        return True
    return OPTIMIZERS.search(text) is not None or not _imported(tree) <= KNOWN_MODULES


def sets_variables(script: Path, folder: Path) -> bool:
    """Return whether a script changes environment variables, which libraries that are already imported would miss.

    It looks into the script, into the modules in `folder` that it imports, and into those that they import.
    """
    left, seen = deque([script, *_packages_around(script, folder)]), set[Path]()
    while left and len(seen) < MAX_MODULES:
        file = left.popleft()
        if file in seen:
            continue
        seen.add(file)
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # it runs into that itself
            continue
        if _sets_variables(tree):
            return True
        left.extend(_imported_files(tree, file, folder))
    return False


def _packages_around(script: Path, folder: Path) -> Iterator[Path]:
    """Yield what Python imports before a module that lies in packages."""
    for parent in takewhile(lambda parent: parent != folder, script.parents):
        if not (parent / PACKAGE).is_file():
            return
        yield parent / PACKAGE


def _imported_files(tree: ast.AST, file: Path, folder: Path) -> Iterator[Path]:
    """Yield the files that some code imports from a folder, or from the packages that it lies in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files_of(alias.name, folder)
        elif isinstance(node, ast.ImportFrom):
            start = file.parents[min(node.level, len(file.parents)) - 1] if node.level else folder
            for alias in node.names:  # of a package, a name may be a module
                yield from _files_of(f"{node.module}.{alias.name}" if node.module else alias.name, start)


def _files_of(name: str, folder: Path) -> Iterator[Path]:
    for part in name.split("."):
        for file in (folder / f"{part}.py", folder / part / PACKAGE):
            if file.is_file():
                yield file
        folder /= part


def _sets_variables(tree: ast.AST) -> bool:
    names = {*ENVIRONS, *_aliases(tree)}
    return any(_is_change(node, names) for node in ast.walk(tree))


def _aliases(tree: ast.AST) -> Iterator[str]:
    """Yield names that some code gives to os.environ: `from os import environ as env`, `env = os.environ`."""
    for node in ast.walk(tree):
        match node:
            case ast.alias(name="environ" | "environb", asname=str(name)):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)], value=whole) if _is_environ(whole, ENVIRONS):
                yield name
            case _:
                pass


def _is_change(node: ast.AST, names: Set[str]) -> bool:
    match node:
        case ast.Subscript(value=whole, ctx=ast.Store() | ast.Del()):  # os.environ["A"] = ...
            return _is_environ(whole, names)
        case ast.Call(func=ast.Attribute(value=whole, attr="setdefault" | "update" | "pop" | "clear")):
            return _is_environ(whole, names)
        case ast.Call(func=ast.Attribute(attr=name) | ast.Name(id=name)):
            return name in SETTERS
        case ast.AugAssign(target=whole):  # os.environ |= {...}
            return _is_environ(whole, names)
        case _:
            return False


def _is_environ(node: ast.AST, names: Set[str]) -> bool:
    match node:
        case ast.Attribute(attr=attribute):
            return attribute in ENVIRONS
        case ast.Name(id=name):
            return name in names
        case _:
            return False


def _imported(tree: ast.AST) -> set[str]:
    """Return the packages that some code imports; "" stands for the one that it lies in."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("" if node.level else node.module or "")
    return {name.partition(".")[0] for name in names}
