"""Searches whose trials are pretended: processes that write traces, and no jobs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.tools.tune.api import Tuned, run_search
from paceline.tools.tune.driver import DriverOptions
from paceline.tools.tune.search_space import read_search
from paceline.tools.tune.study import Folder, SearchTask

PRETENDED = (sys.executable, "-S", "-E", str(Path(__file__).with_name("scripts") / "pretended_run.py"))


def pretended_task(search: Mapping[str, object], folder: Path, args: tuple[str, ...] = ()) -> SearchTask:
    checked = read_search(search, "search")
    return SearchTask(name="search", search=checked, script="no.py", args=args, working_folder=str(folder))


def begin(search: Mapping[str, object], folder: Path, args: tuple[str, ...] = ()) -> Folder:
    return Folder.create(folder / "out", pretended_task(search, folder, args))


def pretend(folder: Folder, *, jobs: int = 1, trial_timeout_s: float | None = None, progress: bool = False) -> Tuned:
    return run_search(folder, DriverOptions(jobs, trial_timeout_s, PRETENDED), progress=progress)
