"""Takes the pictures of docs/observability.md: a real run for each question, and what a command says of it.

    python docs/pictures/draw_observability.py [slow dead rate disk row failover night equal]

Each run has three workers and two servers on this machine, and takes ten seconds or less. The terminal has 80 columns
and 24 lines; what a command writes there becomes an SVG of text, `observed_NAME.svg`. The disk that becomes full is a
file system in memory, which takes root to make. Pages of a browser are `dashboard_*.png`, see `draw_dashboard.py`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from paceline.observe.progress import RunView

PICTURES: Final = Path(__file__).parent
WORKER: Final = PICTURES / "observed_worker.py"
NUM_WORKERS: Final = 3
WIDTH, HEIGHT = 80, 24
DEADLINE_S: Final = 90.0
END_S: Final = 30.0
LOOK_S: Final = 0.1
DISK_BYTES: Final = 1 << 20
HELD_UP: Final = 3  # exit code of `paceline top --once`
THEME: Final = TerminalTheme(
    (22, 25, 29), (226, 230, 234), [(22, 25, 29), (255, 138, 128), *[(226, 230, 234)] * 6], [(150, 158, 166)] * 8
)
# What rich fills in, without the fonts that it would have browsers load.
SVG: Final = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px "DejaVu Sans Mono", Menlo, Consolas, monospace; }}
.{unique_id}-title {{ font: 18px sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}</defs>
<rect width="{width}" height="{height}" rx="8" fill="#16191d"/>
<g transform="translate({terminal_x}, 14)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


@dataclass(frozen=True, slots=True)
class Job:
    """A run that goes on, in a folder."""

    process: subprocess.Popen[bytes]
    run_dir: Path
    view: RunView

    def wait(self, what: str, holds: Callable[[RunView], bool]) -> None:
        """Wait until what is to be seen is there; ends the program if it does not come."""
        until_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < until_s and self.process.poll() is None:
            self.view.refresh(time.monotonic())
            if holds(self.view):
                return
            time.sleep(LOOK_S)
        raise SystemExit(
            f"{self.run_dir.name}: {what} was not seen, and it has ended or {DEADLINE_S:.0f} s have passed"
        )

    def wait_clock(self, clock: int) -> None:
        """Wait until every worker that lives has come to a clock."""
        self.wait(
            f"clock {clock}",
            lambda view: min((row.clock for row in view.rows() if not row.state), default=0) >= clock,
        )

    def wait_verdict(self, kind: str) -> None:
        """Wait until the verdict is of a kind."""
        self.wait(f"the verdict '{kind}'", lambda view: view.verdict().kind == kind)

    def kill(self, role: str, rank: int) -> None:
        """Kill one of its processes."""
        os.kill(self.view.pids()[role, rank], signal.SIGKILL)


@contextmanager
def running(run_dir: Path, *arguments: str) -> Generator[Job]:
    """Run a job, and end it afterwards."""
    command = [
        sys.executable,
        "-m",
        "paceline",
        "run",
        "-n",
        f"{NUM_WORKERS}",
        "--servers",
        "2",
        "--quiet",
        "--no-progress",
    ]
    command += ["--run-dir", str(run_dir), "--on-crash", "continue", str(WORKER), *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield Job(process, run_dir, RunView(run_dir / "trace"))
        finally:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()


def finished(run_dir: Path, *arguments: str) -> Path:
    """Run a job to its end."""
    with running(run_dir, *arguments) as job:
        job.process.wait(DEADLINE_S)
    return run_dir


# -- terminals -------------------------------------------------------------------------------------------------------


def said(folder: Path, command: Sequence[str]) -> tuple[list[str], int]:
    """Return the lines that a command writes on a terminal, in a folder, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    pieces: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # the other end is closed
            while piece := os.read(ours, 1 << 16):
                pieces.append(piece)

    reader = threading.Thread(target=read)
    reader.start()
    full = [sys.executable, "-m", *command]
    process = subprocess.run(full, cwd=folder, stdout=theirs, stderr=subprocess.DEVNULL, timeout=DEADLINE_S)
    os.close(theirs)
    reader.join()
    os.close(ours)
    return b"".join(pieces).decode().replace("\r", "").rstrip("\n").split("\n"), process.returncode


def draw(name: str, folder: Path, *commands: str) -> None:
    """Write what commands say as an SVG."""
    text = Text()
    for number, command in enumerate(commands):
        lines, code = said(folder, command.split())
        text.append(f"{'' if number == 0 else chr(10)}$ {command.replace(' --once', '')}\n", style="bright_black")
        sentence = next((place for place, line in enumerate(lines) if line.startswith(" w ")), 1)
        is_top = " top" in command
        for place, line in enumerate(lines):
            style = "bold red" if is_top and code == HELD_UP else "bold"
            text.append(f"{line}\n", style=style if place < sentence else "")
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, color_system="truecolor", force_terminal=True)
        console.print(text, end="")
        svg = console.export_svg(theme=THEME, code_format=SVG, unique_id=name)
    path = PICTURES / f"observed_{name}.svg"
    path.write_text(re.sub(r"[ \t]+\n", "\n", svg))
    sys.stdout.write(f"{path.name}: {path.stat().st_size} bytes\n{text.plain}\n")


# -- the questions ---------------------------------------------------------------------------------------------------


def slow(folder: Path) -> None:
    """Answer who is slow."""
    with running(folder / "run", "--slow-s", "0.04") as job:
        job.wait_clock(30)
        job.wait_verdict("worker")
        draw("slow", folder, "paceline top run --once")


def dead(folder: Path) -> None:
    """Answer whether a worker is dead."""
    with running(folder / "run") as job:
        job.wait_clock(30)
        job.kill("worker", 2)
        job.wait_verdict("dead")
        job.wait_clock(80)
        draw("dead", folder, "paceline top run --once")


def rate(folder: Path) -> None:
    """Answer whether a learning rate is too high for a staleness."""
    stale = ("--consistency", "ssp:16", "--step-s", "0.015", "--lr")
    with running(folder / "fast", *stale, "0.6") as job:
        job.wait("a loss that rises", lambda view: view.picture().loss.trend in ("rises", "not finite"))
        draw("rate", folder, "paceline top fast --once")
    with running(folder / "slower", *stale, "0.003") as job:
        job.wait("a loss that falls", lambda view: view.picture().loss.trend == "falls")
        draw("rate_lower", folder, "paceline top slower --once")


def disk(folder: Path) -> None:
    """Answer what filled the disk."""
    run_dir = folder / "run"
    run_dir.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(run_dir)], check=True)
    try:
        with running(run_dir) as job:
            job.wait_clock(30)
            (run_dir / "saved").mkdir()
            with suppress(OSError), (run_dir / "saved" / "model-30.pt").open("wb") as file:
                while True:
                    file.write(b"\0" * 4096)
                    file.flush()
            job.wait_verdict("disk")
            draw("disk", folder, "paceline top run --once")
    finally:
        subprocess.run(["umount", "--lazy", str(run_dir)], check=True)


def row(folder: Path) -> None:
    """Answer which row is hot."""
    with running(folder / "run", "--rows") as job:
        job.wait_clock(40)
        job.wait_verdict("row")
        draw("row", folder, "paceline top run --once")


def failover(folder: Path) -> None:
    """Answer when a server failed over."""
    with running(folder / "run") as job:
        job.wait_clock(40)
        job.kill("server", 1)
        job.wait("a successor", lambda view: any("goes on in its place" in event for event in view.picture().events))
        job.wait_clock(max(row.clock for row in job.view.rows()) + 60)
        draw("failover", folder, "paceline top run --once")


def night(folder: Path) -> None:
    """Answer what a run did that is over."""
    with running(folder / "night", "--steps", "150") as job:
        job.wait_clock(40)
        job.kill("worker", 2)
        job.process.wait(DEADLINE_S)
    draw("night", folder, "paceline report --last night")


def equal(folder: Path) -> None:
    """Answer whether runs are equal."""
    for name, lr in (("a", "0.02"), ("b", "0.02"), ("c", "0.021")):
        finished(folder / name, "--steps", "100", "--step-s", "0", "--lr", lr)
    draw("equal", folder, "paceline report a b c")


QUESTIONS: Final = {each.__name__: each for each in (slow, dead, rate, disk, row, failover, night, equal)}


def main(names: Sequence[str]) -> None:
    """Take these pictures, or all."""
    unknown = [name for name in names if name not in QUESTIONS]
    if unknown:
        raise SystemExit(f"there is no picture '{unknown[0]}': {', '.join(QUESTIONS)}")
    for name in names or QUESTIONS:
        with tempfile.TemporaryDirectory(prefix="paceline-pictures-") as folder:
            QUESTIONS[name](Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
