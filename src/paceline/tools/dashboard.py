"""`paceline dashboard`: runs in a browser, while they go on and afterwards. Light, as `run` is."""

import sys
import time
from typing import Annotated, Final

from cyclopts import Parameter

from paceline.errors import UsageError

MAX_RUNS: Final = 8


def dashboard(*jobs: str, port: Annotated[int, Parameter(show_default=False)] = 0) -> None:
    """Show what jobs do on a page for a browser on this machine, until Ctrl-C.

    It reads the traces of the runs, and does not slow the jobs. The page also shows jobs that have ended, and several
    side by side.

    Parameters
    ----------
    jobs
        Folders of runs, or addresses of their servers; by default the latest job on this machine.
    port
        Where the page is served; by default a port that is free.
    """
    from paceline.launch.running import find_run
    from paceline.observe.dashboard.watch import watch
    from paceline.tools.afterwards import labels_of

    if not 0 <= port <= 65535:
        raise UsageError(f"--port is {port}, expected a number from 0, for any, to 65535")
    if len(jobs) > MAX_RUNS:
        raise UsageError(f"{len(jobs)} jobs do not fit on a page; name {MAX_RUNS} at most")
    folders = [find_run(job) for job in jobs] or [find_run(None)]

    def tell(url: str) -> None:
        sys.stdout.write(f"paceline: the dashboard is at {url}\n          Ctrl-C ends it, and not the job\n")
        sys.stdout.flush()

    watch(folders, labels_of(folders), tell, _wait, port)


def _wait(seconds: float) -> bool:
    time.sleep(seconds)
    return True
