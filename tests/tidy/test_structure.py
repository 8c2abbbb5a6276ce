"""The folders of the source: few at the root, described, in layers without a circle, and drawn as they are."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from docs.pictures import draw_architecture as draw
from tests.tidy.tree import SOURCE, parsed, place, python_files

MAX_ROOT_MODULES = 9
MAX_FIRST_LINE = 90  # of a top folder: what fits into its box in the picture

# Public classes that share a name, counted: none may be added.
SHARED_NAMES: dict[str, int] = {}


def test_the_picture_of_the_architecture_is_that_of_the_code() -> None:
    up_to_date = draw.redrawn() == draw.PICTURE.read_text()
    assert up_to_date, "run: python docs/pictures/draw_architecture.py"


def test_no_two_folders_import_each_other() -> None:
    arrows = {name: draw.imports(name) for name in draw.folders()}
    assert [name for name in arrows if name in draw.reachable(arrows, name)] == []


def test_no_module_is_named_as_text_by_a_folder_below_it() -> None:
    arrows = {name: draw.imports(name) for name in draw.folders()}
    named: set[str] = set()
    for path in python_files("src"):
        folder = path.relative_to(SOURCE).parts[0] if path.is_relative_to(SOURCE) else ""
        if folder in arrows:
            allowed = draw.reachable(arrows, folder) | {folder}
            texts = [node.value for node in ast.walk(parsed(path)) if isinstance(node, ast.Constant)]
            modules = [text for text in texts if isinstance(text, str) and is_module(text)]
            named |= {f"{place(path)}: {module}" for module in modules if module.split(".")[1] not in allowed}
    assert named == set()


def is_module(text: str) -> bool:
    """Whether a text is the full name of a module in one of the folders."""
    parts = text.split(".")
    path = SOURCE.joinpath(*parts[1:])
    return len(parts) > 2 and parts[0] == "paceline" and text.isascii() and path.with_suffix(".py").is_file()


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, int] = defaultdict(int)
    for path in python_files("src"):
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name] += 1
    assert {name: count for name, count in homes.items() if count > 1} == SHARED_NAMES


def test_few_modules_stand_at_the_root() -> None:
    modules = sorted(path.name for path in SOURCE.glob("*.py"))
    assert len(modules) <= MAX_ROOT_MODULES, modules


def test_dtypes_and_their_names_are_converted_in_one_module() -> None:
    home = SOURCE / "update" / "dtypes.py"
    sources = [path for path in python_files("src") if path.is_relative_to(SOURCE)]
    converting = re.compile(r"""removeprefix\(["']torch\.["']\)|getattr\(torch, [\w.]*dtype""")
    assert [path for path in sources if converting.search(path.read_text())] == [home]


def test_every_folder_says_first_what_is_in_it() -> None:
    silent: list[str] = []
    for folder in {path.parent for path in python_files("src") if path.is_relative_to(SOURCE)}:
        init = folder / "__init__.py"
        first = (ast.get_docstring(parsed(init)) or "").partition("\n")[0] if init.exists() else ""
        limit = MAX_FIRST_LINE if folder.parent == SOURCE else 120
        if len(first.split()) < 4 or not first.endswith(".") or len(first) > limit:
            silent.append(f"{place(init)}: {first!r}")
    assert silent == []


def test_every_folder_names_what_others_may_use_of_it() -> None:
    used = used_elsewhere()
    assert {folder: face(folder) for folder in used} == {folder: sorted(modules) for folder, modules in used.items()}


def face(folder: str) -> list[str]:
    """Return the modules that a folder's `__init__` names as those for other folders."""
    said = ast.get_docstring(parsed(SOURCE / folder / "__init__.py")) or ""
    return [
        name
        for part in said.split("\n\n")
        if part.startswith("Other folders use")
        for name in re.findall(r"`(\S+)`", part)
    ]


def used_elsewhere() -> dict[str, set[str]]:
    """Return the modules of each folder that a module outside it imports, by their names inside it."""
    used: dict[str, set[str]] = {folder: set() for folder in draw.folders()}
    for path in filter(lambda path: path.is_relative_to(SOURCE), python_files("src")):
        for module in imported(path):
            folder, _, inside = module.removeprefix("paceline.").partition(".")
            if inside and folder != path.relative_to(SOURCE).parts[0]:
                used[folder].add(inside)
    return used


def imported(path: Path) -> set[str]:
    """Return the modules of Paceline that a file imports."""
    found: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("paceline."):
            found |= {full if is_module(full := f"{node.module}.{name.name}") else node.module for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names if name.name.startswith("paceline.")}
    return found
