"""Checks the options that a search has for `paceline run`, before the first trial is started with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cyclopts import CycloptsError

from paceline.cli import app
from paceline.core.consistency import Consistency
from paceline.core.strategies import Distribution
from paceline.errors import UsageError
from paceline.launch.config import as_text, option_name
from paceline.launch.plan import LocalRun
from paceline.launch.policy import Policy
from paceline.tuning.space import OF_THE_RUN, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline.launch.config import Choice
    from paceline.tuning.space import Search

_SOME_SCRIPT: Final = "script.py"


def check_run_options(search: Search, source: str) -> None:
    """Look at the options of all trials, and beside them at every one that is searched, by itself.

    Raises:
        UsageError: there is no such option, or it has no such value.
    """
    for options in _each(search):
        tokens = [f"--{name}={as_text(value)}" for name, value in options.items()]
        try:
            _, bound, _ = app.parse_args(["run", *tokens, "--", _SOME_SCRIPT], print_error=False, exit_on_error=False)
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
    """Raise UsageError for a fraction where an option takes whole numbers: the command line would round it."""
    for name, value in options.items():
        if isinstance(value, float) and isinstance(arguments.get(name.replace("-", "_")), int):
            raise UsageError(f"--{name} takes whole numbers, got {value:g} as a number with a fraction")


def _check(arguments: Mapping[str, Any]) -> None:
    """Raise UsageError for values that make no run; whether shares fit the servers is seen when it starts."""
    if arguments["consistency"] is not None:
        Consistency.parse(arguments["consistency"])
    if arguments["strategy"] is not None:
        Distribution.parse(arguments["strategy"])
    LocalRun(
        script=Path(_SOME_SCRIPT),
        num_workers=arguments["workers"],
        num_servers=arguments["servers"],
        num_data_servers=arguments["data_servers"],
        transport=arguments["transport"],
        grace_s=arguments["grace_s"],
        server_threads=arguments["server_threads"],
        policy=Policy(on_crash=arguments["on_crash"], max_restarts=arguments["max_restarts"]),
    ).validate()
