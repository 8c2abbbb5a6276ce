"""The code blocks of the readme and the pages: which of them run, where, and what they print.

The words behind the language of a fence say how its code is tried:

    python                     runs by itself, as it is pasted
    python file=train.py       the same, and is a file of this name for the commands of the page
    python fragment            the same behind `surroundings.py` and the earlier fragments of its page
    sh, console                commands; of a console the other lines are what they print
    sh background              goes on while the later blocks of the page run
    console exit=75            ends with this exit code
    ... needs=slurm            needs what a test machine does not have
    text, yaml, toml           output or a file: not run
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^( *)```(\S*) *(.*)\n((?:.*\n)*?)\1```$", re.MULTILINE)
RUN, SHOWN = ("python", "sh", "console"), ("text", "yaml", "toml")
# What a block may need that is not on every test machine. A server is there where the page starts one.
NEEDS = {
    "server",
    "job",
    "terminal",
    "machines",
    "slurm",
    "mpirun",
    "ray",
    "kubernetes",
    "engine",
    "registry",
    "torchtitan",
    "data",
    "hours",
}
PROMPT = "$ "
PROGRESS = re.compile(r"\d+ s  \|")
NUMBER = re.compile(r"\b[0-9A-F]{40}\b|\d+(?:[.,:]\d+)*|\.\.\.")


@dataclass(frozen=True, slots=True)
class Snippet:
    """One code block: its language, the words behind it, and its text without indentation."""

    page: Path
    line: int
    language: str
    words: tuple[str, ...]
    code: str

    def value(self, key: str) -> str | None:
        """What stands behind `key=` on the fence."""
        return next((word.removeprefix(f"{key}=") for word in self.words if word.startswith(f"{key}=")), None)

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        return self.language in RUN and self.value("needs") is None

    @property
    def is_fragment(self) -> bool:
        return "fragment" in self.words

    def commands(self) -> str:
        """What a shell is given: all of `sh`, and of a console what stands behind the prompts."""
        if self.language == "sh":
            return self.code
        lines = self.code.replace("\\\n", "").splitlines()
        return "\n".join(line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT))

    def calls(self) -> list[list[str]]:
        """The words of each command of the block that calls `paceline`."""
        calls = [shlex.split(line, comments=True) for line in self.commands().replace("\\\n", "").splitlines()]
        return [words[1:] for words in calls if words[:1] == ["paceline"]]

    def expected(self) -> list[re.Pattern[str]]:
        """The lines that a console shows, with any numbers in the place of its own; lines of progress are left out."""
        if self.language != "console":
            return []
        lines = [line for line in self.code.splitlines() if line and not line.startswith(PROMPT)]
        return [
            re.compile(r"\S+".join(map(re.escape, NUMBER.split(line.strip()))).replace(r"\S+" + r"\S+", r".*"))
            for line in lines
            if not PROGRESS.match(line)
        ]


def snippets(page: Path) -> list[Snippet]:
    """The code blocks of a page, without the directives of Sphinx."""
    text = page.read_text()
    return [
        Snippet(
            page,
            text.count("\n", 0, found.start()) + 1,
            found[2],
            tuple(found[3].split()),
            re.sub(rf"^{found[1]}", "", found[4], flags=re.MULTILINE),
        )
        for found in FENCE.finditer(text)
        if not found[2].startswith("{")
    ]
