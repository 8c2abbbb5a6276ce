"""What a script will need, as far as a look at it tells: for what is done ahead, where a mistake costs but time."""

import ast
import re
import sys
from pathlib import Path
from typing import Final

KNOWN_MODULES: Final = {"numpy", "paceline", "torch", *sys.stdlib_module_names}
OPTIMIZERS: Final = re.compile(r"optim|update\.(?!Add\b)")  # every rule but Add is made by way of torch.optim


def may_make_optimizers(script: Path) -> bool:
    """Tell whether a script names an optimizer, or imports what might make one; True when it cannot be read."""
    try:
        text = script.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # the last two: too deep for the parser
        return True
    return OPTIMIZERS.search(text) is not None or not _imported(tree) <= KNOWN_MODULES


def sets_variables(script: Path) -> bool:
    """Tell whether a script changes environment variables: libraries that are imported already would not see that."""
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):  # it runs into that itself
        return False
    return any(map(_sets_variables, ast.walk(tree)))


def _sets_variables(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=whole, ctx=ast.Store() | ast.Del()):  # os.environ["A"] = ...
            return _is_environ(whole)
        case ast.Call(func=ast.Attribute(value=whole, attr="setdefault" | "update" | "pop" | "clear")):
            return _is_environ(whole)
        case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv")):
            return True
        case ast.AugAssign(target=whole):  # os.environ |= {...}
            return _is_environ(whole)
        case _:
            return False


def _is_environ(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(attr="environ" | "environb") | ast.Name(id="environ" | "environb"):
            return True
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
