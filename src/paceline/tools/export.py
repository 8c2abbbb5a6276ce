"""`paceline export`: what a run reports, given to trackers and Prometheus. Light, as `run` is."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from paceline.errors import UsageError
from paceline.notices import NEWS, tell
from paceline.observe.export.options import ExportOptions

if TYPE_CHECKING:
    from collections.abc import Callable

EXIT_INCOMPLETE: Final = 1
_LOOK_S: Final = 2.0


def export(
    job: str | None = None,
    /,
    *,
    asked: Annotated[ExportOptions, Parameter(name="*")] = ExportOptions(),  # noqa: B008 - it is frozen
) -> int:
    """Send what a run reports to trackers and Prometheus: all at once if the run is over, else live until its end.

    It reads the traces of the run, and does not slow the job. Ctrl-C ends the export, not the job.
    Exits with 1 if a tracker has not got all of it.

    Parameters
    ----------
    job
        The folder of the run, or the address of one of its servers; by default the latest job on this machine.
    asked
        Where it goes.
    """
    if not asked.is_wanted:
        raise UsageError("paceline export has nowhere to go: add --log or --metrics")
    from paceline.launch.exporter import export_run
    from paceline.launch.running import find_run, running
    from paceline.observe.export.prometheus import listen

    folder = find_run(job)
    is_live = folder.resolve() in map(Path.resolve, running())
    listening = None if asked.metrics is None else listen(asked.metrics)
    if listening is not None:
        tell(f"metrics for Prometheus are at port {listening.getsockname()[1]}, until Ctrl-C", NEWS)
    until_over = _until_over(folder, serves=listening is not None)
    return 0 if export_run(folder, asked.log or "", listening, until_over, is_live=is_live) else EXIT_INCOMPLETE


def _until_over(folder: Path, *, serves: bool) -> "Callable[[float], bool]":
    """Return a function that waits, and returns whether the run is over; what is scraped is shown until Ctrl-C."""
    from paceline.launch.running import running

    looked_s, is_over = -_LOOK_S, False

    def wait_over(seconds: float) -> bool:
        nonlocal looked_s, is_over
        now = time.monotonic()
        if now - looked_s >= _LOOK_S:
            looked_s, is_over = now, folder.resolve() not in map(Path.resolve, running())
        if is_over and not serves:
            return True
        time.sleep(seconds)
        return False

    return wait_over
