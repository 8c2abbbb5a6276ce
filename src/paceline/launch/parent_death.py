"""Ties a process to its launcher: when the launcher dies, the kernel kills the process.

This is the second line behind the guard, for a run whose guard was killed as well. It holds on Linux; elsewhere the
guard stands alone. The launcher starts processes from its main thread only: the kernel watches the thread that
started a process, not the process of that thread.
"""

import ctypes
import os
import signal
import sys
from typing import Final

from paceline.job.environment import find_launcher

PR_SET_PDEATHSIG: Final = 1
EXIT_CODE: Final = 128 + signal.SIGKILL


def die_with_launcher() -> None:
    """Ask to be killed when the launcher dies; ends this process at once if it is dead already."""
    launcher = find_launcher()
    if launcher is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != launcher:
        os._exit(EXIT_CODE)
