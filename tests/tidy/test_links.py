"""The documents hold together: links lead somewhere, and every decision can be found."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

import hatch_build
from tests.tidy.tree import ROOT, place, text_files

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
NAMED_TEST = re.compile(r"`(?:pytest )?(tests/[\w./]+|test_\w+\.py)[^`]*`")
DECISIONS = ROOT / "docs" / "decisions"


def links(page: Path) -> list[str]:
    """The targets of all links of a page, outside of code."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    return [first or second for first, second in LINK.findall(text)]


def anchors(page: Path) -> set[str]:
    """The anchors that the headings of a page get."""
    titles = HEADING.findall(page.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_somewhere(page: Path, link: str) -> bool:
    if link.startswith(("http://", "https://", "mailto:")):
        return True
    name, _, anchor = link.partition("#")
    target = (page.parent / name).resolve() if name else page
    return target.exists() and (not anchor or anchor in anchors(target))


def test_every_link_leads_somewhere() -> None:
    pages = [path for path in text_files() if path.suffix == ".md"]
    assert len(pages) > 5
    assert [f"{place(page)}: {link}" for page in pages for link in links(page) if not leads_somewhere(page, link)] == []


def named_tests(page: Path) -> list[tuple[int, Path]]:
    """The tests that a page names, by line; a name without a folder lies beside the one before."""
    folder, found = ROOT / "tests", list[tuple[int, Path]]()
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for name in NAMED_TEST.findall(line):
            path = ROOT / name if name.startswith("tests/") else folder / name
            folder = path.parent if path.suffix else path
            found.append((number, path))
    return found


def test_every_test_that_a_page_names_is_there() -> None:
    pages = sorted((ROOT / "docs").glob("*.md"))
    named = {page: named_tests(page) for page in pages}
    assert sum(map(len, named.values())) > 100
    lost = [f"{place(page)}:{line}: {path}" for page in pages for line, path in named[page] if not path.exists()]
    assert lost == []


def test_tables_are_whole_and_name_a_test_where_their_head_says_so() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        lines = page.read_text().splitlines()
        for number, line in enumerate(lines):
            if not line.startswith("|---"):
                continue
            head, rows = lines[number - 1], list(takewhile(lambda row: row.startswith("|"), lines[number + 1 :]))
            where, columns = f"{place(page)}:{number}", head.count(" | ")
            assert number == 1 or not lines[number - 2], f"{where}: text stands at the table"
            after = lines[number + len(rows) + 1 : number + len(rows) + 2]
            assert after in ([], [""]), f"{where}: text follows the table at once"
            if page.name == "reliability.md":
                assert [row for row in rows if row.count(" | ") != columns] == [], where
                if "hown" in head:
                    assert [row for row in rows if not NAMED_TEST.search(row) and "the same" not in row] == [], where


def test_every_decision_is_numbered_and_listed() -> None:
    records = sorted(path.name for path in DECISIONS.glob("[0-9]*.md"))
    index = links(DECISIONS / "README.md")
    assert [int(name[:4]) for name in records] == list(range(1, len(records) + 1))
    assert [name for name in records if name not in index] == []


def test_every_page_is_in_the_manual() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in text_files() if path.is_relative_to(ROOT / "docs")}
    pages = {page.removesuffix(".md") for page in pages if page.endswith(".md")}
    reachable = "\n".join((ROOT / "docs" / page).read_text() for page in ("index.md", "decisions/README.md"))
    lost = {
        page for page in pages - {"index"} if not re.search(rf"^{page.rpartition('/')[2]}$|{page}", reachable, re.M)
    }
    assert lost == set()


def test_links_of_the_description_of_the_package_lead_out_of_it() -> None:
    text = hatch_build.with_absolute_links((ROOT / "README.md").read_text(), "https://source.example")
    assert text.count("](https://source.example/docs/") > 20
    assert not re.search(r"\]\((?!https?://|#)", text)
