"""Code of your own on the servers: found by import path; rules are built without arguments."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Set as AbstractSet

from paceline.errors import UsageError


def split_path(path: str, kind: str = "update rule") -> tuple[str, str]:
    """Return module and member of "package.module:Member"; raise UsageError when the path has another form."""
    module_name, _, member = path.partition(":")
    if not (all(part.isidentifier() for part in module_name.split(".")) and member.isidentifier()):
        names = "'add', 'torch.optim.<class>', a name that paceline.update gives" if kind == "update rule" else "a name"
        raise UsageError(
            f"'{path}' names no {kind}. Expected {names}, or the import path of one of your own: 'package.module:Name'."
        )
    return module_name, member


def member_at(path: str, allowed: AbstractSet[str] | None, kind: str = "update rule") -> object:
    """Return what lies at `path`; nothing is imported that may not be loaded.

    Args:
        path: "package.module:Member".
        allowed: the import paths that may be loaded; None allows all, which is for code that you wrote yourself.
        kind: what it should be, for messages.

    Raises:
        UsageError: the path is not allowed, is one of Python's own library, or cannot be imported.
    """
    module_name, member = split_path(path, kind)
    if allowed is not None and path not in allowed:
        raise UsageError(
            f"The {kind} {path} may not be loaded here. Allowed: {', '.join(sorted(allowed)) or 'none'}. "
            "Start the servers with this path among those that are allowed."
        )
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise UsageError(f"{path} is part of Python's own library, which has no {kind}: it is not run for a worker.")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a module may do as it is imported, the server goes on
        why = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise UsageError(f"The {kind} {path} cannot be imported: {why}. Is it installed on the servers?") from error
    return getattr(module, member, None)


def build_own(path: str, allowed: AbstractSet[str] | None) -> object:
    """Return a new object of the class at `path`.

    Raises:
        UsageError: the path is not allowed, cannot be imported, or names no class that is built without arguments.
    """
    cls = member_at(path, allowed)
    if not isinstance(cls, type):
        module_name, name = split_path(path)
        raise UsageError(f"Module {module_name} has no class {name}, which the update rule {path} names.")
    try:
        return cls()
    except TypeError as error:
        raise UsageError(f"The update rule {path} must be built without arguments: {error}.") from error


def missing_members(made: object, members: tuple[str, ...]) -> str:
    """Return which members an object lacks, for a message."""
    return ", ".join(name for name in members if name not in dir(made))
