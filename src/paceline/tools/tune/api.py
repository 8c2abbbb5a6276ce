"""`paceline.tune`: the search behind `paceline tune`, as a Python function."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
from cyclopts import App, CycloptsError

from paceline.core.calls import checked
from paceline.errors import UsageError
from paceline.launch.config import Choice, as_text, option_name, read_mapping
from paceline.launch.plan import LocalRun, read_workers
from paceline.launch.script import check_script
from paceline.observe.export.trackers import parse_trackers
from paceline.tools.run import run
from paceline.tools.tune.display import NullDisplay, draw_search, open_display
from paceline.tools.tune.driver import DriverOptions, TrialDriver
from paceline.tools.tune.search_space import OF_THE_RUN, Span, read_search
from paceline.tools.tune.study import Folder, SearchTask, Study, Trial

if TYPE_CHECKING:
    from collections.abc import Iterator

    from paceline.tools.tune.driver import Display
    from paceline.tools.tune.search_space import Search

_SOME_SCRIPT: Final = "script.py"


def check_run_options(search: Search, source: str) -> None:
    """Check the run options that all trials share, and each searched option with them.

    Raises:
        UsageError: an option is unknown, or a value is not valid.
    """
    command = App(print_error=False, exit_on_error=False)
    command.default(run)
    for options in _each(search):
        tokens = [f"--{name}={as_text(value)}" for name, value in options.items()]
        try:
            _, bound, _ = command.parse_args([*tokens, "--", _SOME_SCRIPT], print_error=False, exit_on_error=False)
            _require_whole(options, bound.arguments)
            bound.apply_defaults()
            _check(bound.arguments)
        except (CycloptsError, UsageError) as error:
            raise UsageError(f"{source}: options of the run: {error}") from error


def _each(search: Search) -> Iterator[Mapping[str, Choice]]:
    yield search.run
    for name, spec in search.parameters.items():
        if name.startswith(OF_THE_RUN):
            option = option_name(name.removeprefix(OF_THE_RUN))
            for value in (spec.low, spec.high) if isinstance(spec, Span) else spec:
                yield {**search.run, option: value}


def _require_whole(options: Mapping[str, Choice], arguments: Mapping[str, object]) -> None:
    """Raise UsageError for a fraction where an option takes whole numbers, which the command line would round."""
    for name, value in options.items():
        key = name.replace("-", "_")
        if isinstance(value, float) and isinstance(
            arguments.get(key, getattr(arguments.get("crash_policy"), key, None)), int
        ):
            raise UsageError(f"--{name} takes whole numbers, got {value:g} as a number with a fraction")


def _check(arguments: Mapping[str, Any]) -> None:
    """Raise UsageError for values that no run accepts; shares are checked against the servers when a run starts."""
    workers = read_workers(arguments["workers"])
    LocalRun(
        script=Path(_SOME_SCRIPT),
        num_workers=workers.places,
        num_at_start=workers.at_start,
        num_servers=arguments["servers"],
        num_data_servers=arguments["data_servers"],
        consistency=arguments["consistency"],
        strategy=arguments["strategy"],
        transport=arguments["transport"],
        server_threads=arguments["server_threads"],
        timeout_s=arguments["timeout"],
        publish_every=arguments["publish"],
        debug=arguments["debug"],
        snapshots=arguments["snapshots"],
        record=arguments["record"],
        joining=arguments["joining"],
        run_dir=Path(_SOME_SCRIPT),  # each trial has one
        crash_policy=arguments["crash_policy"],
    ).validate()
    if (log := arguments["export"].log) is not None:
        parse_trackers(log)


_NEEDED: Final = ("optuna", "matplotlib")
_CALLED: Final = "search"  # name of a search that is not from a file


class Tuned(msgspec.Struct, frozen=True):
    """Result of a search.

    Attributes:
        best: the best finished trial; None if no trial finished.
        trials: all trials by number, with interrupted ones.
        folder: with `best.toml` for `paceline run --config`, the picture `trials.png`, the journal, and for each trial
            its traces and output.
    """

    best: Trial | None
    trials: tuple[Trial, ...]
    folder: Path


@checked
def tune(
    search: Mapping[str, object] | Path | str,
    script: Path | str,
    args: Sequence[str] = (),
    *,
    workers: int | None = None,
    servers: int | None = None,
    engine: str | None = None,
    jobs: int = 1,
    out: Path | str | None = None,
    resume: bool = False,
    trial_timeout_s: float | None = None,
    progress: bool = False,
) -> Tuned:
    """Run a script many times with different parameters, as `paceline tune` does, and return the result.

    Blocks until all trials are done; call it from the main thread. Needs `pip install 'paceline[tune]'`.

    Args:
        search: description of the search, or a file with it: `method`, `trials`, `metric`, `parameters`, ...
        script: the script that every worker of a trial runs; it calls `paceline.report`.
        args: arguments of the script; a parameter replaces {its name} in them, or else follows as --NAME=VALUE.
        workers: workers of each trial, as for `paceline run`; other options of a run go under `run` in `search`.
        servers: servers of each trial.
        engine: engine that starts the processes of each trial, "local" or "ray".
        jobs: number of trials at a time; they share the cores of the machine.
        out: new or empty folder for the results; by default runs/tune-NAME, by the name of the file.
        resume: continue the search in `out`, if there is one; it must be the same search.
        trial_timeout_s: seconds after which a trial fails; None for no limit.
        progress: show trials on stderr.

    Raises:
        UsageError: the search is not valid, the script does not exist, the folder holds something else, or this is
            not the main thread; no trial has started then.

    Example:
        >>> import paceline
        >>> search = {"method": "grid", "metric": "accuracy", "parameters": {"lr": [0.1, 0.3]}}
        >>> tuned = paceline.tune(search, "train.py", ["--epochs=5"], workers=2)  # doctest: +SKIP
        >>> tuned.best.parameters, tuned.best.value  # doctest: +SKIP
        ({'lr': 0.3}, 0.97)
    """
    check_needed()
    if not isinstance(script, Path | str):  # pyright: ignore[reportUnnecessaryIsInstance] - it comes from callers
        raise UsageError(f"the script is a {type(script).__name__}, expected its path")
    limits = DriverOptions(jobs, trial_timeout_s)
    task = describe_task(search, Path(script), args, {"workers": workers, "servers": servers, "engine": engine})
    path = Path("runs", f"tune-{task.name.partition('.')[0]}") if out is None else Path(out)
    if resume and any(path.glob("search.json")):
        folder = Folder.reopen(path)
        if folder.task != task:
            raise UsageError(f"{path} holds another search, script or arguments: name another folder")
        return run_search(folder, limits, progress=progress)
    return run_search(Folder.create(path, task), limits, progress=progress)


def check_needed() -> None:
    """Raise UsageError outside of the main thread, or when a package that a search needs is not installed."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError("a search must be called from the main thread, which receives Ctrl-C and SIGTERM")
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"a search needs {' and '.join(missing)}, not installed here: pip install 'paceline[tune]'.")


