"""Every message that the page on troubleshooting quotes is one that the source can say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.tidy.tree import ROOT, parsed, python_files

PAGE = ROOT / "docs" / "troubleshooting.md"
ROW = re.compile(r"^\| (?:`` (.+?) ``|`(.+?)`) \|", re.MULTILINE)
GAP = "…"  # stands for what differs, on the page and here
LEAST = 12  # characters of a message beside its gaps: fewer prove nothing


def as_text(node: ast.expr) -> str:
    """What a string says, with a gap for each value in it; empty for anything else."""
    if isinstance(node, ast.Constant):
        return re.sub(r"\{\w*\}", GAP, node.value) if isinstance(node.value, str) else ""
    return "".join(as_text(part) or GAP for part in node.values) if isinstance(node, ast.JoinedStr) else GAP


def sayings() -> Iterator[str]:
    """All strings in the code of the package that are not docstrings."""
    for path in python_files("src"):
        tree = parsed(path)
        described = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and id(node) not in described:
                yield as_text(node)


def pieces(message: str) -> list[str]:
    """What stands between the gaps of a message."""
    return [piece.strip(" .,:;'") for piece in message.split(GAP) if re.search(r"\w", piece)]


def test_every_message_on_the_page_is_in_the_source() -> None:
    messages = ["".join(found) for found in ROW.findall(PAGE.read_text())]
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| [^|]*`", line)]
    assert len(messages) == len(rows) > 60
    said = "\n".join(sayings())
    assert [text for text in messages if not all(piece in said for piece in pieces(text))] == []
    assert [text for text in messages if sum(map(len, pieces(text))) < LEAST] == []
