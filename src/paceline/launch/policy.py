"""The crash policy: decides what a run does after the exit of a worker."""

import signal
from dataclasses import dataclass
from enum import Enum
from typing import Final

from paceline.job.choices import OnCrash, OnError
from paceline.launch.preemption import EXIT_PREEMPTED

EXIT_LOST: Final = 75  # no shell and hardly a script ends so: the run has come to its end, without some of its workers


class CrashDecision(Enum):
    """What to do after a worker has ended."""

    CONTINUE = "continue"
    RESTART = "restart"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Policy:
    """What to do when a worker crashes (is killed by a signal) or fails (exits with a code that is not 0).

    A crash is the machine's doing and the others go on; a failure is most often a mistake in the script, which
    would come again, and stops the run. A worker that was told to leave, and has, is neither.

    >>> Policy().decide(exit_code=3, num_restarts=0)
    <CrashDecision.STOP: 'stop'>
    """

    on_crash: OnCrash = "continue"
    on_error: OnError = "stop"
    max_restarts: int = 3

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
