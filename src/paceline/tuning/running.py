"""One trial as a process: a `paceline run` of its own, what its traces tell while it runs, and how it has ended."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from paceline.compare.running import last_words
from paceline.launch.child import pin
from paceline.launch.config import RunConfig, as_text, flags, option_name
from paceline.launch.guard import kill_group
from paceline.observe.runs import Tail
from paceline.tuning.space import OF_THE_RUN
from paceline.tuning.values import Values

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.launch.config import Choice
    from paceline.launch.guard import Guard
    from paceline.tuning.folder import Folder
    from paceline.tuning.study import State, Trial

# -P: what lies in the folder that this was called from is not imported instead of what belongs to Python.
PROGRAM: Final = (sys.executable, "-P", "-m", "paceline", "run")
DEFAULT_GRACE_S: Final = 5.0  # of a run
# From being told to end until being killed: beyond the grace that a run has for its workers, and for its servers.
STOP_TIMEOUT_S: Final = 20.0
_PLACE: Final = re.compile(r"\{([A-Za-z][\w.-]*)\}")  # of a parameter, in an argument
DIVERGED: Final = "what it reports is no finite number any more"


def configure(run: Mapping[str, Choice], args: Sequence[str], parameters: Mapping[str, Choice]) -> RunConfig:
    """Return how a trial is run: parameters fill the places that arguments have for them, or come behind these.

    >>> configure({"workers": 2}, ["--rate={lr}"], {"lr": 0.1, "batch": 32, "run.consistency": "ssp:3"})
    RunConfig(options={'workers': 2, 'consistency': 'ssp:3'}, args=('--rate=0.1', '--batch=32'))
    """
    varied = {
        option_name(name.removeprefix(OF_THE_RUN)): value
        for name, value in parameters.items()
        if name.startswith(OF_THE_RUN)
    }
    of_script = {name: value for name, value in parameters.items() if not name.startswith(OF_THE_RUN)}
    placed = {name for arg in args for name in _PLACE.findall(arg)}
    filled = [_PLACE.sub(lambda found: _text(of_script, found[1], found[0]), arg) for arg in args]
    rest = {name: value for name, value in of_script.items() if name not in placed}
    return RunConfig({**run, **varied}, (*filled, *flags(rest)))


def _text(parameters: Mapping[str, Choice], name: str, otherwise: str) -> str:
    return as_text(parameters[name]) if name in parameters else otherwise


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial has come to."""

    state: State
    value: float | None = None
    reason: str = ""


@final
@dataclass(slots=True)
class Running:
    """A trial that runs.

    Attributes:
        slot: which part of the machine's cores it has.
        grace_s: of the run, for workers and for servers.
        pruned: why it was told to stop, if it was behind others.
        late_after_s: after how long it was told to stop, if it took too long.
    """

    trial: Trial
    slot: int
    folder: Path
    process: subprocess.Popen[bytes]
    values: Values
    tail: Tail
    guard: Guard
    grace_s: float = DEFAULT_GRACE_S
    began_s: float = field(default_factory=time.monotonic)
    pruned: str = ""
    late_after_s: float | None = None
    _kill_at_s: float = math.inf

    @staticmethod
    def start(
        trial: Trial, folder: Folder, guard: Guard, slot: int, cores: Sequence[int], program: Sequence[str]
    ) -> Running:
        """Start the run of a trial; does not wait."""
        task, own = folder.task, folder.trial(trial.number)
        own.mkdir(parents=True)
        config = own / "run.toml"
        told = configure(task.search.run, task.args, trial.parameters)
        config.write_text(told.to_toml(f"Trial {trial.number} of {task.name}."), encoding="utf-8")
        grace_s = float(told.options.get("grace-s", DEFAULT_GRACE_S))
        run_dir = own / "run"
        with (own / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [*program, "--config", str(config), "--run-dir", str(run_dir), "--quiet", task.script],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=task.working_folder,
                start_new_session=True,
            )
        try:
            guard.watch(process.pid)
            pin(process.pid, cores)
        except BaseException:  # nobody else would end it
            kill_group(process.pid)
            process.wait()
            raise
        values = Values(task.search.metric, task.search.every)
        return Running(trial, slot, own, process, values, Tail(run_dir / "trace"), guard, grace_s)

    @property
    def elapsed_s(self) -> float:
        """For how long it runs."""
        return time.monotonic() - self.began_s

    @property
    def was_told(self) -> bool:
        """Whether it was told to stop."""
        return self._kill_at_s < math.inf

    def reap(self) -> int | None:
        """Return its exit code, or None while it runs; then take in what it has reported."""
        pid = self.process.pid
        code = None
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            kill_group(pid)  # in this order: the group's number cannot be given to others before
            self.guard.forget(pid)
            code = self.process.wait()
        elif time.monotonic() > self._kill_at_s:
            self.kill()
        for record in self.tail.poll():
            self.values.add(record)
        return code

    def stop(self) -> None:
        """Tell the run to end: workers finish their step. It is killed if that takes too long."""
        if not self.was_told:
            self._kill_at_s = time.monotonic() + STOP_TIMEOUT_S + 2 * self.grace_s
            os.kill(self.process.pid, signal.SIGTERM)  # nobody else has its number: it was not waited for

    def kill(self) -> None:
        """Kill the run; what it has started ends with it."""
        kill_group(self.process.pid)

    def judge(self, code: int, *, measured: bool) -> Verdict:
        """Say what it has come to, by its exit code and what it has reported."""
        value = self.values.final(measured=measured)
        if code != 0 and self.pruned:
            return Verdict("pruned", reason=self.pruned)
        if code != 0 and self.late_after_s is not None:
            return Verdict(
                "failed", reason=f"had not ended after {self.late_after_s:g} s; its last words: {self._words()}"
            )
        if code != 0:
            return Verdict("failed", reason=self._words())
        if value is None:
            return Verdict(
                "failed", reason="the script has reported nothing: it says paceline.report(loss=..., accuracy=...)"
            )
        if not math.isfinite(value):
            return Verdict("pruned", reason=DIVERGED)
        return Verdict("finished", value)

    def _words(self) -> str:
        return last_words((self.folder / "output.txt").read_text(encoding="utf-8", errors="replace"))
