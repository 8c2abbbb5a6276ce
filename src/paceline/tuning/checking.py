"""Checks the options that a search has for `paceline run`, before the first trial is started with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cyclopts import CycloptsError

from paceline.cli import app
from paceline.core.consistency import Consistency
from paceline.core.strategies import Distribution
from paceline.errors import UsageError
from paceline.launch.config import as_text, option_name
from paceline.tuning.space import OF_THE_RUN, Span

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from paceline.launch.config import Choice
    from paceline.tuning.space import Search

_SOME_SCRIPT: Final = "script.py"


def check_run_options(search: Search, source: str) -> None:
    """Look at the options of all trials, and at every one that is searched, by itself.

    Raises:
        UsageError: there is no such option, or it has no such value.
    """
    for options in _each(search):
        tokens = [f"--{name}={as_text(value)}" for name, value in options.items()]
        try:
            _, bound, _ = app.parse_args(["run", *tokens, "--", _SOME_SCRIPT], print_error=False, exit_on_error=False)
            _check_texts(bound.arguments)
        except (CycloptsError, UsageError) as error:
            raise UsageError(f"{source}: options of the run: {error}") from error


def _each(search: Search) -> Iterator[Mapping[str, Choice]]:
    yield search.run
    for name, spec in search.parameters.items():
        if name.startswith(OF_THE_RUN):
            option = option_name(name.removeprefix(OF_THE_RUN))
            for value in (spec.low, spec.high) if isinstance(spec, Span) else spec:
                yield {option: value}


def _check_texts(arguments: Mapping[str, object]) -> None:
    consistency, strategy = arguments.get("consistency"), arguments.get("strategy")
    if isinstance(consistency, str):
        Consistency.parse(consistency)
    if isinstance(strategy, str):
        Distribution.parse(strategy)
