"""What lies in the repository, for the tests that read it instead of running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"

_FOLDERS = ("src", "tests", "benchmarks", "examples", "docs", ".ci")
_TEXTS = {".py", ".md", ".toml", ".txt", ".svg", ".css", ".html", ".json", ".jsonl", ""}
_MADE = {"_build", "__pycache__", ".ipynb_checkpoints"}


@cache
def text_files() -> list[Path]:
    """Every text file that belongs to the repository, and none that a tool has made."""
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a second work tree
    below = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()]
    return sorted(
        path for path in top + below if path.suffix in _TEXTS and not _MADE.intersection(path.relative_to(ROOT).parts)
    )


def python_files(*folders: str) -> list[Path]:
    """The Python files of some folders of the repository; of all without arguments."""
    wanted = folders or ("src", "tests", "benchmarks", "examples", "docs")
    return [path for path in text_files() if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in wanted]


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of one file."""
    return ast.parse(path.read_text(), filename=str(path))


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The modules that some code imports, as written, with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or "", node.lineno


def mentioned(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The dotted names that some code uses (`os.environ`, `print`), with their lines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}", node.lineno


def place(path: Path, line: int | None = None) -> str:
    """Where something is, to click on."""
    name = str(path.relative_to(ROOT))
    return name if line is None else f"{name}:{line}"
