"""The oldest torch that is accepted is the same wherever it is named."""

from __future__ import annotations

import re
import tomllib

import pytest
from tests.tidy.tree import ROOT

NAMED = {
    "README.md": r"PyTorch, ([\d.]+) or newer",
    "docs/testing.md": r"with torch ([\d.]+)\.0, the oldest",
    "docs/decisions/0091-the-oldest-torch-is-one-that-is-right.md": r"The oldest is ([\d.]+)\. ",
    "src/paceline/torch_private.py": r"torch ([\d.]+), the oldest",
}


@pytest.mark.parametrize("path", NAMED)
def test_the_oldest_torch_is_that_of_the_package(path: str) -> None:
    needed: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [text.removeprefix("torch>=") for text in needed if text.startswith("torch>=")] == re.findall(
        NAMED[path], (ROOT / path).read_text()
    )
