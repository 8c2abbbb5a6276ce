"""The oldest torch and frameworks that are accepted are the same wherever they are named."""

from __future__ import annotations

import re
import tomllib
from itertools import chain

import pytest
from tests.tidy.tree import ROOT

NAMED = {
    "README.md": r"PyTorch, ([\d.]+) or newer",
    "docs/testing.md": r"with torch ([\d.]+)\.0, the oldest",
    "docs/decisions/0091-the-oldest-torch-is-one-that-is-right.md": r"The oldest is ([\d.]+)\. ",
    "src/paceline/torch_private.py": r"torch ([\d.]+), the oldest",
}
FRAMEWORKS = {"lightning": "Lightning", "accelerate": "Accelerate", "transformers": "transformers"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def oldest(package: str) -> list[str]:
    """The oldest versions of a package that are accepted, of each place in `pyproject.toml` that needs it."""
    needed = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    return [found[1] for text in chain(*needed) if (found := re.match(rf"{package}>=([\d.]+)", text))]


@pytest.mark.parametrize("path", NAMED)
def test_the_oldest_torch_is_that_of_the_package(path: str) -> None:
    assert oldest("torch") == re.findall(NAMED[path], (ROOT / path).read_text())


@pytest.mark.parametrize("package", FRAMEWORKS)
def test_the_oldest_framework_is_that_of_the_page_and_of_the_tests(package: str) -> None:
    page = (ROOT / "docs" / "frameworks.md").read_text()
    named = re.findall(rf"{FRAMEWORKS[package]} ([\d.]+) and [\d.]+", page)
    assert [".".join([*version.split("."), "0", "0"][:3]) for version in oldest(package)] == named
    assert package in re.findall(r"\$\(foreach package,([\w ]+),", (ROOT / "Makefile").read_text())[0].split()
