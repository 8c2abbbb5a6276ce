"""Runs real jobs by the command line, and looks at what they say and what they leave behind."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import psutil
from tests.launch.launching import processes_of, wait_gone
from tests.launch.warm import start_launcher
from tests.tidy.tree import ROOT

import paceline
from paceline.errors import EXIT_LOST

TIMEOUT_S = 200.0
LEFT_WITHIN_S = 30.0
SOURCES = Path(paceline.__file__).parents[1]
SCRIPTS = Path(__file__).with_name("scripts")


@dataclass
class Run:
    """One `paceline run`: its process, and all lines that it has written so far, of both streams."""

    process: psutil.Process
    said: IO[str]
    run_dir: Path
    lines: list[str] = field(default_factory=list)
    _news: threading.Condition = field(default_factory=threading.Condition)
    _over: bool = False

    def listen(self) -> None:
        for line in self.said:
            with self._news:
                self.lines.append(line.rstrip("\n"))
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()

    def wait_for(self, words: str, times: int = 1) -> list[str]:
        """Wait for so many lines that contain these words, and return them."""
        with self._news:
            in_time = self._news.wait_for(lambda: self._over or len(self.saying(words)) >= times, TIMEOUT_S)
        found = self.saying(words)
        assert in_time, f"no {times} lines with {words!r} in time:\n{self.output}"
        assert len(found) >= times, f"no {times} lines with {words!r}:\n{self.output}"
        return found

    def end(self, timeout_s: float = TIMEOUT_S) -> int:
        """Wait for the end and return the exit code."""
        code = self.process.wait(timeout_s)
        assert code is not None
        with self._news:
            self._news.wait_for(lambda: self._over, timeout_s)
        return code

    def saying(self, words: str) -> list[str]:
        return [line for line in self.lines if words in line]

    def told(self) -> list[str]:
        """What the launcher itself has said, without numbers of processes and times of day."""
        told = [line for line in self.lines if line.startswith("paceline: ")]
        return [re.sub(r" \(pid \d+\)| at \d\d:\d\d:\d\d", "", line) for line in told]

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def family(self) -> set[int]:
        """The processes of the job; not the launcher."""
        return processes_of(self.run_dir) - {self.process.pid}

    def wait_for_server(self, rank: int, but: Collection[int] = ()) -> int:
        """Wait until a server has a process, but for these, and return it."""
        words = [str(self.run_dir / "spec.json"), str(rank)]
        while True:
            for pid in self.family().difference(but):
                with suppress(psutil.Error):  # one that helps to start others ends by itself
                    if psutil.Process(pid).cmdline()[-2:] == words:
                        return pid
            assert not self._over, self.output


@contextmanager
def running(
    run_dir: Path,
    script: Path,
    *args: str,
    options: tuple[str, ...] = (),
    wrap: str = "",
    afresh: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[Run]:
    """Start `paceline run`; when the block ends so must the job, and nothing of it may be left.

    It is forked from a process that has imported torch, unless it is to start `afresh`, as a shell starts it. `wrap` is
    what the shell says before the command then. `environment`: variables beside those of the test.
    """
    told = ["run", "--run-dir", str(run_dir), "--quiet", *options, str(script), *args]
    path = os.pathsep.join((str(SOURCES), str(ROOT)))
    variables = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})}
    if wrap or afresh:
        process = _started(told, wrap, variables)
        run = Run(process, process.stdout, run_dir)
    else:
        run = Run(*start_launcher(*told, environment=variables), run_dir)
    listener = threading.Thread(target=run.listen)
    listener.start()
    try:
        yield run
        run.process.wait(timeout_s)
        assert wait_gone(run.family(), LEFT_WITHIN_S) == set(), f"processes are left:\n{run.output}"
        left = {path.name for path in run_dir.iterdir()} if run_dir.exists() else set()
        assert not {name for name in left if name == "token" or name.endswith((".sock", ".address"))}, left
    finally:
        with suppress(psutil.NoSuchProcess):
            run.process.kill()
        run.process.wait()
        listener.join(timeout=30)
        run.said.close()


def _started(told: Sequence[str], wrap: str, variables: Mapping[str, str]) -> psutil.Popen:
    command = [sys.executable, "-m", "paceline", *told]
    if wrap:
        command = ["bash", "-c", f'{wrap} "$@"', "bash", *command]
    return psutil.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
    )


def run_to_end(
    run_dir: Path, script: Path, *args: str, options: tuple[str, ...] = (), wrap: str = "", afresh: bool = False
) -> tuple[int, Run]:
    """Run a job to its end; return its exit code and what it said."""
    with running(run_dir, script, *args, options=options, wrap=wrap, afresh=afresh) as run:
        code = run.end()
    return code, run


def went_on_without(name: str, happened: str = "was killed by SIGKILL", needs_all: str = "") -> list[str]:
    """What the launcher says of a run that has lost one worker, also of one that this strategy needs."""
    fails = f"the next step of the others fails, as {needs_all} needs every worker"
    return [
        f"paceline: {name} {happened}; {fails if needs_all else 'the others go on without it'}",
        f"paceline: the run has ended without {name}, which {happened} (exit code {EXIT_LOST})",
    ]


def write_script(folder: Path, text: str) -> Path:
    path = folder / "script.py"
    path.write_text(text)
    return path


def seconds_since(begin_s: float) -> float:
    return time.monotonic() - begin_s
