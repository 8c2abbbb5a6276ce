"""What every server process does: follow the launcher's orders, end with it, and leave signals to it."""

import os
import signal
import sys
from collections.abc import Callable, Generator
from typing import Final

from paceline.errors import PacelineError
from paceline.job.carriers import tell_user
from paceline.job.environment import mark_as_server, wants_traceback
from paceline.launch.limits import explain, is_shortage
from paceline.launch.preemption import ignore_preemption_signals

_EXIT_FAILURE: Final = 1


def read_orders() -> Generator[list[str]]:
    """Yield the words of each line that the launcher says on standard input; when that is gone, end the process."""
    # Unbuffered: a process whose other threads have failed could not end while this one holds a buffer's lock.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            yield line.decode().split()
    os._exit(_EXIT_FAILURE)


def report_unknown_order(words: list[str], role: str) -> None:
    """Write on stderr that the launcher sent an unknown order."""
    print(f"the launcher said {' '.join(words)!r}, which means nothing to a {role}", file=sys.stderr)


def run_program(serving: Callable[[], None]) -> None:
    """Run a server as the main program: signals are left to its parent, and the process ends when `serving` returns."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_preemption_signals()
    mark_as_server()
    try:
        serving()
    except PacelineError as error:
        if wants_traceback():
            raise
        tell_user(str(error))
        sys.exit(_EXIT_FAILURE)
    except (OSError, MemoryError, RuntimeError) as error:
        if wants_traceback() or not is_shortage(error):
            raise
        tell_user(explain(error))
        sys.exit(_EXIT_FAILURE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is open any more, and unloading torch would only delay the end
