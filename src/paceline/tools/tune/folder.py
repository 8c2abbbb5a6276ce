"""Folder of a search: its task, the journal, a folder for each trial, and the results."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self, final

import msgspec

from paceline.errors import UsageError
from paceline.launch.local import prepare_run_dir
from paceline.tools.tune.search_space import Search

if TYPE_CHECKING:
    from types import TracebackType

_TASK: Final = "search.json"
_LOCK: Final = "lock"


class SearchTask(msgspec.Struct, frozen=True, kw_only=True):
    """Task of a search, which resuming needs: the script with its arguments, and the working folder."""

    name: str
    search: Search
    script: str
    args: tuple[str, ...]
    working_folder: str


@final
class Folder:
    """The folder of one search; a context manager that locks it, for one process at a time."""

    def __init__(self, path: Path, task: SearchTask) -> None:
        self.path = path
        self.task = task

    @classmethod
    def create(cls, path: Path, task: SearchTask) -> Self:
        """Make a folder for a new search.

        Raises:
            UsageError: the folder is not empty.
        """
        if (path / _TASK).exists():
            raise UsageError(f"{path} holds a search already: continue it with --resume {path}, or name another --out")
        made = prepare_run_dir(path)
        (made / _TASK).write_bytes(msgspec.json.format(msgspec.json.encode(task)) + b"\n")
        return cls(made, task)

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Open the folder of a search that was started before.

        Raises:
            UsageError: it is not the folder of a search.
        """
        try:
            return cls(path.absolute(), msgspec.json.decode((path / _TASK).read_bytes(), type=SearchTask))
        except OSError as error:
            raise UsageError(f"{path} is not the folder of a search: cannot read {_TASK}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path / _TASK} is damaged, or of another version: {error}") from error

    def __enter__(self) -> Self:
        self._lock = (self.path / _LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise UsageError(f"another process runs this search: {self.path}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.close()

    @property
    def journal(self) -> Path:
        """Journal of all trials."""
        return self.path / "journal.log"

    @property
    def picture(self) -> Path:
        """Figure of the trials."""
        return self.path / "trials.png"

    @property
    def best(self) -> Path:
        """Configuration of the best trial, for `paceline run --config`."""
        return self.path / "best.toml"

    def trial(self, number: int) -> Path:
        """Folder of the traces and output of a trial."""
        return self.path / "trials" / f"{number:04d}"
