"""Runs of one script under several strategies, one after the other, each in a folder of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from paceline.api.programs import PROGRAMS
from paceline.launch.local import run_local
from paceline.launch.plan import LocalRun
from paceline.launch.policy import Policy
from paceline.tools.compare.entry import ComparedEntry

# The kernel counts the traffic of the first only.
Carrier = Literal["tcp", "shm"]

# Who made a run fail, as its last line says, and what that one wrote; lines that are indented only say where it was.
_CULPRIT: Final = re.compile(r"^paceline: (.+?) (?:ended with|was killed by) [^\n]*\Z", re.MULTILINE)
_WRITTEN: Final = r"^\[{name}\] (?:paceline: )?(\S.*)$"
_FROM_SIGNALS: Final = range(129, 160)


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What all runs of a comparison have in common."""

    script: Path
    args: tuple[str, ...]
    num_servers: int
    carrier: Carrier
    folder: Path

    def run_dir(self, entry: ComparedEntry) -> Path:
        """Where the traces of a run are kept."""
        return self.folder / entry.file_name

    def output(self, entry: ComparedEntry) -> Path:
        """Where the output of a run is kept."""
        return self.folder / f"{entry.file_name}.txt"

    def launch(self, entry: ComparedEntry) -> LocalRun:
        """Return how a run is started."""
        alone = entry.strategy is None
        return LocalRun(
            script=self.script,
            args=self.args,
            num_workers=entry.num_workers,
            num_servers=1 if alone else self.num_servers,
            transport="memory" if alone else self.carrier,
            consistency=None if entry.strategy is None else entry.strategy.consistency,
            strategy=None if entry.strategy is None else str(entry.strategy),
            run_dir=self.run_dir(entry),
            copy_to=self.output(entry),
            policy=Policy(on_crash="stop"),
            progress=True,
            quiet=True,
        )


@dataclass(frozen=True, slots=True)
class RunEnded:
    """How a run has ended: its exit code, and its last words where that is not 0."""

    entry: ComparedEntry
    code: int
    last_words: str = ""

    @property
    def was_interrupted(self) -> bool:
        """Whether it was interrupted, and with it the comparison."""
        return self.code in _FROM_SIGNALS and "stopped by" in self.last_words


def run_entry(plan: RunPlan, entry: ComparedEntry) -> RunEnded:
    """Run the script under one strategy to its end; blocks. Call it from the main thread.

    Raises:
        UsageError: the script is not there, or the folder of the run has something in it.
    """
    code = run_local(plan.launch(entry), PROGRAMS)
    return RunEnded(entry, code, last_words(plan.output(entry).read_text(encoding="utf-8")) if code else "")


def last_words(output: str) -> str:
    r"""Return the line that says best why a run has failed.

    Example:
        >>> last_words("[worker 0] paceline: no data\npaceline: worker 0 ended with exit code 1")
        'no data'
        >>> last_words("paceline: stopped by SIGINT")
        'paceline: stopped by SIGINT'
    """
    culprit = _CULPRIT.search(output.rstrip())
    written = re.findall(_WRITTEN.format(name=re.escape(culprit[1])), output, re.MULTILINE) if culprit else []
    lines = [line for line in output.splitlines() if line.strip()]
    return written[-1] if written else lines[-1] if lines else "it has said nothing"
