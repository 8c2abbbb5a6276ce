"""Words that may not be written: what they stand for is refused."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest
from tests.tidy.tree import SOURCE, imported, mentioned, parsed, place, python_files, text_files

# Modules that turn bytes into code, or start processes that talk by such bytes.
CODE_FROM_BYTES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
CODE_FROM_BYTES |= {"multiprocessing", "torch.multiprocessing", "torch.distributed.rpc"}
CODE_FROM_TEXT = {"eval", "exec", "compile", "torch.load", "torch.save", "builtins.eval", "builtins.exec"}
# Written for torch, at the user's word, and never read.
WRITTEN_FOR_OTHERS = ("src/paceline/snapshots/converting.py", "torch.save")

VAGUE = re.compile(r"(^|_)(utils?|common|helpers?|misc|managers?)($|_)|Manager|Helper", re.ASCII)
UNFINISHED = re.compile(r"\b(?:TO(?:DO)|FIX(?:ME)|XX(?:X))\b")
# A path of one person's machine, or the name of a host that packages come from.
MACHINE = re.compile(r"(?<![\w.<])/(home|root|work|Users|opt)/\w|\b(pypi|pythonhosted|anaconda|jfrog)\.\w", re.ASCII)


def uses(names: Iterable[tuple[str, int]], refused: set[str]) -> Iterator[tuple[str, int]]:
    """The refused names among those used, a submodule like its package."""
    for name, line in names:
        if name in refused or any(name.startswith(f"{other}.") for other in refused):
            yield name, line


def test_no_bytes_from_elsewhere_can_become_code() -> None:
    found = [
        f"{place(path, line)}: {name}"
        for path in python_files("src")
        for names, refused in ((imported, CODE_FROM_BYTES), (mentioned, CODE_FROM_TEXT))
        for name, line in uses(names(parsed(path)), refused)
        if name != "re.compile" and (place(path), name) != WRITTEN_FOR_OTHERS
    ]
    assert found == []


def test_numpy_is_never_allowed_to_unpickle() -> None:
    found = [
        place(path, node.value.lineno)
        for path in python_files("src")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle"
    ]
    assert found == []


def test_no_test_waits_by_sleeping() -> None:
    """A script that a test runs may pretend to compute; a test may not wait so."""
    found = [
        place(path, line)
        for path in python_files("tests")
        if "scripts" not in path.parts
        for name, line in mentioned(parsed(path))
        if name in {"time.sleep", "sleep"}
    ]
    assert found == []


def test_environment_variables_are_read_in_one_place() -> None:
    allowed = SOURCE / "job" / "environment.py"
    found = [
        f"{place(path, line)}: {name}"
        for path in python_files("src")
        if path != allowed
        for name, line in mentioned(parsed(path))
        if name in {"os.environ", "os.getenv", "os.putenv", "environ"}
    ]
    assert found == []


def test_no_name_is_vague() -> None:
    found: list[str] = []
    for path in python_files("src", "benchmarks", "examples"):
        names = [(path.stem, 1)]
        names += [(n.name, n.lineno) for n in ast.walk(parsed(path)) if isinstance(n, ast.ClassDef | ast.FunctionDef)]
        found += [f"{place(path, line)}: {name}" for name, line in names if VAGUE.search(name)]
    assert found == []


@pytest.mark.parametrize("pattern", [UNFINISHED, MACHINE], ids=["unfinished", "machine"])
def test_no_text_is_unfinished_or_belongs_to_one_machine(pattern: re.Pattern[str]) -> None:
    found = [
        f"{place(path, number)}: {line.strip()}"
        for path in text_files()
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []
