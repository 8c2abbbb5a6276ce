"""The dashboard of a job, as a process beside it that begins and ends with the job."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from paceline.launch.limits import explain
from paceline.launch.output import Console

START_TIMEOUT_S: Final = 30.0
END_TIMEOUT_S: Final = 5.0
_FAILED: Final = "the dashboard cannot be shown: {}; the run goes on without it"


@contextmanager
def beside(run_dir: Path, console: Console) -> Generator[None]:
    """Have a dashboard of this run while the body runs; tell its address, or why there is none.

    It is a process of its own, so that a busy page takes nothing of the launcher. It ends with its standard input, also
    if the launcher is killed.
    """
    command = [sys.executable, "-m", "paceline.observe.dashboard.watch", str(run_dir)]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the job, and this ends after it
        )
    except OSError as error:
        console.announce(_FAILED.format(explain(error)))
        yield
        return
    try:
        url = _read_line(process)
        console.announce(f"the dashboard is at {url}" if url else _FAILED.format(_why(process)))
        yield
    finally:
        _end(process)


def _read_line(process: subprocess.Popen[bytes]) -> str:
    """Return its first line; an empty text if it ends, or takes too long."""
    assert process.stdout is not None
    deadline_s, line = time.monotonic() + START_TIMEOUT_S, b""
    while not line.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([process.stdout], [], [], left_s)[0]:
            return ""
        byte = os.read(process.stdout.fileno(), 1)
        if not byte:
            return ""
        line += byte
    return line.decode().strip()


def _why(process: subprocess.Popen[bytes]) -> str:
    """Return the last line that it wrote on stderr; it is ended."""
    process.kill()
    assert process.stderr is not None
    lines = process.stderr.read().decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), f"it has not begun within {START_TIMEOUT_S:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.communicate(timeout=END_TIMEOUT_S)  # closes its input first
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
