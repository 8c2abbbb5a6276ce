"""The Python standard library's own words, which every machine has: its docstrings, comments and language reference."""

import re
import sysconfig
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

LEFT_OUT = {"encodings", "site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
REMARK = re.compile(r'"""(.*?)"""' + r"|'''(.*?)'''" + r"|#([^\n]*)", re.DOTALL)
WORD = re.compile(r"[a-z]{2,}")


def library_words() -> list[list[str]]:
    """Return the words of each text in lower case: one text a file, and one a topic of `help()`."""
    texts = [*map(_remarks, _files()), *_topics()]
    return [words for text in texts if (words := WORD.findall(text.lower()))]


def _files() -> list[Path]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.rglob("*.py"))
    kept = [file for file in files if not LEFT_OUT & set(file.relative_to(folder).parts) and file.name != "topics.py"]
    if not kept:
        raise SystemExit(f"The standard library has no source files here: '{folder}' holds none that end with .py.")
    return kept


def _remarks(file: Path) -> str:
    """Return what a file says to its readers: strings in triple quotes, and comments."""
    source = file.read_text(encoding="utf-8", errors="replace")
    return "\n".join(match[match.lastindex or 0] for match in REMARK.finditer(source))


def _topics() -> list[str]:
    """Return the language reference that `help()` shows, which some installations leave out."""
    if find_spec("pydoc_data") is None:
        return []
    topics: dict[str, str] = import_module("pydoc_data.topics").topics
    return list(topics.values())
