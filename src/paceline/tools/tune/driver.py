"""Runs the trials of a search, each a `paceline run` of its own: starts, follows and stops them, until all are done.

Rules: (1) A trial is in the journal before its process starts. (2) No trial outlives its search: a signal is passed on
to its processes; if the search is killed, the guard kills them. (3) A trial that fails ends no other.
"""

from __future__ import annotations

import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, final

import msgspec

from paceline.errors import UsageError
from paceline.job.environment import inherited
from paceline.job.machines import cores_here, share_of
from paceline.launch.child import pin
from paceline.launch.config import RunConfig, as_text, flags, option_name
from paceline.launch.crash_policy import describe_exit
from paceline.launch.guard import Guard, kill_group
from paceline.launch.signals import Signals
from paceline.observe.averages import mean
from paceline.observe.runs import TraceFollower
from paceline.observe.trace import Evaluated, Reported, Step
from paceline.tools.compare.runs import failure_reason
from paceline.tools.tune.search_space import OF_THE_RUN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paceline.launch.config import Choice
    from paceline.observe.trace import TraceRecord
    from paceline.tools.tune.search_space import Metric
    from paceline.tools.tune.study import Folder, State, Study, Trial

_NO_NUMBER: Final = math.nan


@final
class Series:
    """Numbers that all workers report: the mean of the first ones, of the second ones, and so on."""

    def __init__(self) -> None:
        self._by_worker: dict[int, list[float]] = {}
        # The means of the first rounds; looked at many times a second, so each is made once.
        self._means: list[float] = []

    def add(self, worker: int, number: float | None) -> None:
        """Add the next number of a worker; None stands for one that is not finite."""
        if worker not in self._by_worker:
            self._by_worker[worker] = []
            self._means.clear()  # it was in none of them
        self._by_worker[worker].append(_NO_NUMBER if number is None else number)

    def means(self, *, to_the_end: bool) -> list[float]:
        """Return the means of the rounds that all reporting workers have reached, or, at the end, of all rounds."""
        lengths = [len(numbers) for numbers in self._by_worker.values()] or [0]
        self._means += [self._mean(turn) for turn in range(len(self._means), min(lengths))]
        return self._means + [self._mean(turn) for turn in range(min(lengths), max(lengths) if to_the_end else 0)]

    def _mean(self, turn: int) -> float:
        return mean(numbers[turn] for numbers in self._by_worker.values() if turn < len(numbers))


@final
class Values:
    """Values that one trial has reported.

    Args:
        metric: the metric that the search compares.
        every: number of reports of training loss whose mean is one value.

    Example:
        >>> values = Values("loss", every=2)
        >>> for clock, loss in enumerate((4.0, 2.0, 1.0)):
        ...     values.add(Step(0.0, 0, clock, 8, loss, 0.0, 0.1))
        >>> values.so_far(measured=False), values.final(measured=False)
        ([3.0], 1.5)
    """

    def __init__(self, metric: Metric, every: int) -> None:
        self._metric = metric
        self._every = every
        self._training = Series()
        self._measured = Series()

    def add(self, record: TraceRecord) -> None:
        """Add one record of the trial's traces."""
        match record:
            case Evaluated():
                number = record.accuracy if self._metric == "accuracy" else record.loss
                self._measured.add(record.worker, number)
            case Step() if record.loss is not None:
                self._training.add(record.worker, record.loss)
            case Reported():
                self._training.add(record.worker, record.loss)
            case _:
                pass

    @property
    def has_measured(self) -> bool:
        """Whether the script has reported measurements on held-out data."""
        return bool(self._measured.means(to_the_end=True))

    def so_far(self, *, measured: bool, ended: bool = False) -> Sequence[float]:
        """Return all values so far, in order: measurements, or means of the training loss; NaN where one is not finite.

        Rounds that some workers have not reached yet are left out until the trial has ended.
        """
        if measured or self._metric == "accuracy":
            return self._measured.means(to_the_end=ended)
        losses = self._training.means(to_the_end=ended)
        return [mean(losses[end - self._every : end]) for end in range(self._every, len(losses) + 1, self._every)]

    def final(self, *, measured: bool) -> float | None:
        """Return the value of a trial that has ended; None if it has not reported the metric."""
        if measured or self._metric == "accuracy":
            return next(reversed(self._measured.means(to_the_end=True)), None)
        losses = self._training.means(to_the_end=True)[-self._every :]
        return mean(losses) if losses else None


# -P: files of the working folder do not take the place of Python's own modules.
_SAFE_PATH: Final = "-P"  # nothing in the working folder takes the place of a module of ours
PROGRAM: Final = (sys.executable, _SAFE_PATH, "-m", "paceline", "run")
DEFAULT_GRACE_S: Final = 5.0  # of a run
# From the request to end until the kill: beyond the grace period of the workers and of the servers.
STOP_TIMEOUT_S: Final = 20.0
_PLACE: Final = re.compile(r"\{([A-Za-z][\w.-]*)\}")  # of a parameter, in an argument
DIVERGED: Final = "its reports are no longer finite numbers"


