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


def _imported(tree: ast.AST) -> set[str]:
    """Return the packages that some code imports; "" stands for the one that it lies in."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("" if node.level else node.module or "")
    return {name.partition(".")[0] for name in names}
