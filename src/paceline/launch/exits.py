"""Reports the exits of processes: as a line, on the live display, in the trace, and in the final summary."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from paceline.launch.console import Console
from paceline.launch.policy import EXIT_LOST, describe_exit
from paceline.observe.trace import Exit, Trace, trace_path

if TYPE_CHECKING:
    from paceline.launch.supervise import Member, ProgressDisplay

CLOCK: Final = "%H:%M:%S"


@final
class Exits:
    """Tells of the ends of processes, and knows which workers the run has lost.

    Args:
        console: gets a line for each that has not ended well.
        board: shows the states of workers, where there is one.
        run_dir: the trace in it gets a record for each that has not ended well.
        now: seconds since 1970.
    """

    def __init__(
        self, console: Console, board: "ProgressDisplay | None", run_dir: Path, now: Callable[[], float] = time.time
    ) -> None:
        self._console = console
        self._board = board
        self._trace = trace_path(run_dir, "launcher", 0)
        self._now = now
        self._lost: list[str] = []

    def note_start(self, member: "Member") -> None:
        """Show that a worker lives."""
        self._show(member, "")

    def note_end(self, member: "Member") -> None:
        """Show that a worker has ended, as it was to."""
        self._show(member, "ended")

    def note_left(self, member: "Member", exit_code: int, then: str) -> None:
        """Tell that a worker has left, as it was told to, and what the run does now."""
        self._tell(member, exit_code, then)
        self._show(member, "left")

    def note_death(self, member: "Member", exit_code: int, then: str) -> None:
        """Tell that a process has not ended as it was to, and what the run does now."""
        self._tell(member, exit_code, then)
        self._show(member, f"dead since {self._clock()}")

    def note_loss(self, member: "Member", exit_code: int) -> None:
        """Tell that the run goes on without a worker."""
        self.note_death(member, exit_code, "the others go on without it")
        self._lost.append(f"{member.name}, which {describe_exit(exit_code)} at {self._clock()}")

    def conclude(self) -> int:
        """Return the exit code of a run that has come to its end; say so where it has lost workers."""
        if not self._lost:
            return 0
        self._console.announce(f"the run has ended without {'; '.join(self._lost)} (exit code {EXIT_LOST})")
        return EXIT_LOST

    def _tell(self, member: "Member", exit_code: int, then: str) -> None:
        launch, pid = member.launch, member.pid
        number = "" if pid is None else f" (pid {pid})"
        happened = describe_exit(exit_code)
        self._console.announce(f"{member.name}{number} {happened}; {then}")
        with suppress(OSError), Trace(self._trace) as trace:  # a full disk ends no run
            life = member.name, launch.role, launch.rank, launch.incarnation, pid
            trace.record(Exit(time.monotonic(), *life, exit_code, self._now(), happened, then))

    def _show(self, member: "Member", state: str) -> None:
        if self._board is not None and member.launch.role == "worker":
            self._board.note(member.launch.rank, state)

    def _clock(self) -> str:
        return time.strftime(CLOCK, time.localtime(self._now()))
