"""The trials of a search, suggested by Optuna and kept in a journal, and the folder of the search.

Rules: (1) A change is in the journal before the call returns. (2) A trial that was running when its search was killed
is interrupted: it does not count, and its parameters come again before new ones.
"""

from __future__ import annotations

import fcntl
import json
from hashlib import sha256
from pathlib import Path
from random import Random
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, Literal, Self, final
from warnings import catch_warnings, simplefilter

import msgspec
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from paceline.errors import UsageError
from paceline.launch.local import prepare_run_dir
from paceline.launch.script import OPTION
from paceline.tools.tune.search_space import Search, Span

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence
    from types import TracebackType

    import optuna
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from paceline.launch.config import Choice
    from paceline.tools.tune.search_space import Parameters

_NEW_TRIAL: Final = 4  # the operation of a line that begins a trial; the number of the trial is how many came before
_TASK: Final = "search.json"
_LOCK: Final = "lock"


@final
class _Alone(JournalFileOpenLock):
    """No lock: the folder has one, which ends with its process."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        pass


@final
class _Lines(JournalFileBackend):
    """The lines of the journal.

    Attributes:
        line: number of the line that was read last, from 1.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Alone(str(path)))
        self.line = 0

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        for self.line, log in enumerate(super().read_logs(log_number_from), log_number_from + 1):
            yield log


def open_journal(path: Path) -> BaseStorage:
    """Open a journal, or create one. An incomplete last line, of a killed process, is dropped.

    Raises:
        UsageError: a line is damaged. The journal is not changed then, as later lines may depend on it.
    """
    data = path.read_bytes() if path.exists() else b""
    *lines, rest = data.split(b"\n")
    _check(path, lines)
    with path.open("ab") as file:
        file.truncate(len(data) - len(rest))
    journal = _Lines(path)
    try:
        return JournalStorage(journal)
    except Exception as error:  # Optuna may raise any of them for a line that it did not write
        raise _damaged(path, lines, journal.line, f"{type(error).__name__}: {error}") from error


def _check(path: Path, lines: list[bytes]) -> None:
    """Raise UsageError for a line that is not an operation, or one on a trial that no earlier line has begun.

    Optuna would silently skip the latter.
    """
    num_trials = 0
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _damaged(path, lines, number, str(error)) from error
        if not isinstance(entry, dict) or not isinstance(entry.get("op_code"), int):
            raise _damaged(path, lines, number, "expected an operation of Optuna")
        trial = entry.get("trial_id", 0)
        if "trial_id" in entry and not (isinstance(trial, int) and 0 <= trial < num_trials):
            raise _damaged(path, lines, number, f"it is of trial {trial}, and {num_trials} were begun before")
        num_trials += entry["op_code"] == _NEW_TRIAL


def _damaged(path: Path, lines: list[bytes], number: int, why: str) -> UsageError:
    what = f"{path} is damaged in line {number} of {len(lines)}: {why}. Nothing was changed. "
    if number == 1:
        return UsageError(f"{what}No line before it is valid: start a new search, with another --out")
    whole, copy = quote(str(path)), quote(f"{path}.damaged")
    return UsageError(
        f"{what}Later lines may depend on it; the {number - 1} lines before are valid. To continue with "
        f"these, and run the later trials again: cp {whole} {copy} && head -n {number - 1} {copy} > {whole}"
    )


State = Literal["running", "finished", "pruned", "failed", "interrupted"]

MEDIAN_STARTUP: Final = 5  # number of finished trials before the first may be pruned
HALVING_FACTOR: Final = 3
FEWEST_TO_EXPLAIN: Final = 20  # least number of trials for the importance of parameters
_NUM_SHUFFLES: Final = 40
_STUDY: Final = "search"
_REASON: Final = "reason"
_MEASURED: Final = "measured"
_AGAIN: Final = "again"  # number of the interrupted trial that it repeats
_POINT: Final = "point"  # of a grid


class Trial(msgspec.Struct, frozen=True):
    """One trial.

    Attributes:
        value: result of the trial, if it has finished.
        reports: values that it was compared by while it ran, in order.
        reason: why it was pruned or failed.
    """

    number: int
    parameters: Mapping[str, Choice]
    state: State
    value: float | None = None
    reports: tuple[float, ...] = ()
    reason: str = ""


