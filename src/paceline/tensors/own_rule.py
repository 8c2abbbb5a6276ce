"""Rules of your own, for dense tables and for rows: found by import path, built without arguments."""

from __future__ import annotations

import importlib
from collections.abc import Set as AbstractSet

from paceline.errors import UsageError


def split_path(path: str) -> tuple[str, str]:
    """Return module and class of "package.module:Rule"; raise UsageError when the path has another form."""
    module_name, _, class_name = path.partition(":")
    if not (all(part.isidentifier() for part in module_name.split(".")) and class_name.isidentifier()):
        raise UsageError(
            f"'{path}' names no update rule. Expected 'add', 'torch.optim.<class>', a name that paceline.update gives, "
            "or the import path of a rule of your own: 'package.module:Rule'."
        )
    return module_name, class_name


def build_own(path: str, allowed: AbstractSet[str] | None) -> object:
    """Return a new object of the class at `path`; nothing is imported that may not be loaded.

    Args:
        path: "package.module:Rule".
        allowed: the import paths that may be loaded; None allows all, which is for code that you wrote yourself.

    Raises:
        UsageError: the path is not allowed, cannot be imported, or names no class that is built without arguments.
    """
    module_name, class_name = split_path(path)
    if allowed is not None and path not in allowed:
        raise UsageError(
            f"The update rule {path} may not be loaded here. Allowed: {', '.join(sorted(allowed)) or 'none'}. "
            "Start the servers with this path among their allowed rules."
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UsageError(
            f"The update rule {path} cannot be imported: {error}. Is it installed on the servers?"
        ) from error
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        raise UsageError(f"Module {module_name} has no class {class_name}, which the update rule {path} names.")
    try:
        return cls()
    except TypeError as error:
        raise UsageError(f"The update rule {path} must be built without arguments: {error}.") from error


def missing_members(made: object, members: tuple[str, ...]) -> str:
    """Return which members an object lacks, for a message."""
    return ", ".join(name for name in members if name not in dir(made))
