"""The processes of one peer: started together, and none outlives the first that fails."""

import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from turns import leave_session


def run_all(main: Callable[..., None], each: Sequence[Sequence[Any]]) -> None:
    """Run `main(*arguments)` in one process for each arguments; blocks until all have ended.

    When one fails, the others are ended and this process exits with code 1.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_enter, args=(main, *arguments), daemon=True) for arguments in each]
    for process in processes:
        process.start()
    running = {process.sentinel: process for process in processes}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                for other in running.values():
                    other.terminate()
                sys.exit(1)


def _enter(main: Callable[..., None], *arguments: object) -> None:
    """Be one of the processes, in a session of its own, for as long as the one that started it lives."""
    leave_session()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    main(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def fair_share(num_processes: int) -> int:
    """Return the threads of each of some processes that compute at the same time on this machine."""
    return max(1, multiprocessing.cpu_count() // num_processes)
