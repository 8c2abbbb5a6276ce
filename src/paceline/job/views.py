"""Views: which process serves in the place of a server, and which one holds its replica, as files in a job's folder.

A process that finds the other one gone writes the next view. Each view is a file that only one process can make, so of
two that believe the other gone, one has decided, and the other one ends: no two processes serve in one place.

Where processes have no folder in common, each asks its launcher, which has a folder of its own for that: the first one
that asks has decided. The launcher gives all of them what counts, as files of the same names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final, final

import msgspec

from paceline.errors import DeadlineExceeded
from paceline.job.addresses import address_path, how_server_ended, process_name
from paceline.job.folders import make_once, names_in, wait_for
from paceline.job.spec import write_private

NO_PROCESS: Final = -1
NUM_PLACES: Final = 2  # of a server, whose processes come in them by turns: one serves, the other has the replica
DECISION_TIMEOUT_S: Final = 30.0  # for the launcher's answer, which takes a fraction of a second


class View(msgspec.Struct, frozen=True):
    """The `number` of a view, and by their numbers the process that serves (`head`) and the one that has its replica.

    >>> View(1, head=0, replica=1).promoted()
    View(number=2, head=1, replica=-1)
    """

    number: int
    head: int
    replica: int = NO_PROCESS

    def promoted(self) -> View:
        """Return the view after this one in which the replica serves."""
        return View(self.number + 1, self.replica)

    def repaired(self, replica: int) -> View:
        """Return the view after this one in which another process has the replica."""
        return View(self.number + 1, self.head, replica)

    def alone(self) -> View:
        """Return the view after this one in which the head has no replica any more."""
        return View(self.number + 1, self.head)

    def can_have(self, process: int) -> bool:
        """Return whether a process may be the next replica: it is later than the one before, and in its place.

        >>> [process for process in range(6) if View(1, head=0, replica=1).can_have(process)]
        [3, 5]
        """
        return process > self.replica and (process - self.head) % NUM_PLACES != 0


FIRST: Final = View(1, head=0, replica=1)


def _written(view: View) -> bytes:
    """Return what the file of a view holds; its name has the number."""
    return f"{view.head} {view.replica}".encode()


@final
class Views:
    """The views of one server in the folder of its job.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     views = Views(Path(folder), 0)
    ...     print(views.newest(), views.change(FIRST), views.change(FIRST), views.newest())
    None True False View(number=1, head=0, replica=1)
    """

    def __init__(self, run_dir: Path, rank: int, *, launcher_decides: bool = False) -> None:
        """Of the server with this rank; reads and writes nothing yet.

        `launcher_decides`: what is changed here is asked of the launcher, as other processes do not see this folder.
        """
        self._run_dir = run_dir
        self._prefix = f"{process_name(rank, 0)}.view-"
        self._asked_prefix = f"{process_name(rank, 0)}.asked-"
        self._rank = rank
        self._launcher_decides = launcher_decides

    def newest(self) -> View | None:
        """Return the view that counts; None where the server has no replica. Raises OSError."""
        numbers = self._numbers(self._prefix)
        return self._read(f"{self._prefix}{max(numbers)}") if numbers else None

    def current(self, number: int) -> View | None:
        """Return the view of this number; None if it has ended. Raises OSError."""
        view = self.newest()
        return view if view is not None and view.number == number else None

    def forget(self, last: int) -> None:
        """Remove the views up to the one of this number. Raises OSError."""
        for number in self._numbers(self._prefix):
            if number <= last:
                (self._run_dir / f"{self._prefix}{number}").unlink(missing_ok=True)

    def _numbers(self, prefix: str) -> list[int]:
        """Return the numbers of the views under this prefix; others may have files of such names in the folder, too."""
        ends = (name.removeprefix(prefix) for name in names_in(self._run_dir) if name.startswith(prefix))
        return [int(end) for end in ends if end.isdecimal()]

    def _read(self, name: str) -> View:
        head, replica = map(int, (self._run_dir / name).read_text().split())
        return View(int(name.rpartition("-")[2]), head, replica)

    def change(self, view: View) -> bool:
        """Have this view count if it is the first of its number; return whether it does. Raises OSError.

        Where the launcher decides it blocks until that has, and raises TimeoutError when it does not answer.
        """
        return self._ask(view) if self._launcher_decides else self._make(view)

    def decide(self, view: View) -> bool:
        """Answer a process that asks: have this view count if it follows the newest one; return whether it does."""
        newest = self.newest()
        return newest is not None and view.number == newest.number + 1 and self._make(view)

    def asked(self, known: set[View]) -> list[View]:
        """Return the views that the process of this folder has asked for, without those that are `known`."""
        names = (f"{self._asked_prefix}{number}" for number in self._numbers(self._asked_prefix))
        return [view for name in names if (view := self._read(name)) not in known]

    def _ask(self, view: View) -> bool:
        write_private(self._run_dir / f"{self._asked_prefix}{view.number}", _written(view))
        path = self._run_dir / f"{self._prefix}{view.number}"
        try:
            decided = wait_for(
                lambda: self._read(path.name) if path.exists() else None,
                DECISION_TIMEOUT_S,
                lambda: f"the launcher did not say which process serves within {DECISION_TIMEOUT_S:g} s",
            )
        except DeadlineExceeded as error:
            raise TimeoutError(str(error)) from error
        return decided == view

    def _make(self, view: View) -> bool:
        return make_once(self._run_dir / f"{self._prefix}{view.number}", _written(view))

    def promote(self, number: int) -> bool:
        """Have the replica serve from now on, unless the view of this number has ended; return whether it does."""
        view = self.current(number)
        return view is not None and self.change(view.promoted())

    def dismiss(self, number: int) -> bool:
        """Have the head go on without a replica, unless the view of this number has ended; return whether it does."""
        view = self.current(number)
        return view is not None and self.change(view.alone())

    def enlist(self, number: int, process: int) -> bool:
        """Have a process be the replica from now on, unless the view of this number has ended; return whether it is."""
        view = self.current(number)
        return view is not None and self.change(view.repaired(process))

    def includes(self, process: int) -> bool:
        """Return whether a process has ever served or been the replica. Raises OSError."""
        return process in self._used(names_in(self._run_dir))

    def _used(self, names: set[str]) -> set[int]:
        """Return the processes that were in a view, of the files of these names."""
        known = [self._read(name) for name in names if name.startswith(self._prefix)]
        return {process for view in known for process in (view.head, view.replica)}

    def candidates(self) -> list[int]:
        """Return the processes that have come to be the replica and were in no view yet, the newest first.

        Those count that have come in its place: one that was started again in the place of the head is too late.
        """
        names, view = names_in(self._run_dir), self.newest()
        used = self._used(names)
        stem, suffix = f"{process_name(self._rank, 0)}.", self.published(0).suffix
        come = [name.removeprefix(stem).removesuffix(suffix) for name in names if name.startswith(stem)]
        numbers = [int(number) for number in come if number.isdecimal()]
        found = {number for number in numbers if view is None or view.can_have(number)}
        return sorted(found - used, reverse=True)

    def published(self, process: int) -> Path:
        """Return where a process of this server says that it listens."""
        return self._run_dir / f"{process_name(self._rank, process)}{address_path(self._run_dir, 'server', 0).suffix}"

    def how_ended(self) -> str:
        """Return how the server has ended, once no process of it is left to serve; "" before that, or if unknown."""
        try:
            view = self.newest()
        except OSError:  # too many open files, or a folder on a network that is not reached now
            return ""
        left = [FIRST.head] if view is None else [view.head, *([] if view.replica == NO_PROCESS else [view.replica])]
        told = [how_server_ended(self._run_dir, self._rank, process) for process in left]
        return told[0] if all(told) else ""

    def address(self) -> str:
        """Return where the process that serves listens; "" where that is not known."""
        try:
            view = self.newest()
            return "" if view is None else self.published(view.head).read_text()
        except OSError:
            return ""
