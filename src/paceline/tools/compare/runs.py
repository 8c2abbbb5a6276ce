"""Runs of a comparison: one script under several strategies, one after the other, each in a folder of its own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from paceline.api.programs import PROGRAMS
from paceline.errors import UsageError
from paceline.job.choices import ProcessTransport
from paceline.job.environment import COLLECTIVES
from paceline.job.strategy import Distribution
from paceline.launch.crash_policy import CrashPolicy
from paceline.launch.local import run_local
from paceline.launch.plan import LocalRun

SINGLE: Final = "single"
_COUNT: Final = "@"
_NOT_OF_A_NAME: Final = re.compile(r"[^a-z0-9]+")


class ComparedEntry(msgspec.Struct, frozen=True):
    """One run of a comparison.

    Args:
        strategy: how the workers share the work; None for one worker alone, with its server in the same process.
        num_workers: number of workers of the run.
    """

    strategy: Distribution | None
    num_workers: int

    @property
    def ranks_per_replica(self) -> int:
        """Number of workers that work on the same samples."""
        return 1 if self.strategy is None else self.strategy.ranks_per_replica

    @property
    def file_name(self) -> str:
        """Name of its folder.

        >>> ComparedEntry.parse("ssp:3+pipeline:2@4", 2).file_name
        'ssp-3-pipeline-2-4-workers'
        """
        return _NOT_OF_A_NAME.sub("-", f"{self.strategy or SINGLE} {self.num_workers} workers")

    def __str__(self) -> str:
        """Return the text that `parse` reads."""
        return SINGLE if self.strategy is None else f"{self.strategy}{_COUNT}{self.num_workers}"

    @staticmethod
    def parse(text: str, num_workers: int) -> ComparedEntry:
        """Read a strategy, which its own number of workers may follow.

        Args:
            text: "single", or a strategy as `paceline run` takes it, "all-reduce" or "ssp:3+pipeline:2@4".
            num_workers: number of workers where the text has none.

        Raises:
            UsageError: the strategy is not known, or the workers do not divide by it.

        Example:
            >>> ComparedEntry.parse("pipeline:2+SSP:3@4", 2).num_workers
            4
        """
        name, separator, count = text.strip().lower().partition(_COUNT)
        if separator:
            if not count.isascii() or not count.isdigit() or int(count) < 1:
                raise UsageError(f"strategy '{text}': expected a number of workers after {_COUNT}, as in all-reduce@2.")
            num_workers = int(count)
        if name == SINGLE:
            if separator and num_workers != 1:
                raise UsageError(f"strategy '{text}': {SINGLE} is one worker.")
            return ComparedEntry(None, 1)
        strategy = Distribution.parse(name)
        strategy.num_replicas(num_workers)
        return ComparedEntry(strategy, num_workers)


def parse_entries(text: str, num_workers: int) -> list[ComparedEntry]:
    """Read entries that are separated by commas.

    Raises:
        UsageError: there is no entry, one comes twice, or one is not valid.

    Example:
        >>> [str(entry) for entry in parse_entries("single, all-reduce, ssp:3@4", 2)]
        ['single', 'all-reduce@2', 'ssp:3@4']
    """
    entries = [ComparedEntry.parse(one, num_workers) for one in text.split(",") if one.strip()]
    twice = [str(entry) for entry in dict.fromkeys(entries) if entries.count(entry) > 1]
    if not entries or twice:
        what = f"{', '.join(twice)} twice" if twice else "none"
        raise UsageError(f"--strategies '{text}': expected different strategies, separated by commas; got {what}.")
    return entries


# The process whose end stops a run, as the launcher says, and the lines of that process; indented ones are tracebacks.
_CULPRIT: Final = re.compile(
    r"^paceline: (.+?) (?:\(pid \d+\) )?(?:ended with|was killed by) [^\n]*(?:; the run (?:stops|ends)$|\Z)",
    re.MULTILINE,
)
_WRITTEN: Final = r"^\[{name}\] (?:paceline: )?(\S.*)$"
_FROM_SIGNALS: Final = range(129, 160)


class RunPlan(msgspec.Struct, frozen=True):
    """Options that all runs of a comparison share."""

    script: Path
    args: tuple[str, ...]
    num_servers: int
    carrier: ProcessTransport
    folder: Path
    module: str | None = None  # under whose name the script runs
    divide_lr: bool = False

    def run_dir(self, entry: ComparedEntry) -> Path:
        """Folder of the traces of a run."""
        return self.folder / entry.file_name

    def output(self, entry: ComparedEntry) -> Path:
        """File of the output of a run."""
        return self.folder / f"{entry.file_name}.txt"

    def launch(self, entry: ComparedEntry) -> LocalRun:
        """Return the options of a run for the launcher."""
        alone = entry.strategy is None
        return LocalRun(
            script=self.script,
            args=self.args,
            module=self.module,
            num_workers=entry.num_workers,
            num_servers=1 if alone else self.num_servers,
            transport="memory" if alone else self.carrier,
            consistency=None if entry.strategy is None else entry.strategy.consistency,
            strategy=None if entry.strategy is None else str(entry.strategy),
            divide_lr=self.divide_lr,
            run_dir=self.run_dir(entry),
            copy_to=self.output(entry),
            crash_policy=CrashPolicy(on_crash="stop"),
            progress=True,
            quiet=True,
            defaults=((COLLECTIVES, "gloo"),) if self.carrier == "tcp" else (),  # over TCP, where bytes are counted
        )


class RunEnded(msgspec.Struct, frozen=True):
    """End of a run: its exit code, and the reason where that is not 0."""

    entry: ComparedEntry
    code: int
    failure_reason: str = ""

    @property
    def was_interrupted(self) -> bool:
        """Whether a signal has stopped it, and with it the comparison."""
        return self.code in _FROM_SIGNALS and "stopped by" in self.failure_reason


def run_entry(plan: RunPlan, entry: ComparedEntry) -> RunEnded:
    """Run the script under one strategy to its end; blocks. Call it from the main thread.

    Raises:
        UsageError: the script does not exist, or the folder of the run is not empty.
    """
    code = run_local(plan.launch(entry), PROGRAMS)
    return RunEnded(entry, code, failure_reason(plan.output(entry).read_text(encoding="utf-8")) if code else "")


def failure_reason(output: str) -> str:
    r"""Return the line of the output that best says why a run has failed.

    Example:
        >>> failure_reason("[worker 0] no data\npaceline: worker 0 (pid 7) ended with exit code 1; the run stops")
        'no data'
        >>> failure_reason("paceline: stopped by SIGINT")
        'paceline: stopped by SIGINT'
    """
    culprit = _CULPRIT.search(output.rstrip())
    written = re.findall(_WRITTEN.format(name=re.escape(culprit[1])), output, re.MULTILINE) if culprit else []
    lines = [line for line in output.splitlines() if line.strip()]
    return written[-1] if written else lines[-1] if lines else "it printed nothing"
