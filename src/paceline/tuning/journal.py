"""The journal: a file in which Optuna writes down, line by line, what is done to the trials of a search."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, final

from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from paceline.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Generator

_NEW_TRIAL: Final = 4  # the operation of a line that begins a trial; the number of the trial is how many came before


@final
class _Alone(JournalFileOpenLock):
    """No lock: whoever writes has the folder for itself, by a lock that does not outlive a killed process."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@final
class _Lines(JournalFileBackend):
    """The lines of the file.

    Attributes:
        line: which one was given out last, from 1.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Alone(str(path)))
        self.line = 0

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        for self.line, log in enumerate(super().read_logs(log_number_from), log_number_from + 1):
            yield log


def open_journal(path: Path) -> BaseStorage:
    """Open a journal, or begin one. A last line that was not written to its end, by a killed process, is dropped.

    Raises:
        UsageError: a line is damaged; nothing is changed then, as what comes behind it may depend on it.
    """
    data = path.read_bytes() if path.exists() else b""
    *lines, rest = data.split(b"\n")
    _check(path, lines)
    with path.open("ab") as file:
        file.truncate(len(data) - len(rest))
    journal = _Lines(path)
    try:
        return JournalStorage(journal)
    except Exception as error:  # whatever Optuna makes of a line that is none of its own
        raise _damaged(path, lines, journal.line, f"{type(error).__name__}: {error}") from error


def _check(path: Path, lines: list[bytes]) -> None:
    """Raise UsageError for a line that is no operation, or one on a trial that no line before has begun.

    Optuna would leave out the latter without a word.
    """
    num_trials = 0
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, lines, number, str(error)) from error
        if not isinstance(entry, dict) or not isinstance(entry.get("op_code"), int):
            raise _damaged(path, lines, number, "expected an operation of Optuna")
        trial = entry.get("trial_id", 0)
        if "trial_id" in entry and not (isinstance(trial, int) and 0 <= trial < num_trials):
            raise _damaged(path, lines, number, f"it is of trial {trial}, and {num_trials} were begun before")
        num_trials += entry["op_code"] == _NEW_TRIAL


def _damaged(path: Path, lines: list[bytes], number: int, why: str) -> UsageError:
    what = f"{path} is damaged in line {number} of {len(lines)}: {why}. Nothing was changed. "
    if number == 1:
        return UsageError(f"{what}No line before it is whole: begin the search anew, with another --out")
    whole, copy = quote(str(path)), quote(f"{path}.damaged")
    return UsageError(
        f"{what}What is behind that line may depend on it; the {number - 1} lines before are whole. To go on with "
        f"these, and run the later trials again: cp {whole} {copy} && head -n {number - 1} {copy} > {whole}"
    )
