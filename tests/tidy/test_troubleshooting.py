"""The page on troubleshooting quotes what the source can say, and lists every message that a user can meet.

A message counts as one that a user can meet if an error of Paceline is made or raised with it, or if it is written as
a notice. Not counted are errors that say that Paceline itself is wrong (`ProtocolBug`), those that only pass from one
part of it to another, which tells them in other words (`INTERNAL`), and the simulator, which is for work on the
protocol. A `UsageError` that says in itself what to do (`ADVICE`) is not listed: its cause stands before the advice.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.tidy.tree import ROOT, parsed, python_files

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = r"(?:`` .+? ``|`[^`]+`)"
CELL = re.compile(rf"^\| ({QUOTED}(?:, {QUOTED})*) \|", re.MULTILINE)
GAP = "…"  # stands for what differs, on the page and here
LEAST = 8  # characters of a message on the page beside its gaps: fewer prove nothing
WRAPS = 12  # a message with fewer of its own only says where another one comes from
INTERNAL = {"ProtocolBug", "UnfitRecord", "JournalFull", "DamagedRevocations"}
CALLERS_MISTAKE = {"UsageError", "IdOutOfRange", "NoWeight", "WrongCall", "PacelineError"}
TELLING = {"tell", "_tell", "announce"}
WRITING = {"print", "write"}
DESCRIBING = {"whereabouts"}  # functions that return a part of what is said of a wait
WRITTEN = ("paceline: ", "worker ", "the launcher ")  # how notices begin that are written without one of these
VERBS = (
    "add|ask|build|call|cd|change|check|chmod|choose|close|connect|convert|cut|declare|end|finish|freeze|give|install|"
    "keep|leave|let|load|look|lower|make|materialise|name|open|pull|push|put|read|remove|restore|rotate|run|say|send|"
    "set|shard|slice|start|step|take|train|untie|use|wait|write"
)
ADVICE = re.compile(rf"(?:[:;,.{GAP}] |\(|\bor )(?:then )?(?:{VERBS})\b", re.IGNORECASE)


def as_text(node: ast.expr) -> str:
    """What a string says, with a gap for each value in it; empty for anything else."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (as_text(node.left) or GAP) + (as_text(node.right) or GAP)
    if isinstance(node, ast.IfExp):
        return as_text(node.body)
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


def listed() -> list[str]:
    """The messages on the page; a cell may have several of one cause."""
    cells = CELL.findall(PAGE.read_text())
    return [quoted.strip("` ") for cell in cells for quoted in re.findall(QUOTED, cell)]


def called(node: ast.expr) -> str:
    """The last name of what is called."""
    return ast.unparse(node).rpartition(".")[2]


def errors() -> set[str]:
    """The classes of errors that are Paceline's own."""
    classes = [
        (node.name, {ast.unparse(base).rpartition(".")[2] for base in node.bases})
        for path in python_files("src")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.ClassDef)
    ]
    found, more = set[str](), {"PacelineError"}
    while more:
        found |= more
        more = {name for name, bases in classes if bases & found} - found
    return found - INTERNAL


def is_met(call: ast.Call, text: str, *, is_raised: bool, errors: set[str]) -> bool:
    """Whether what is called tells a user this text."""
    kind = called(call.func)
    if is_raised:
        return not hasattr(builtins, kind) and kind not in INTERNAL
    return kind in errors or kind in TELLING or (kind in WRITING and text.startswith(WRITTEN))


def met() -> Iterator[tuple[str, str, str]]:
    """Place, kind and text of each message that a user can meet, but not of those that only wrap another one."""
    own = errors()
    for path in python_files("src"):
        if Path("src/paceline/simulate") in path.relative_to(ROOT).parents:
            continue
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef) and node.name in DESCRIBING:
                returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
                yield from ((f"{path.relative_to(ROOT)}:{each.lineno}", node.name, as_text(each)) for each in returned)
            call = node.exc if isinstance(node, ast.Raise) else node
            if not isinstance(call, ast.Call) or not call.args:
                continue
            kind, text = called(call.func), as_text(call.args[0])
            told = is_met(call, text, is_raised=call is not node, errors=own)
            if told and sum(map(len, pieces(text))) >= WRAPS and " " in text.strip():
                yield f"{path.relative_to(ROOT)}:{node.lineno}", kind, text


def test_every_message_on_the_page_is_in_the_source() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| [^|]*`", line)]
    assert len(CELL.findall(PAGE.read_text())) == len(rows) > 60
    said = "\n".join(sayings())
    assert [text for text in listed() if not all(piece in said for piece in pieces(text))] == []
    assert [text for text in listed() if sum(map(len, pieces(text))) < LEAST] == []
    cells = CELL.findall(PAGE.read_text())
    assert [cell for cell in set(cells) if cells.count(cell) > 1] == []


def test_no_message_has_two_rows() -> None:
    assert [text for text, times in Counter(listed()).items() if times > 1] == []


def test_every_message_that_a_user_can_meet_is_on_the_page() -> None:
    patterns = [re.compile(".*?".join(map(re.escape, pieces(text))), re.DOTALL) for text in listed()]
    unlisted = [
        (where, text)
        for where, kind, text in met()
        if not any(pattern.search(text) for pattern in patterns)
        and not (kind in CALLERS_MISTAKE and ADVICE.search(text))
    ]
    assert unlisted == [], "list them in docs/troubleshooting.md, or let them say what to do"
