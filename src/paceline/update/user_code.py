"""The user's code on servers: imported by path, and prevented from ending the process.

An import path may name code of the user or of an installed package. It may not name Python's own library or tests,
private modules, or modules of Paceline.
"""

from __future__ import annotations

import importlib
import sys
import sysconfig
from collections.abc import Generator
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from paceline.errors import UsageError

_is_importing: Final = ContextVar("paceline_is_importing", default=False)  # whether this thread imports code by path


def split_path(path: str, kind: str = "update rule") -> tuple[str, str]:
    """Return module and member of "package.module:Member"; raise UsageError when the path has another form."""
    module_name, _, member = path.partition(":")
    if not (all(part.isidentifier() for part in module_name.split(".")) and member.isidentifier()):
        names = "'add', 'torch.optim.<class>', a name that paceline.update gives" if kind == "update rule" else "a name"
        raise UsageError(
            f"'{path}' names no {kind}. Expected {names}, or the import path of one of your own: 'package.module:Name'."
        )
    return module_name, member


@contextmanager
def own_code(what: str) -> Generator[None]:
    """Run the user's code so that it cannot end the process.

    Raises:
        UsageError: it has called `sys.exit`, or raised something other than an `Exception`.
    """
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise UsageError(f"{what} ended with {type(error).__name__}({error}), which servers do not do.") from error


@cache
def _is_of_python(package: str) -> bool:
    """Return whether a package comes with Python: its library, its tests, or built in."""
    if package in sys.stdlib_module_names:
        return True
    try:
        found = find_spec(package)
    except (ImportError, ValueError):  # such as __main__ has none
        return False
    if found is None or found.origin is None:
        return False
    here = Path(found.origin)
    lies_in_library = any(here.is_relative_to(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(here.parts)
    return found.origin in ("built-in", "frozen") or (lies_in_library and not is_installed)


def _require_fit(path: str, module_name: str, kind: str) -> None:
    """Raise UsageError for modules that a worker may not name."""
    parts = module_name.split(".")
    if _is_of_python(parts[0]):
        raise UsageError(f"{path} is part of Python's own library, which has no {kind}: it is not run for a worker.")
    if any(part.startswith("_") for part in parts):
        raise UsageError(f"{path} is in a private module, or in the script itself: put the {kind} into a module.")
    if parts[0] == "paceline":
        raise UsageError(f"{path} is part of Paceline, which has no {kind} by import path.")


def member_at(path: str, allowed: AbstractSet[str] | None, kind: str = "update rule") -> object:
    """Return what lies at `path`; nothing is imported that may not be loaded.

    Args:
        path: "package.module:Member".
        allowed: the import paths that may be loaded; None allows all, which is for code that you wrote yourself.
        kind: what it should be, for messages.

    Raises:
        UsageError: the path is not allowed, belongs to Python or is private, or cannot be imported.
    """
    module_name, member = split_path(path, kind)
    if allowed is not None and path not in allowed:
        raise UsageError(
            f"The {kind} {path} may not be loaded here. Allowed: {', '.join(sorted(allowed)) or 'none'}. "
            "Start the servers with this path among those that are allowed."
        )
    _require_fit(path, module_name, kind)
    before = _is_importing.set(True)
    try:
        with own_code(f"Module {module_name}"):
            module = importlib.import_module(module_name)
    except Exception as error:  # whatever a module may do as it is imported, the server goes on
        why = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"The {kind} {path} cannot be imported: {why}. Is it installed on the servers?") from error
    finally:
        _is_importing.reset(before)
    return getattr(module, member, None)


def require_no_import() -> None:
    """Raise UsageError where a script that is imported by path begins to train, within the script that named it."""
    if _is_importing.get():
        raise UsageError(
            "it is in a script that trains. Put it into a module of its own, or what trains under "
            "`if __name__ == '__main__':`"
        )


def build_own(path: str, allowed: AbstractSet[str] | None) -> object:
    """Return a new object of the class at `path`.

    Raises:
        UsageError: the path is not allowed, cannot be imported, or is not a class that is built without arguments.
    """
    cls = member_at(path, allowed)
    if not isinstance(cls, type):
        module_name, name = split_path(path)
        raise UsageError(f"Module {module_name} has no class {name}, which the update rule {path} names.")
    try:
        with own_code(f"The update rule {path}"):
            return cls()
    except TypeError as error:
        raise UsageError(f"The update rule {path} must be built without arguments: {error}.") from error


def missing_members(made: object, members: tuple[str, ...]) -> str:
    """Return which members an object lacks, for a message."""
    return ", ".join(name for name in members if name not in dir(made))