def configure(run: Mapping[str, Choice], args: Sequence[str], parameters: Mapping[str, Choice]) -> RunConfig:
    """Return the configuration of a trial: parameters fill their places in the arguments, or follow the arguments.

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


class Verdict(msgspec.Struct, frozen=True):
    """Result of a trial."""

    state: State
    value: float | None = None
    reason: str = ""


@final
@dataclass(slots=True)
class TrialProcess:
    """The process of a running trial.

    Attributes:
        slot: number of its share of the machine's cores.
        grace_s: grace period of the run, for workers and for servers.
        pruned: why it was asked to stop, if it was worse than others.
        late_after_s: time after which it was asked to stop, if it took too long.
    """

    trial: Trial
    slot: int
    folder: Path
    process: subprocess.Popen[bytes]
    values: Values
    tail: TraceFollower
    guard: Guard
    grace_s: float = DEFAULT_GRACE_S
    began_s: float = field(default_factory=time.monotonic)
    pruned: str = ""
    late_after_s: float | None = None
    _kill_at_s: float = math.inf

    @staticmethod
    def start(
        trial: Trial, folder: Folder, guard: Guard, slot: int, cores: Sequence[int], program: Sequence[str]
    ) -> TrialProcess:
        """Start the run of a trial; does not wait."""
        task, own = folder.task, folder.trial(trial.number)
        own.mkdir(parents=True)
        config = own / "run.toml"
        told = configure(task.search.run, task.args, trial.parameters)
        config.write_text(told.to_toml(f"Trial {trial.number} of {task.name}."), encoding="utf-8")
        grace_s = float(told.options.get("grace-s", DEFAULT_GRACE_S))
        run_dir = own / "run"
        if task.module is not None:  # which is looked for in the working folder, as python does
            program = [word for word in program if word != _SAFE_PATH]
        with (own / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [*program, "--config", str(config), "--run-dir", str(run_dir), "--quiet", *task.program],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=task.working_folder,
                env=guard.marked(inherited()),  # until the guard watches it
                start_new_session=True,
            )
        try:
            guard.watch(process.pid)
            pin(process.pid, cores)
        except BaseException:  # no other process would end it
            kill_group(process.pid)
            process.wait()
            raise
        values = Values(task.search.metric, task.search.every)
        return TrialProcess(trial, slot, own, process, values, TraceFollower(run_dir / "trace"), guard, grace_s)

    @property
    def elapsed_s(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self.began_s

    @property
    def was_told(self) -> bool:
        """Whether it was asked to stop."""
        return self._kill_at_s < math.inf

    def reap(self) -> int | None:
        """Return its exit code, or None while it runs; reads what it has reported."""
        pid = self.process.pid
        code = None
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            kill_group(pid)  # before the wait: until then the number of the group is not given to another
            self.guard.forget(pid)
            code = self.process.wait()
        elif time.monotonic() > self._kill_at_s:
            self.kill()
        for record in self.tail.poll():
            self.values.add(record)
        return code

    def stop(self) -> None:
        """Ask the run to end: workers finish their step. Later polls kill it if that takes too long."""
        if not self.was_told:
            self._kill_at_s = time.monotonic() + STOP_TIMEOUT_S + 2 * self.grace_s
            os.kill(self.process.pid, signal.SIGTERM)  # no other process has its number before it is waited for

    def kill(self) -> None:
        """Kill the run with all processes that it has started."""
        kill_group(self.process.pid)

    def judge(self, code: int, *, measured: bool) -> Verdict:
        """Return its result, by its exit code and its reports."""
        value = self.values.final(measured=measured)
        if code != 0 and self.pruned:
            return Verdict("pruned", reason=self.pruned)
        if code != 0 and self.late_after_s is not None:
            return Verdict(
                "failed", reason=f"did not end within {self.late_after_s:g} s; its last line: {self._words()}"
            )
        if code < 0:  # nothing that it has written says why
            return Verdict("failed", reason=f"its launcher {describe_exit(code)}; its last line: {self._words()}")
        if code != 0:
            return Verdict("failed", reason=self._words())
        if value is None:
            return Verdict(
                "failed", reason="the script has not reported the metric: call paceline.report(loss=..., accuracy=...)"
            )
        if not math.isfinite(value):
            return Verdict("pruned", reason=DIVERGED)
        return Verdict("finished", value)

    def _words(self) -> str:
        return failure_reason((self.folder / "output.txt").read_text(encoding="utf-8", errors="replace"))


POLL_INTERVAL_S: Final = 0.1
_GUARD_TIMEOUT_S: Final = 5.0
_WAKEUP_BYTES: Final = 4096


class Display(Protocol):
    """Shows the progress of a search."""

    def show(self, study: Study, running: Sequence[TrialProcess]) -> None:
        """Show the trials; called about ten times a second."""
        ...

    def ended(self, study: Study, run: TrialProcess) -> None:
        """Show that a trial has ended; the study has noted it already."""
        ...

    def close(self, study: Study) -> None:
        """Show the last state, and leave it as it is."""
        ...


class DriverOptions(msgspec.Struct, frozen=True):
    """Options of a search: trials at a time, the longest time of a trial, and the program that runs one.

    Raises UsageError for numbers below the least.
    """

    jobs: int = 1
    trial_timeout_s: float | None = None
    program: Sequence[str] = PROGRAM

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.jobs < 1:
            raise UsageError(f"--jobs must be at least 1, got {self.jobs}")
        if self.trial_timeout_s is not None and not self.trial_timeout_s > 0:
            raise UsageError(f"--trial-timeout-s must be more than 0, got {self.trial_timeout_s:g}")


@final
class TrialDriver:
    """Runs the trials of one search."""

    def __init__(self, folder: Folder, study: Study, options: DriverOptions, display: Display) -> None:
        self._folder = folder
        self._study = study
        self._options = options
        self._display = display
        self._running: list[TrialProcess] = []
        self._best: int | None = None

    def drive(self) -> None:
        """Run trials until all are done; blocks. Call it from the main thread, which receives signals.

        Raises:
            KeyboardInterrupt, SystemExit: a signal has ended the search; running trials are asked to end, and come
                again when the search is resumed.
        """
        guard = Guard(self._folder.path, temporary=False)
        try:
            with Signals() as signals:
                try:
                    self._keep_going(guard, signals)
                finally:
                    self._end_all(signals)
        finally:
            guard.dismiss(_GUARD_TIMEOUT_S)
            self._display.close(self._study)

    def _keep_going(self, guard: Guard, signals: Signals) -> None:
        self._keep_best()
        self._begin(guard)
        while self._running:
            self._display.show(self._study, self._running)
            _wait(signals)
            for number in signals.pop_received():
                raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
            for run in tuple(self._running):
                self._attend(run)
            self._begin(guard)

    def _begin(self, guard: Guard) -> None:
        """Start trials until as many run as may."""
        cores = cores_here()
        shares = self._options.jobs > 1
        for slot in sorted(set(range(self._options.jobs)) - {run.slot for run in self._running}):
            trial = self._study.ask()
            if trial is None:
                return
            own = share_of(cores, slot, self._options.jobs) if shares else ()
            self._running.append(TrialProcess.start(trial, self._folder, guard, slot, own, self._options.program))

    def _attend(self, run: TrialProcess) -> None:
        code = run.reap()
        if code is not None:
            self._conclude(run, code)
        elif run.was_told:
            return
        elif self._options.trial_timeout_s is not None and run.elapsed_s > self._options.trial_timeout_s:
            run.late_after_s = self._options.trial_timeout_s
            run.stop()
        elif (measured := self._study.measured) is not None:
            values = run.values.so_far(measured=measured)
            if self._study.report(run.trial.number, values):
                run.pruned = f"was worse than others at report {len(values)}, {values[-1]:.4g}"
                run.stop()

    def _conclude(self, run: TrialProcess, code: int) -> None:
        known, number = self._study.measured, run.trial.number
        measured = run.values.has_measured if known is None else known
        verdict = run.judge(code, measured=measured)
        self._running.remove(run)
        if verdict.state == "finished" and verdict.value is not None:
            reports = run.values.so_far(measured=measured, ended=True)
            self._study.finish(number, verdict.value, reports, measured=measured)
            self._keep_best()
        elif verdict.state == "pruned":
            self._study.prune(number, verdict.reason)
        else:
            self._study.fail(number, verdict.reason)
        self._display.ended(self._study, run)

    def _keep_best(self) -> None:
        """Write the configuration of the best trial, if it has changed."""
        best, task = self._study.best(), self._folder.task
        if best is not None and best.number != self._best:
            self._best = best.number
            note = f"The best trial of {task.name} so far, {best.number}: {task.search.metric} {best.value:.6g}."
            config = configure(task.search.run, task.args, best.parameters)
            unfinished = self._folder.best.with_name(".best.toml")
            unfinished.write_text(config.to_toml(note), encoding="utf-8")
            unfinished.replace(self._folder.best)

    def _end_all(self, signals: Signals) -> None:
        """Ask all running trials to end, and wait until they have; one that completes meanwhile counts as finished."""
        for run in self._running:
            run.stop()
        while self._running:
            _wait(signals)
            if signal.SIGINT in signals.pop_received():  # once more
                for run in self._running:
                    run.kill()
            for run in tuple(self._running):
                code = run.reap()
                if code == 0:
                    self._conclude(run, code)
                elif code is not None:
                    self._running.remove(run)


def _wait(signals: Signals) -> None:
    """Block until a signal arrives, as when a child ends, or the poll interval has passed."""
    if select.select([signals.wakeup_fd], [], [], POLL_INTERVAL_S)[0]:
        os.read(signals.wakeup_fd, _WAKEUP_BYTES)
