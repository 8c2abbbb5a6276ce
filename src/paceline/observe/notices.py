"""Notices on stderr about a script that runs: one line each, each line once."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable


CLOCK_ADVICE = "Call clock() once a step, after its pushes (optimizer.step() of paceline.distributed does)."
SHARD_ADVICE = (
    "did the script forget paceline.shard(loader)? Workers that train on the same samples learn no more than one of "
    "them."
)


def tell(text: str) -> None:
    """Write one line for the user, in one write, because processes may share the stream."""
    sys.stderr.write(f"paceline: {' '.join(text.splitlines())}\n")
    sys.stderr.flush()


def is_told(count: int) -> bool:
    """Return whether the n-th occurrence is reported: the 1st, 10th, 100th, and so on.

    >>> [count for count in range(1, 200) if is_told(count)]
    [1, 10, 100]
    """
    return str(count).rstrip("0") == "1"


@dataclass(slots=True)
class OpenClocks:
    """Counts the work of a worker on each table in its current clock; reports a clock without end once a table."""

    worker: int
    tell: Callable[[str], None]
    _made: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # clock and count
    _told: set[str] = field(default_factory=set[str])

    def note_push(self, table: str, clock: int) -> int:
        """Count a push; return the number of pushes in this clock."""
        at, num = self._made.get(table, (clock, 0))
        num = num + 1 if at == clock else 1
        self._made[table] = clock, num
        return num

    def tell_of(self, table: str, clock: int, done: str) -> None:
        """Report once a table what was `done` in a clock without end."""
        if table not in self._told:
            self._told.add(table)
            self.tell(
                f"worker {self.worker} has {done} in clock {clock} and has not finished that clock: until then no read "
                f"sees them, and they take memory. {CLOCK_ADVICE}"
            )


@dataclass(slots=True)
class _Count:
    """Numbers of attempts and refusals, and the clocks of the refusals."""

    num_made: int = 0
    num_refused: int = 0
    first: int = 0
    last: int = 0


@dataclass(slots=True)
class Refusals:
    """The pushes and steps of one worker that were not applied, by table.

    Reports the 1st, 10th, 100th and so on of each table at once, and the total when the worker leaves. Safe to use from
    several threads.
    """

    worker: int
    tell: Callable[[str], None]
    _counts: dict[tuple[str, str], _Count] = field(default_factory=dict[tuple[str, str], _Count])
    _lock: Lock = field(default_factory=Lock)

    def note_made(self, kind: Literal["push", "step"], table: str) -> None:
        """Count a push or step, refused or not."""
        with self._lock:
            count = self._counts.get((kind, table))
            if count is None:
                count = self._counts[kind, table] = _Count()
            count.num_made += 1

    def note_refused(self, kind: Literal["push", "step"], table: str, clock: int, reason: str) -> None:
        """Count a refused one, and report it if due."""
        with self._lock:
            count = self._counts.setdefault((kind, table), _Count())
            count.first = count.first if count.num_refused else clock
            count.num_refused, count.last = count.num_refused + 1, clock
            num = count.num_refused
        if num == 1:
            self.tell(f"worker {self.worker}, clock {clock}: a {kind} of '{table}' was refused: {reason}")
        elif is_told(num):
            self.tell(f"worker {self.worker}, clock {clock}: {_share(count, kind)} of '{table}' were refused by now")

    def tell_all(self) -> None:
        """Report the totals of tables with more than one; call it once, at the end."""
        for (kind, table), count in self._counts.items():
            if count.num_refused > 1:
                self.tell(
                    f"worker {self.worker}: {_share(count, kind)} of '{table}' were refused and had no effect, from "
                    f"clock {count.first} to clock {count.last}"
                )


def _share(count: _Count, kind: str) -> str:
    of_all = f" of {count.num_made}" if count.num_made else ""
    plural = {"push": "pushes", "step": "steps"}[kind]
    return f"{count.num_refused}{of_all} {plural}"


def printable(text: str) -> str:
    r"""Return the text of another process without characters that control a terminal.

    >>> printable("worker 1 \x1b[2J")
    'worker 1 ?[2J'
    """
    return "".join(char if char.isprintable() else "?" for char in text)
