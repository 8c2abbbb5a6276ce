"""What the entries of processes share: they end with the launcher, follow its orders, and leave signals to it.

When the launcher dies, the kernel kills a worker. This is the second line behind the guard, for a run whose guard was
killed as well. It holds on Linux; elsewhere the guard stands alone. The launcher starts processes from its main thread
only: the kernel watches the thread that started a process, not the process of that thread.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Generator
from typing import Final

from paceline.errors import EXIT_FAILURE, EXIT_KILLED, PacelineError
from paceline.job.environment import find_launcher, mark_as_server, wants_traceback
from paceline.launch.limits import explain, is_shortage
from paceline.launch.signals import ignore_preemption_signals
from paceline.notices import FAILURE, tell

PR_SET_PDEATHSIG: Final = 1


def die_with_launcher() -> None:
    """Ask to be killed when the launcher dies; ends this process at once if it is dead already."""
    launcher = find_launcher()
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(EXIT_KILLED)


def read_orders() -> Generator[list[str]]:
    """Yield the words of each line that the launcher says on standard input; when that is gone, end the process."""
    # Unbuffered: a process whose other threads have failed could not end while this one holds a buffer's lock.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            yield line.decode().split()
    os._exit(EXIT_FAILURE)


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
        tell(str(error), FAILURE)
        sys.exit(EXIT_FAILURE)
    except (OSError, MemoryError, RuntimeError) as error:
        if wants_traceback() or not is_shortage(error):
            raise
        tell(explain(error), FAILURE)
        sys.exit(EXIT_FAILURE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # nothing is open any more, and unloading torch would only delay the end
