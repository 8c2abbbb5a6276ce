"""What the pages name in the code exists: every `paceline.x.y`, and every Python file."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from tests.tidy.tree import ROOT, SOURCE, place, text_files

import paceline
from paceline.errors import UsageError

DOTTED = re.compile(r"(?<![\w./-])paceline(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(r"`((?:\w+/)+\w+\.py)`")
# What ends like a name and is none: files of these types, and a host in an example.
NO_CODE = re.compile(r"\.(?:svg|json|toml|log|dev|example|service|prof|com|org)$")


def exists(name: str) -> bool:
    """Whether a dotted name leads to a module, or to something in one."""

    found: object = paceline
    parts = name.split(".")
    for number, part in enumerate(parts[1:], start=2):
        try:
            found = getattr(found, part)
        except AttributeError:
            try:
                found = import_module(".".join(parts[:number]))
            except ImportError:
                return False
            except UsageError:  # the adapter of a framework that is not installed here
                return number == len(parts)
    return True


def pages() -> list[Path]:
    return [path for path in text_files() if path.suffix == ".md" and path.name != "CHANGELOG.md"]


def test_every_dotted_name_in_the_pages_exists() -> None:
    names = {
        (place(page), name) for page in pages() for name in DOTTED.findall(page.read_text()) if not NO_CODE.search(name)
    }
    assert len(names) > 20
    assert sorted(f"{page}: {name}" for page, name in names if not exists(name)) == []


def test_every_file_that_the_pages_name_exists() -> None:
    """A file may be named from the root of the repository, or by the end of its path."""
    files = [f"/{place(path)}" for path in text_files()]
    named = {(place(page), file) for page in pages() for file in FILE.findall(page.read_text())}
    assert len(named) > 20
    assert sorted(f"{page}: {file}" for page, file in named if not any(f.endswith(f"/{file}") for f in files)) == []


def test_the_page_about_the_architecture_names_every_folder_and_files_that_are_in_it() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| (`[\w`, ]+`) \| (.*) \|$", text, re.MULTILINE)
    folders = {folder: files for names, files in rows for folder in re.findall(r"\w+", names)}
    assert set(folders) == {init.parent.name for init in SOURCE.glob("*/__init__.py")}
    missing = [
        f"{names}: {file}"
        for names, files in rows
        for file in re.findall(r"`([\w/]+(?:\.py|/))`", files)
        if not any((SOURCE / folder / file).exists() for folder in re.findall(r"\w+", names))
    ]
    assert missing == []