@final
class Study:
    """All trials of a search, in a journal if one is given. For one process at a time.

    Example:
        >>> from paceline.tools.tune.search_space import read_search
        >>> study = Study.open(read_search({"method": "grid", "parameters": {"lr": [0.1, 0.2]}}, "here"))
        >>> while (trial := study.ask()) is not None:
        ...     study.finish(trial.number, trial.parameters["lr"] * 2)
        >>> study.best().parameters
        {'lr': 0.1}
    """

    def __init__(self, search: Search, study: optuna.Study) -> None:
        self._search = search
        self._study = study
        self._running: dict[int, optuna.Trial] = {}
        self._points = search.combinations() if search.method == "grid" else ()
        self._fail_interrupted()

    @classmethod
    def open(cls, search: Search, journal: Path | None = None) -> Self:
        """Start a search, or continue the one in the journal.

        Raises:
            UsageError: Optuna is not installed.
        """
        try:
            import optuna
        except ImportError as error:
            raise UsageError("a search needs Optuna, not installed here: pip install 'paceline[tune]'.") from error
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(
            storage=None if journal is None else open_journal(journal),
            study_name=_STUDY,
            load_if_exists=True,
            direction="minimize" if search.minimizes else "maximize",
            pruner=_pruner(search),
        )
        # A search that continues must not repeat the suggestions of its beginning.
        study.sampler = _sampler(search, num_before=len(study.get_trials(deepcopy=False)))
        return cls(search, study)

    # -- trials that run ---------------------------------------------------------------------------------------------

    def ask(self) -> Trial | None:
        """Return the next trial, which counts as running from now on; None when all have been started."""
        known = self._study.get_trials(deepcopy=False)
        if not any(one.state.name == "WAITING" for one in known):
            counted = [one for one in known if _state(one) != "interrupted"]
            again = self._to_come_again(known)
            if again is not None:
                self._enqueue(again.params, {**again.user_attrs, _AGAIN: again.number})
            elif len(counted) >= self._search.num_trials:
                return None
            elif self._points:
                taken = {one.user_attrs[_POINT] for one in counted}
                point = next(point for point in range(len(self._points)) if point not in taken)
                self._enqueue(self._points[point], {_POINT: point})
        trial = self._study.ask()
        self._running[trial.number] = trial
        parameters = {name: self._suggest(trial, name) for name in self._parameters}
        return Trial(trial.number, parameters, "running")

    def report(self, number: int, values: Sequence[float]) -> bool:
        """Record all values of a running trial so far; return whether it is to be pruned.

        A trial with as many reports as the longest finished one is nearly done, and is not pruned.
        """
        trial = self._running[number]
        finished = [one for one in self._study.get_trials(deepcopy=False) if one.state.name == "COMPLETE"]
        end = max((one.last_step or 0 for one in finished), default=0)
        for step, value in list(enumerate(values, start=1))[self._num_told(number) :]:
            trial.report(value, step)
            if trial.should_prune() and not 0 < end <= step:
                return True
        return False

    def finish(self, number: int, value: float, reports: Sequence[float] = (), *, measured: bool = True) -> None:
        """Record the end of a trial, all its reports, and whether they were measured on held-out data."""
        trial = self._running.pop(number)
        for step, reported in list(enumerate(reports, start=1))[self._num_told(number) :]:
            trial.report(reported, step)
            trial.should_prune()  # records what others are compared to under halving
        trial.set_user_attr(_MEASURED, measured)
        self._study.tell(trial, value)

    def prune(self, number: int, reason: str) -> None:
        """Record that a trial was pruned."""
        self._end(number, reason, "PRUNED")

    def fail(self, number: int, reason: str) -> None:
        """Record that a trial has failed."""
        self._end(number, reason, "FAIL")

    # -- what is known -----------------------------------------------------------------------------------------------

    def trials(self) -> list[Trial]:
        """Return all trials, by number."""
        frozen = self._study.get_trials(deepcopy=False)
        return [_as_trial(one) for one in frozen if one.state.name != "WAITING"]

    def best(self) -> Trial | None:
        """Return the best finished trial, of equals the first; None without one."""
        finished = [trial for trial in self.trials() if trial.value is not None]
        sign = 1 if self._search.minimizes else -1
        return min(finished, key=lambda trial: sign * (trial.value or 0.0), default=None)

    @property
    def measured(self) -> bool | None:
        """Whether measurements on held-out data count: for accuracy, or if the first trial made some; None before."""
        if self._search.metric == "accuracy":
            return True
        finished = [one for one in self._study.get_trials(deepcopy=False) if one.state.name == "COMPLETE"]
        return bool(finished[0].user_attrs[_MEASURED]) if finished else None

    def importances(self) -> dict[str, float]:
        """Return the share of the difference between the best and all trials that each parameter explains, 0 to 1.

        Pruned trials rank behind finished ones: only which trials are among the best matters. A parameter is left out
        that explains no more than it does in some of 40 orders drawn at random, as it may do so by chance; and all are
        where there are few trials.
        """
        known = [one for one in self._study.get_trials(deepcopy=False) if _state(one) in ("finished", "pruned")]
        varied = [name for name in self._parameters if len({one.params[name] for one in known}) > 1]
        if len(known) < FEWEST_TO_EXPLAIN or not varied:
            return {}
        ordered = sorted(known, key=self._order)
        found, random = _explained(ordered, varied), Random(0)
        chance = dict.fromkeys(varied, 0.0)
        for _ in range(_NUM_SHUFFLES):
            shuffled = _explained(random.sample(ordered, len(ordered)), varied)
            chance = {name: max(chance[name], shuffled[name]) for name in varied}
        sure = {name: share for name, share in found.items() if share > chance[name]}
        return {name: share / sum(sure.values()) for name, share in sure.items()}

    def _order(self, frozen: FrozenTrial) -> tuple[bool, float]:
        """Sort finished trials by value, and pruned ones behind them, the latest pruned first."""
        sign = 1 if self._search.minimizes else -1
        is_finished = _state(frozen) == "finished"
        return not is_finished, sign * (frozen.value or 0.0) if is_finished else -(frozen.last_step or 0)

    # ----------------------------------------------------------------------------------------------------------------

    @property
    def _parameters(self) -> Parameters:
        return self._search.parameters

    def _num_told(self, number: int) -> int:
        return len(self._study.get_trials(deepcopy=False)[number].intermediate_values)

    def _end(self, number: int, reason: str, state: Literal["PRUNED", "FAIL"]) -> None:
        from optuna.trial import TrialState

        trial = self._running.pop(number)
        trial.set_user_attr(_REASON, reason)
        self._study.tell(trial, state=TrialState[state])

    def _enqueue(self, parameters: Mapping[str, Choice], attributes: Mapping[str, object]) -> None:
        self._study.enqueue_trial(dict(parameters), user_attrs=dict(attributes))

    def _fail_interrupted(self) -> None:
        from optuna.trial import TrialState

        for one in self._study.get_trials(deepcopy=False):
            if one.state == TrialState.RUNNING:
                self._study.tell(one.number, state=TrialState.FAIL)

    def _to_come_again(self, known: Sequence[FrozenTrial]) -> FrozenTrial | None:
        came = {one.user_attrs[_AGAIN] for one in known if _AGAIN in one.user_attrs}
        waiting = [one for one in known if _state(one) == "interrupted" and one.number not in came]
        return next((one for one in waiting if set(one.params) == set(self._parameters)), None)

    def _suggest(self, trial: optuna.Trial, name: str) -> Choice:
        spec = self._parameters[name]
        if isinstance(spec, tuple) or self._points:
            chosen = trial.suggest_categorical(name, spec.points() if isinstance(spec, Span) else spec)
            assert chosen is not None
            return chosen
        if spec.is_whole:
            return trial.suggest_int(name, int(spec.low), int(spec.high), log=spec.log)
        return trial.suggest_float(name, spec.low, spec.high, log=spec.log)


