"""Runs the launcher as a process of its own, and looks at what it leaves behind."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

DRIVER = Path(__file__).with_name("driver.py")
TIMEOUT_S = 200.0


@dataclass(frozen=True, slots=True)
class Result:
    code: int
    stdout: str
    stderr: str


def write_script(folder: Path, text: str) -> Path:
    """A worker's script; it finds `place` and `spec` ready."""
    path = folder / "script.py"
    path.write_text(PREAMBLE + text)
    return path


def launch(script: Path, **settings: Any) -> Result:
    with subprocess.Popen(
        command(script, settings), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        stdout, stderr = process.communicate(timeout=TIMEOUT_S)
    return Result(process.returncode, stdout, stderr)


@contextmanager
def launched(script: Path, **settings: Any) -> Iterator[subprocess.Popen[str]]:
    """A launcher that runs on; its output has to be read to the end by the test."""
    process = subprocess.Popen(command(script, settings), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def command(script: Path, settings: dict[str, Any]) -> list[str]:
    return [sys.executable, str(DRIVER), json.dumps({"script": str(script), "quiet": True, **settings})]


def read_until(process: subprocess.Popen[str], word: str, times: int = 1) -> list[str]:
    """Read the launcher's output until `word` has come up in so many lines; return these."""
    assert process.stdout is not None
    found: list[str] = []
    for line in process.stdout:
        if word in line:
            found.append(line)
        if len(found) == times:
            return found
    raise AssertionError(f"the launcher ended before {word!r} came up {times} times; found {found}")


def processes_of(run_dir: Path) -> set[int]:
    """The processes that name the run directory on their command line or in their environment."""
    name = str(run_dir).encode()
    return {
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdecimal() and name in _read(entry / "cmdline") + _read(entry / "environ")
    }


def wait_gone(pids: set[int], timeout_s: float) -> set[int]:
    """Wait until these processes have ended; return those that have not."""
    alive: set[int] = set()
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        if not select.select([descriptor], [], [], timeout_s)[0]:
            alive.add(pid)
        os.close(descriptor)
    return alive


def wait_stopped(pid: int, timeout_s: float = 30.0) -> None:
    """Wait until a process has been stopped by a signal; only its parent is told, so look again and again."""
    descriptor = os.pidfd_open(pid)
    deadline_s = time.monotonic() + timeout_s
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        ended = select.select([descriptor], [], [], 0.01)[0]
        assert not ended, f"process {pid} ended instead of being stopped"
        assert time.monotonic() < deadline_s, f"process {pid} was not stopped in {timeout_s:g} s"
    os.close(descriptor)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


PREAMBLE = """
import os, signal, subprocess, sys
from paceline.job.environment import find_place
from paceline.job.spec import wait_spec
place = find_place()
spec = wait_spec(place.spec_path, timeout_s=60.0)
"""
