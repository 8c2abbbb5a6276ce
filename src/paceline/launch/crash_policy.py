"""The crash policy: decides what a run does after the exit of a process, and how long it waits before a restart."""

import signal
from dataclasses import dataclass
from enum import Enum
from typing import Final, final

from paceline.errors import EXIT_PREEMPTED
from paceline.job.choices import OnCrash, OnError, OnServerCrash

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
HEALTHY_S: Final = 60.0  # a process that has lived so long counts as well, and its next crash as the first


class CrashDecision(Enum):
    """What to do after a worker has ended."""

    CONTINUE = "continue"
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class CrashPolicy:
    """What to do when a worker crashes (is killed by a signal) or fails (exits with a code that is not 0).

    A crash is the machine's doing and the others go on; a failure is most often a mistake in the script, which
    would come again, and stops the run. A worker that was told to leave, and has, is neither. In the place of a server
    that has crashed another process goes on, where its memory can be kept.

    Parameters
    ----------
    on_crash
        What to do when a worker is killed by a signal; a run that has gone on without one ends with exit code 75.
        Where a strategy needs every worker at every step, as all-reduce does, the next step of the others fails.
    on_error
        What to do when a worker's script fails.
    max_restarts
        How often one worker is started again under --on-crash restart, after pauses that grow from 0.5 s to 30 s.
    on_server_crash
        What to do when a server is killed: go on with another process in its place, which loses nothing, or stop.
    grace_s
        How many seconds workers have to finish their step and leave once the run is told to end.

    >>> CrashPolicy().decide(exit_code=3, num_restarts=0)
    <CrashDecision.STOP: 'stop'>
    """

    on_crash: OnCrash = "continue"
    on_error: OnError = "stop"
    max_restarts: int = 3
    on_server_crash: OnServerCrash = "resume"
    grace_s: float = 5.0

    def decide(self, exit_code: int, num_restarts: int) -> CrashDecision:
        """Decide after a worker ended with `exit_code` (negative: the signal that killed it)."""
        if exit_code in (0, EXIT_PREEMPTED):
            return CrashDecision.CONTINUE
        if exit_code > 0:
            return CrashDecision(self.on_error)
        if self.is_used_up(exit_code, num_restarts):
            return CrashDecision.STOP
        return CrashDecision(self.on_crash)

    def is_used_up(self, exit_code: int, num_restarts: int) -> bool:
        """Return whether a process that ended so would be started again, if it had not been as often as it may."""
        return exit_code < 0 and self.on_crash == "restart" and num_restarts >= self.max_restarts


def describe_exit(exit_code: int) -> str:
    """Return in words how a process ended.

    >>> describe_exit(-9)
    'was killed by SIGKILL'
    """
    if exit_code == EXIT_PREEMPTED:
        return "was told to leave, and has"
    if exit_code >= 0:
        return f"ended with exit code {exit_code}"
    try:
        return f"was killed by {signal.Signals(-exit_code).name}"
    except ValueError:  # a real-time signal: it has a number only
        return f"was killed by signal {-exit_code}"


def shell_code(exit_code: int) -> int:
    """Return what a shell reports for such an end: 128 + signal for a process that was killed.

    >>> shell_code(-9), shell_code(3)
    (137, 3)
    """
    return exit_code if exit_code >= 0 else 128 - exit_code


@final
class RestartDelays:
    """The pauses before the restarts of each process, by its name; times are monotonic seconds.

    >>> pauses = RestartDelays()
    >>> pauses.note_start("worker 0", 0.0)
    >>> [pauses.after_crash("worker 0", now) for now in (1.0, 2.0, 3.0, 90.0)]
    [0.5, 1.0, 2.0, 0.5]
    """

    def __init__(self) -> None:
        """Know of no process."""
        self._started_s: dict[str, float] = {}
        self._num_crashes: dict[str, int] = {}  # since it last lived well

    def note_start(self, name: str, now: float) -> None:
        """Note that a process begins to live."""
        self._started_s[name] = now

    def after_crash(self, name: str, now: float) -> float:
        """Return for how many seconds not to start it again."""
        before = 0 if now - self._started_s[name] >= HEALTHY_S else self._num_crashes.get(name, 0)
        self._num_crashes[name] = before + 1
        return min(FIRST_PAUSE_S * 2.0 ** min(before, 32), LONGEST_PAUSE_S)
