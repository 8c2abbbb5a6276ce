"""`paceline top`: what a job does that runs, what holds it up and why. Light, as `run` is."""

import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

if TYPE_CHECKING:
    from paceline.observe.progress import RunView

REFRESH_S: Final = 0.5
MAX_INTERVAL_S: Final = 3600.0
EXIT_HELD_UP: Final = 3
LAST_BYTES: Final = 1 << 20  # of each trace, that are read at first: some thousands of steps


def top(
    job: str | None = None,
    /,
    *,
    once: Annotated[bool, Parameter(negative="")] = False,
    json: Annotated[bool, Parameter(negative="")] = False,
    interval: float = REFRESH_S,
) -> int:
    """Show what a job does: what holds it up and why, and a line for each worker and server.

    It reads the traces of the run, and does not slow the job. Ctrl-C ends the display, not the job.

    Parameters
    ----------
    job
        The folder of the run, or the address of one of its servers; by default the latest job on this machine.
    once
        Show it once and end: exit code 0 for a healthy job, 3 for one that something holds up, 2 where that cannot be
        read.
    json
        One JSON object instead of lines, and one more every interval without --once.
    interval
        Seconds between two looks.
    """
    from paceline.errors import UsageError
    from paceline.launch.running import find_run
    from paceline.observe.progress import RunView, TraceDisplay

    if not 0 < interval <= MAX_INTERVAL_S:
        raise UsageError(f"--interval is {interval:g} s, expected more than 0 and at most {MAX_INTERVAL_S:g}")
    folder = find_run(job) / "trace"
    if once or json:
        view = RunView(folder, last_bytes=LAST_BYTES, on_failure=_refuse)
        for _ in _looks(view, interval):
            _print(view, as_json=json)
            if once:
                return 0 if view.verdict().is_healthy else EXIT_HELD_UP
        return 0
    display = TraceDisplay(folder, 0, sys.stdout, last_bytes=LAST_BYTES, on_failure=_refuse)
    try:
        for now in _looks(display.view, interval):
            display.refresh(now)
    finally:
        display.close()
    if not sys.stdout.isatty():
        _print(display.view, as_json=False)  # how it has ended, where lines so far were short
    return 0


def _refuse(error: Exception) -> None:
    """End with what is wrong with the records: nothing is known of the job without them."""
    from paceline.errors import UsageError

    raise UsageError(str(error)) from error


def _looks(view: "RunView", interval: float) -> Iterator[float]:
    """Yield the time every now and then, until the run has ended."""
    while True:
        now = time.monotonic()
        view.refresh(now)
        yield now
        if view.has_ended():
            return
        time.sleep(interval)


def _print(view: "RunView", *, as_json: bool) -> None:
    import msgspec

    from paceline.observe.screen import as_data, screen_lines

    picture = view.picture()
    if as_json:
        sys.stdout.write(msgspec.json.encode(as_data(picture)).decode() + "\n")
    else:
        sys.stdout.write("\n".join(screen_lines(picture, *_size())) + "\n")
    sys.stdout.flush()


def _size() -> tuple[int, int]:
    """Return the columns and lines to fill: those of the terminal; without one, long lines and all of them."""
    import shutil

    if not sys.stdout.isatty():
        return 120, 200
    size = shutil.get_terminal_size()
    return size.columns, size.lines