def _sampler(search: Search, num_before: int) -> BaseSampler:
    from optuna.samplers import RandomSampler, TPESampler

    seed = int.from_bytes(sha256(f"{search.seed} {num_before}".encode()).digest()[:4], "big")
    return TPESampler(seed=seed) if search.method == "tpe" else RandomSampler(seed=seed)


def _pruner(search: Search) -> BasePruner:
    from optuna.pruners import MedianPruner, NopPruner, SuccessiveHalvingPruner

    match search.pruning:
        case "none":
            return NopPruner()
        case "median":
            return MedianPruner(n_startup_trials=MEDIAN_STARTUP)
        case "halving":
            return SuccessiveHalvingPruner(min_resource=1, reduction_factor=HALVING_FACTOR)


def _explained(ordered: Sequence[FrozenTrial], names: Sequence[str]) -> dict[str, float]:
    """Return how much each parameter explains of an order of trials, the best first, by PED-ANOVA."""
    import optuna

    ranked = optuna.create_study()
    ranked.add_trials(
        [
            optuna.trial.create_trial(value=rank, params=one.params, distributions=one.distributions)
            for rank, one in enumerate(ordered)
        ]
    )
    with catch_warnings():
        simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # of `normalize`: shares of 1 cannot be compared
        return dict(optuna.importance.get_param_importances(ranked, params=list(names), normalize=False))


