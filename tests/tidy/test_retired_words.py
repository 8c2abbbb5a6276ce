"""Words that went and must not come back: metaphors for what has a name in the field, and persons for processes.

Each folder has a budget, which may only go down: a change that rewrites text lowers the number to what is left.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections import Counter
from pathlib import Path

from tests.tidy.tree import ROOT, SOURCE, place, python_files, text_files

# As a whole word of an identifier (row_shelf, RowShelf, test_..._shelf) or of a file's name.
METAPHORS = re.compile(
    "desks?|shel(?:f|ves)|doorm[ae]n|doors?|receptions?|entrances?|guests?|seats?|errands?|toil|nurser(?:y|ies)|newborn|"
    "sieves?|crews?|crowds?|mirrors?|parcels?|papers|couriers?|timekeepers?|odometers?|mills?|complaints?|pretence|house"
)
PERSONS = re.compile("who|whom|whoever|nobodys?|somebody|anybody|everybody|everyone|someone|people|liars?|mortals?")
# In comments, texts and pages; processes are processes, workers, servers, peers.
PERSONS_IN_TEXT = re.compile(r"\b(?:whoever|nobody|somebody|anybody|everybody|everyone|someone|whom)\b", re.IGNORECASE)
RETIRED = re.compile(f"{METAPHORS.pattern}|{PERSONS.pattern}")
WORDS = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")

NAMES_LEFT: dict[str, int] = {}
TEXTS_LEFT: dict[str, int] = {}


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


def is_retired(name: str) -> bool:
    words = [word.lower() for word in WORDS.findall(name)]
    return any(METAPHORS.fullmatch(word) or PERSONS.fullmatch(word) for word in words)


def test_no_retired_word_comes_back_as_a_name() -> None:
    assert is_retired("RowShelf")
    assert is_retired("_open_desk")
    assert is_retired("test_who_waits_is_told")
    assert not is_retired("described")
    assert not is_retired("whose")
    places: list[tuple[str, str]] = []
    for path in python_files():
        names = [(path.stem, 1)]
        names += [(token.string, token.start[0]) for token in tokens(path, RETIRED) if token.type == tokenize.NAME]
        places += [(folder(path), f"{place(path, line)} {name}") for name, line in names if is_retired(name)]
    assert over(collect(places), NAMES_LEFT) == {}


def test_processes_are_not_written_about_as_persons() -> None:
    places: list[tuple[str, str]] = []
    for path in text_files():
        if path == Path(__file__) or path.suffix not in {".py", ".md"}:
            continue
        texts = [(path.read_text(), 1)]
        if path.suffix == ".py":
            kinds = {tokenize.COMMENT, tokenize.STRING}
            texts = [(token.string, token.start[0]) for token in tokens(path, PERSONS_IN_TEXT) if token.type in kinds]
        for text, line in texts:
            found = [
                (line + text.count("\n", 0, match.start()), match.group()) for match in PERSONS_IN_TEXT.finditer(text)
            ]
            places += [(folder(path), f"{place(path, where)} {word}") for where, word in found]
    assert over(collect(places), TEXTS_LEFT) == {}
