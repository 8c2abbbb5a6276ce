"""`paceline tune`: search over the hyperparameters of a script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from paceline.errors import UsageError
from paceline.job.choices import Engine
from paceline.tools.run import read_program
from paceline.tools.tune.api import check_needed, describe_task, run_search
from paceline.tools.tune.display import describe
from paceline.tools.tune.driver import DriverOptions
from paceline.tools.tune.study import Folder

if TYPE_CHECKING:
    from paceline.tools.tune.api import Tuned


def tune(
    search: Path | None = None,
    script: Path | None = None,
    /,
    *args: Annotated[str, Parameter(allow_leading_hyphen=True)],
    workers: Annotated[int | None, Parameter(alias="-n")] = None,
    servers: Annotated[int | None, Parameter(alias="-m")] = None,
    engine: Engine | None = None,
    jobs: Annotated[int, Parameter(alias="-j")] = 1,
    out: Path | None = None,
    resume: Path | None = None,
    trial_timeout_s: float | None = None,
    progress: bool = True,
) -> int:
    """Run a script many times with different parameters, and find the best.

    Options come before the script; everything after it goes to the script. `-m NAME` in place of the script runs a
    module by its name, as python does; `-m 2` says how many servers there are. Exits with 1 if no trial finished.

    Parameters
    ----------
    search
        A file (.yaml, .toml, .json) that describes the search: method, trials, metric, parameters, ...
    script
        The Python script that every worker of a trial runs. It calls paceline.report(loss=..., accuracy=...).
    args
        Its arguments. A parameter replaces {its name} in them, or else follows as --NAME=VALUE.
    workers
        Number of worker processes of each trial.
    servers
        Number of server processes of each trial.
    engine
        Engine that starts the processes of each trial.
    jobs
        Number of trials at a time. They share the cores of the machine.
    out
        New or empty folder for the results: best.toml for `paceline run --config`, the picture trials.png, the journal,
        and traces and output of each trial. Default: runs/tune-NAME, by the name of the file.
    resume
        Continue the search in this folder. Finished trials are kept; interrupted ones run again.
    trial_timeout_s
        Seconds after which a trial fails, and the search goes on. Default: no limit.
    progress
        Show live progress.
    """
    check_needed()
    options = DriverOptions(jobs, trial_timeout_s)
    run = {"workers": workers, "servers": servers, "engine": engine}
    if resume is not None:
        if search or out or any(run.values()):
            raise UsageError(
                "--resume continues a search as it was started: leave out search, script, --out and run options"
            )
        folder = Folder.reopen(resume)
    elif search is None or script is None:
        raise UsageError("expected a file that describes the search, and a script; or --resume with a folder")
    else:
        path, module, args = read_program(script, args)
        task = describe_task(search, path, args, run, module)
        folder = Folder.create(out or Path("runs", f"tune-{search.stem}"), task)
    tuned = run_search(folder, options, progress=progress)
    _tell(tuned, folder)
    return 1 if tuned.best is None else 0


def _tell(tuned: Tuned, folder: Folder) -> None:
    states = [trial.state for trial in tuned.trials if trial.state != "interrupted"]  # those ran again
    known = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    print(f"{len(states)} trials: {', '.join(known)}")
    if tuned.best is None:
        last = next((trial for trial in reversed(tuned.trials) if trial.reason), None)
        print(f"no trial finished{f'; the last one: {last.reason}' if last else ''}")
        return
    best, task = tuned.best, folder.task
    print(f"best: trial {best.number}, {task.search.metric} {best.value:.6g} with {describe(best.parameters)}")
    print(f"  run it       paceline run --config {folder.best} {' '.join(task.program)}")
    print(f"  the picture  {folder.picture}")
