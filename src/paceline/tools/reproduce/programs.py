"""Claims that a benchmark of the source tree shows: where it is, and a run of it with its numbers."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from paceline.errors import PacelineError, UsageError
from paceline.job.environment import inherited

_SOURCE_TREE: Final = Path(__file__).resolve().parents[4]
_SHOWN_LINES: Final = 6


def program(name: str) -> Path:
    """Return the path of a program of the source tree, as `benchmarks/pipeline.py`.

    Raises:
        UsageError: Paceline is installed without its source tree.
    """
    path = _SOURCE_TREE / name
    if not path.is_file():
        raise UsageError(
            f"this claim runs {name}, which is part of the source tree and not of the installed package. Unpack the "
            "source, install it with `pip install -e .`, and run the command again."
        )
    return path


def command_line(name: str, arguments: tuple[str, ...], environment: Mapping[str, str] | None = None) -> str:
    """Return the command that a user can type in the source tree.

    >>> command_line("benchmarks/pipeline.py", ("--steps", "2"), {"A": "1"})
    'A=1 python benchmarks/pipeline.py --steps 2 --json'
    """
    settings = [f"{key}={value}" for key, value in (environment or {}).items()]
    return " ".join([*settings, "python", name, *arguments, "--json"])


@dataclass(slots=True)
class ProgramRuns:
    """Runs of benchmarks by their numbers; one that several claims share runs once."""

    _found: dict[str, dict[str, Any]] = field(default_factory=dict[str, "dict[str, Any]"])

    def numbers(
        self, name: str, arguments: tuple[str, ...], *, timeout_s: float, environment: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Run a benchmark of the source tree and return the JSON object of its last line. Blocks until it has ended.

        Args:
            name: as `benchmarks/pipeline.py`.
            arguments: without `--json`, which is added.
            timeout_s: after which it is interrupted.
            environment: variables besides those of this process.

        Raises:
            UsageError: there is no source tree.
            PacelineError: it failed, took longer, or printed no numbers.
        """
        line = command_line(name, arguments, environment)
        if line not in self._found:
            self._found[line] = _read_numbers(line, _output(line, name, arguments, timeout_s, environment or {}))
        return self._found[line]


def _output(line: str, name: str, arguments: tuple[str, ...], timeout_s: float, environment: Mapping[str, str]) -> str:
    """Run a program to its end and return what it printed."""
    command = [sys.executable, str(program(name)), *arguments, "--json"]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=_SOURCE_TREE,
        env={**inherited(), **environment},
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as stopped:
            process.send_signal(signal.SIGINT)  # so that it ends what it has started
            out, err = process.communicate()
            if isinstance(stopped, KeyboardInterrupt):
                raise
            raise PacelineError(f"{line} did not end within {timeout_s:.0f} s on this machine.\n{_last(err)}") from None
    if process.returncode:
        raise PacelineError(f"{line} ended with exit code {process.returncode}:\n{_last(err or out)}")
    return out


def _read_numbers(line: str, out: str) -> dict[str, Any]:
    """Return the JSON object of the last line."""
    try:
        found = json.loads(out.strip().rpartition("\n")[2])
    except ValueError as error:
        raise PacelineError(f"{line} printed no numbers:\n{_last(out)}") from error
    if "skipped" in found:
        raise PacelineError(f"{line} was not possible here: {found['skipped']}")
    return found


def _last(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_SHOWN_LINES:])