def describe_task(
    search: Mapping[str, object] | Path | str,
    script: Path,
    args: Sequence[str],
    run: Mapping[str, Choice | None],
    module: str | None = None,
) -> SearchTask:
    """Check a search and return it as a task; the options given here override those of the search.

    Raises:
        UsageError: an option, the search or the script is not valid.
    """
    if not isinstance(search, Mapping | Path | str):  # pyright: ignore[reportUnnecessaryIsInstance] - it comes from callers
        raise UsageError(f"the search is a {type(search).__name__}, expected a mapping, or a file that describes it")
    told = search if isinstance(search, Mapping) else read_mapping(Path(search))
    name = _CALLED if isinstance(search, Mapping) else Path(search).name
    options = told.get("run", {})
    given = {option: value for option, value in run.items() if value is not None}
    if isinstance(options, Mapping) and given:
        told = {**told, "run": {**options, **given}}
    checked = read_search(told, name)
    check_run_options(checked, name)
    check_script(script)
    return SearchTask(
        name=name,
        search=checked,
        script=str(script.absolute()),
        args=tuple(args),
        working_folder=str(Path.cwd()),
        module=module,
    )


def run_search(folder: Folder, options: DriverOptions, *, progress: bool) -> Tuned:
    """Start or continue a search, wait for its end, and draw its figure."""
    with folder:
        search = folder.task.search
        study = Study.open(search, folder.journal)
        display: Display = open_display(search, sys.stderr) if progress else NullDisplay()
        TrialDriver(folder, study, options, display).drive()
        trials, best = study.trials(), study.best()
        draw_search(search, trials, best, study.importances(), folder.picture, folder.task.name)
        return Tuned(best, tuple(trials), folder.path)