def _state(frozen: FrozenTrial) -> State:
    """Return the state of a trial; one that failed without a reason was interrupted with its search."""
    match frozen.state.name:
        case "COMPLETE":
            return "finished"
        case "PRUNED":
            return "pruned"
        case "FAIL":
            return "failed" if _REASON in frozen.user_attrs else "interrupted"
        case _:
            return "running"


def _as_trial(frozen: FrozenTrial) -> Trial:
    state = _state(frozen)
    return Trial(
        frozen.number,
        frozen.params,
        state,
        frozen.value if state == "finished" else None,
        tuple(value for _, value in sorted(frozen.intermediate_values.items())),
        frozen.user_attrs.get(_REASON, ""),
    )


class SearchTask(msgspec.Struct, frozen=True, kw_only=True):
    """Task of a search, which resuming needs: the script with its arguments, and the working folder."""

    name: str
    search: Search
    script: str
    args: tuple[str, ...]
    working_folder: str
    module: str | None = None  # under whose name the script runs, as by `python -m`

    @property
    def program(self) -> tuple[str, ...]:
        """What `paceline run` is told to run."""
        return (self.script,) if self.module is None else (OPTION, self.module)


@final
class Folder:
    """The folder of one search; a context manager that locks it, for one process at a time."""

    def __init__(self, path: Path, task: SearchTask) -> None:
        self.path = path
        self.task = task

    @classmethod
    def create(cls, path: Path, task: SearchTask) -> Self:
        """Make a folder for a new search.

        Raises:
            UsageError: the folder is not empty.
        """
        if (path / _TASK).exists():
            raise UsageError(f"{path} holds a search already: continue it with --resume {path}, or name another --out")
        made = prepare_run_dir(path)
        (made / _TASK).write_bytes(msgspec.json.format(msgspec.json.encode(task)) + b"\n")
        return cls(made, task)

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Open the folder of a search that was started before.

        Raises:
            UsageError: it is not the folder of a search.
        """
        try:
            return cls(path.absolute(), msgspec.json.decode((path / _TASK).read_bytes(), type=SearchTask))
        except OSError as error:
            raise UsageError(f"{path} is not the folder of a search: cannot read {_TASK}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise UsageError(f"{path / _TASK} is damaged, or of another version: {error}") from error

    def __enter__(self) -> Self:
        self._lock = (self.path / _LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise UsageError(f"another process runs this search: {self.path}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.close()

    @property
    def journal(self) -> Path:
        """Journal of all trials."""
        return self.path / "journal.log"

    @property
    def picture(self) -> Path:
        """Figure of the trials."""
        return self.path / "trials.png"

    @property
    def best(self) -> Path:
        """Configuration of the best trial, for `paceline run --config`."""
        return self.path / "best.toml"

    def trial(self, number: int) -> Path:
        """Folder of the traces and output of a trial."""
        return self.path / "trials" / f"{number:04d}"
