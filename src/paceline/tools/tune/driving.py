"""Runs the trials of a search, some at a time, until all are done: begins them, follows them, stops those behind.

Rules: (1) a trial is in the journal before its process is started. (2) Whoever ends this ends every trial: with a
signal they are told to leave; if this process is killed, the guard kills them. (3) A trial that fails ends no other.
"""

from __future__ import annotations

import os
import select
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, final

from paceline.errors import UsageError
from paceline.job.machines import cores_here, share_of
from paceline.launch.guard import Guard
from paceline.launch.signals import Signals
from paceline.tools.tune.running import PROGRAM, Running, configure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paceline.tools.tune.folder import Folder
    from paceline.tools.tune.study import Study

TURN_S: Final = 0.1
_GUARD_TIMEOUT_S: Final = 5.0
_WAKEUP_BYTES: Final = 4096


class Display(Protocol):
    """Who is shown how the search goes."""

    def show(self, study: Study, running: Sequence[Running]) -> None:
        """Show the state of things; called about ten times a second."""
        ...

    def ended(self, study: Study, run: Running) -> None:
        """Show that a trial has ended, of which the study knows."""
        ...

    def close(self, study: Study) -> None:
        """Show the last state, and leave it as it is."""
        ...


@dataclass(frozen=True, slots=True)
class SearchTerms:
    """How trials are run: how many at once, for how long at most, and by which program.

    Raises UsageError for numbers that no trial could be run by.
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
    """One search under way."""

    def __init__(self, folder: Folder, study: Study, terms: SearchTerms, display: Display) -> None:
        self._folder = folder
        self._study = study
        self._terms = terms
        self._display = display
        self._running: list[Running] = []
        self._best: int | None = None

    def drive(self) -> None:
        """Run trials until there are enough; blocks. Call it from the main thread: it answers signals.

        Raises:
            KeyboardInterrupt, SystemExit: a signal has ended it; what runs then is told to leave, and comes again.
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
        """Begin trials while there is room."""
        cores = cores_here()
        shares = self._terms.jobs > 1
        for slot in sorted(set(range(self._terms.jobs)) - {run.slot for run in self._running}):
            trial = self._study.ask()
            if trial is None:
                return
            own = share_of(cores, slot, self._terms.jobs) if shares else ()
            self._running.append(Running.start(trial, self._folder, guard, slot, own, self._terms.program))

    def _attend(self, run: Running) -> None:
        code = run.reap()
        if code is not None:
            self._conclude(run, code)
        elif run.was_told:
            return
        elif self._terms.trial_timeout_s is not None and run.elapsed_s > self._terms.trial_timeout_s:
            run.late_after_s = self._terms.trial_timeout_s
            run.stop()
        elif (measured := self._study.measured) is not None:
            values = run.values.so_far(measured=measured)
            if self._study.report(run.trial.number, values):
                run.pruned = f"was behind others after report {len(values)}, {values[-1]:.4g}"
                run.stop()

    def _conclude(self, run: Running, code: int) -> None:
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
        """Write down how the best trial was run, if it is another than before."""
        best, task = self._study.best(), self._folder.task
        if best is not None and best.number != self._best:
            self._best = best.number
            note = f"The best trial of {task.name} so far, {best.number}: {task.search.metric} {best.value:.6g}."
            config = configure(task.search.run, task.args, best.parameters)
            unfinished = self._folder.best.with_name(".best.toml")
            unfinished.write_text(config.to_toml(note), encoding="utf-8")
            unfinished.replace(self._folder.best)

    def _end_all(self, signals: Signals) -> None:
        """Tell what still runs to leave, and see to it that it does; what was through with its work has finished."""
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
    """Block until a signal comes, as it does when a process ends, or a little while has passed."""
    if select.select([signals.wakeup_fd], [], [], TURN_S)[0]:
        os.read(signals.wakeup_fd, _WAKEUP_BYTES)
