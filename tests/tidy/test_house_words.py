"""Words that went and must not come back: names that only this house knew, and English about people for processes.

Each folder has a budget, which may only go down: a change that rewrites text lowers the number to what is left.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

from tests.tidy.tree import ROOT, SOURCE, place, python_files, text_files

# As a whole word of an identifier (row_shelf, RowShelf) or of a module's name.
HOUSE = re.compile(r"desks?|shelf|shelves|doorman|errands?|toil|nursery|newborn|sieve|crew|mirrors?|parcels?")
# In comments, texts and pages; processes are processes, workers, servers, peers.
PEOPLE = re.compile(r"\b(?:whoever|nobody|somebody|anybody|whom)\b", re.IGNORECASE)
WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")

NAMES_LEFT: dict[str, int] = {}
PEOPLE_LEFT: dict[str, int] = {}


def folder(path: Path) -> str:
    """Return whose budget a file counts for: a top folder of the package, or one of the repository."""
    base = SOURCE if path.is_relative_to(SOURCE) else ROOT
    parts = path.relative_to(base).parts
    return parts[0] if len(parts) > 1 else "root"


def tokens(path: Path, words: re.Pattern[str]) -> list[tokenize.TokenInfo]:
    """The tokens of a file that has one of these words somewhere."""
    text = path.read_text()
    return list(tokenize.generate_tokens(io.StringIO(text).readline)) if words.search(text.lower()) else []


def over(found: dict[str, list[str]], budget: dict[str, int]) -> dict[str, list[str]]:
    """Return the folders that have more than they may, with a few of the places."""
    return {
        f"{name}: {len(places)}, allowed {budget.get(name, 0)}": places[:20]
        for name, places in found.items()
        if len(places) > budget.get(name, 0)
    }


def collect(places: list[tuple[str, str]]) -> dict[str, list[str]]:
    return {name: [text for each, text in places if each == name] for name in Counter(name for name, _ in places)}


def is_house(name: str) -> bool:
    return any(HOUSE.fullmatch(word.lower()) for word in WORDS.findall(name))


def test_no_word_of_the_house_comes_back_as_a_name() -> None:
    assert is_house("RowShelf")
    assert is_house("_open_desk")
    assert not is_house("described")
    places: list[tuple[str, str]] = []
    for path in python_files():
        names = [(path.stem, 1)]
        names += [(token.string, token.start[0]) for token in tokens(path, HOUSE) if token.type == tokenize.NAME]
        places += [(folder(path), f"{place(path, line)} {name}") for name, line in names if is_house(name)]
    assert over(collect(places), NAMES_LEFT) == {}


def test_processes_are_not_written_about_as_people() -> None:
    places: list[tuple[str, str]] = []
    for path in text_files():
        if path == Path(__file__) or path.suffix not in {".py", ".md"}:
            continue
        texts = [(path.read_text(), 1)]
        if path.suffix == ".py":
            kinds = {tokenize.COMMENT, tokenize.STRING}
            texts = [(token.string, token.start[0]) for token in tokens(path, PEOPLE) if token.type in kinds]
        for text, line in texts:
            found = [(line + text.count("\n", 0, match.start()), match.group()) for match in PEOPLE.finditer(text)]
            places += [(folder(path), f"{place(path, where)} {word}") for where, word in found]
    assert over(collect(places), PEOPLE_LEFT) == {}
