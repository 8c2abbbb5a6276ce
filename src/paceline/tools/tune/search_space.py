"""Search space: parameters and their ranges, the search method and the objective, validated before a search starts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Annotated, Final, Literal, TypeVar, get_args

import msgspec

from paceline.errors import UsageError
from paceline.launch.config import Choice, option_name

Method = Literal["grid", "random", "tpe"]
Metric = Literal["loss", "accuracy"]
Direction = Literal["minimize", "maximize"]
Pruning = Literal["none", "median", "halving"]

OF_THE_RUN: Final = "run."  # prefix of a parameter that is an option of `paceline run`
OURS: Final = ("config", "run-dir", "progress", "quiet", "traceback")  # options that the search sets for every trial
MAX_COMBINATIONS: Final = 10_000

_NUMBER: Final = "a number, of at most 64 bits if it is whole"
_WHOLE_NUMBER: Final = "a whole number"
_NAME: Final = re.compile(r"[A-Za-z][\w.-]*")
_Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class Span(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Numbers from `low` to `high`, both included; whole numbers if both are. On a logarithmic scale if `log`.

    `steps` is the number of points of a grid; without it, all whole numbers.
    """

    low: _Whole | float
    high: _Whole | float
    log: bool = False
    steps: _Whole | None = None

    @property
    def is_whole(self) -> bool:
        """Whether these are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def points(self) -> tuple[int | float, ...]:
        """Return the points of a grid.

        >>> Span(1, 4).points(), Span(0.001, 0.1, log=True, steps=3).points()
        ((1, 2, 3, 4), (0.001, 0.01, 0.1))
        """
        if self.steps is None:
            return tuple(range(int(self.low), int(self.high) + 1))
        shares = [step / (self.steps - 1) for step in range(self.steps)]
        if self.log:
            inner = [self.low * (self.high / self.low) ** share for share in shares[1:-1]]
        else:
            inner = [self.low + (self.high - self.low) * share for share in shares[1:-1]]
        if self.is_whole:
            return tuple(dict.fromkeys(round(point) for point in (self.low, *inner, self.high)))
        return (self.low, *(float(f"{point:.12g}") for point in inner), self.high)


Parameters = Mapping[str, Span | tuple[Choice, ...]]


class Search(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Description of a search, as in a file.

    Attributes:
        parameters: values of each parameter by name: a list, or low and high. Each becomes an argument --NAME=VALUE of
            the script, or replaces {NAME} in a given argument; run.NAME is an option of the run.
        method: "grid" tries all combinations, "random" draws them, "tpe" prefers those near the best so far.
        trials: number of trials; not with a grid.
        metric: "accuracy", or "loss": that on held-out data if the script reports one, else that of training.
        direction: "minimize" or "maximize"; by default minimize loss, and maximize accuracy.
        seed: seed of the suggestions.
        pruning: which trials are stopped early: those worse than the median of the others at the same report
            ("median"), those not among the best third at reports 1, 3, 9, ... ("halving"), or "none".
        every: number of reports of training loss whose mean is one value.
        run: options of `paceline run` for all trials.
    """

    parameters: dict[str, Span | tuple[Choice, ...]]
    method: Method = "tpe"
    trials: int | None = None
    metric: Metric = "loss"
    direction: Direction | None = None
    seed: int = 0
    pruning: Pruning = "none"
    every: int = 10
    run: dict[str, Choice] = {}

    @property
    def minimizes(self) -> bool:
        """Whether a smaller value is better."""
        return self.direction == "minimize" if self.direction else self.metric == "loss"

    @property
    def num_trials(self) -> int:
        """Number of trials of the whole search."""
        return len(self.combinations()) if self.trials is None else self.trials

    def combinations(self) -> Sequence[Mapping[str, Choice]]:
        """Return the combinations of a grid, in order."""
        points = [spec.points() if isinstance(spec, Span) else spec for spec in self.parameters.values()]
        return [dict(zip(self.parameters, one, strict=True)) for one in product(*points)]


# What each may be, for messages.
_OF_SPAN: Final[Mapping[str, str]] = {
    "low": _NUMBER,
    "high": _NUMBER,
    "log": "true or false",
    "steps": f"{_WHOLE_NUMBER} of at most 64 bits",
}
_OF_SEARCH: Final[Mapping[str, str]] = {
    "parameters": "names with values",
    "method": f"one of {', '.join(get_args(Method))}",
    "trials": _WHOLE_NUMBER,
    "metric": f"one of {', '.join(get_args(Metric))}",
    "direction": f"one of {', '.join(get_args(Direction))}",
    "seed": _WHOLE_NUMBER,
    "pruning": f"one of {', '.join(get_args(Pruning))}",
    "every": _WHOLE_NUMBER,
    "run": "options of `paceline run`, each with one value, such as workers: 2",
}
_Described = TypeVar("_Described", Span, Search)


def read_search(told: Mapping[str, object], source: str) -> Search:
    """Return a search, given its description from a file or a call.

    Raises:
        UsageError: a name is not known, a value is not valid, or there are no parameters; the message names `source`.

    Example:
        >>> search = read_search({"trials": 20, "parameters": {"lr": {"low": 1e-4, "high": 1, "log": True}}}, "here")
        >>> search.method, search.minimizes
        ('tpe', True)
    """
    _require_known(told, _OF_SEARCH, source)
    parameters = told.get("parameters")
    if not isinstance(parameters, Mapping) or not parameters:
        raise UsageError(
            f"{source}: there is nothing to search: expected parameters with their values, such as parameters: "
            "{lr: {low: 0.01, high: 1}}"
        )
    specs = {str(name): _read_parameter(str(name), value, source) for name, value in parameters.items()}
    search = _convert({**told, "parameters": {}}, Search, _OF_SEARCH, source, strict=True)
    options = {option_name(name): value for name, value in search.run.items()}
    if len(options) < len(search.run):
        twice = _first_twice(map(option_name, search.run))
        raise UsageError(f"{source}: '{twice}' is set twice under run, with dashes and underscores; name it once")
    search = msgspec.structs.replace(search, parameters=specs, run=options)
    _check(search, source)
    return search


def _read_parameter(name: str, told: object, source: str) -> Span | tuple[Choice, ...]:
    where = f"{source}: parameter '{name}'"
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: a name has letters, digits, dots, dashes and underscores, and begins with a letter")
    if isinstance(told, Mapping):
        span = _read_span(told, where)
        _check_span(span, where)
        return span
    try:
        choices = msgspec.convert(told, tuple[Choice, ...])
    except msgspec.ValidationError as error:
        raise UsageError(
            f"{where} is {_shown(told)}, expected a list of values, each a number, a text, true or false, or low and "
            "high"
        ) from error
    twice = [choice for place, choice in enumerate(choices) if choice in choices[:place]]  # True is 1, for Optuna too
    if not choices or twice:
        raise UsageError(f"{where}: expected different values, got {f'{twice[0]} twice' if twice else 'none'}")
    if any(isinstance(choice, float) and not math.isfinite(choice) for choice in choices):
        raise UsageError(f"{where}: expected numbers that are finite, got {list(choices)}")
    return choices


def _read_span(told: Mapping[str, object], where: str) -> Span:
    _require_known(told, _OF_SPAN, where)
    for name in ("low", "high"):
        if name not in told:
            raise UsageError(f"{where}: {name} is missing: expected low and high, or a list of values")
    return _convert(told, Span, _OF_SPAN, where, strict=False)  # PyYAML takes 1e-4 for text


def _require_known(told: Mapping[str, object], expected: Mapping[str, str], where: str) -> None:
    """Raise UsageError for a name that means nothing here."""
    unknown = [name for name in told if name not in expected]
    if unknown:
        raise UsageError(f"{where}: '{unknown[0]}' is not known here, expected {', '.join(expected)}")


def _convert(
    told: Mapping[str, object], kind: type[_Described], expected: Mapping[str, str], where: str, *, strict: bool
) -> _Described:
    """Return what is described, whose names are known and there; raises UsageError for a value that does not fit."""
    for field in msgspec.structs.fields(kind):
        try:
            if field.name in told:
                msgspec.convert(told[field.name], field.type, strict=strict)
        except msgspec.ValidationError as error:
            raise UsageError(
                f"{where}: {field.name} is {_shown(told[field.name])}, expected {expected[field.name]}"
            ) from error
    return msgspec.convert(told, kind, strict=strict)


def _shown(value: object) -> str:
    """Return a value as a message has it.

    >>> _shown(None), _shown("x")
    ('empty', "'x'")
    """
    return "empty" if value is None else f"{value!r:.100}"


def _check_span(span: Span, where: str) -> None:
    got = f"got low {span.low:g} and high {span.high:g}"
    if not (math.isfinite(span.low) and math.isfinite(span.high)):
        raise UsageError(f"{where}: low and high must be finite, {got}")
    if span.low >= span.high:
        raise UsageError(f"{where}: low must be less than high, {got}; a single value is written as a list of one")
    if span.log and span.low <= 0:
        raise UsageError(f"{where}: with log, low must be more than 0, {got}")
    if span.steps is not None and span.steps < 2:
        raise UsageError(f"{where}: steps must be at least 2, low and high, got {span.steps}")


def _check(search: Search, source: str) -> None:
    """Raise UsageError for settings that contradict each other."""
    for name, number in (("trials", search.trials), ("every", search.every)):
        if number is not None and number < 1:
            raise UsageError(f"{source}: {name} must be at least 1, got {number}")
    _check_run(search, source)
    spans = {name: spec for name, spec in search.parameters.items() if isinstance(spec, Span)}
    if search.method == "grid":
        _check_grid(search, spans, source)
        return
    if search.trials is None:
        raise UsageError(f"{source}: the method {search.method} needs a number of trials, such as trials: 30")
    stepped = [name for name, span in spans.items() if span.steps is not None]
    if stepped:
        raise UsageError(f"{source}: parameter '{stepped[0]}': steps are for a grid, and the method is {search.method}")


def _check_grid(search: Search, spans: Mapping[str, Span], source: str) -> None:
    if search.trials is not None:
        raise UsageError(f"{source}: a grid tries all its combinations; leave out trials, or take the method random")
    num_combinations = 1
    for name, spec in search.parameters.items():
        span = spans.get(name)
        if span is not None and span.steps is None and not span.is_whole:
            raise UsageError(f"{source}: parameter '{name}': between {span.low:g} and {span.high:g} a grid needs steps")
        whole = span is not None and span.steps is None
        size = int(spec.high - spec.low) + 1 if whole and isinstance(spec, Span) else _num_points(spec)
        num_combinations *= size
    if num_combinations > MAX_COMBINATIONS:
        raise UsageError(
            f"{source}: a grid of {num_combinations} combinations, and at most {MAX_COMBINATIONS} are tried"
        )


def _num_points(spec: Span | tuple[Choice, ...]) -> int:
    return len(spec) if isinstance(spec, tuple) else spec.steps or 0


def _first_twice(names: Iterable[str]) -> str | None:
    """Return the first name that comes a second time."""
    known = set[str]()
    return next((name for name in names if name in known or known.add(name)), None)


def _check_run(search: Search, source: str) -> None:
    varied = [option_name(name.removeprefix(OF_THE_RUN)) for name in search.parameters if name.startswith(OF_THE_RUN)]
    twice = _first_twice(varied)
    if twice:
        raise UsageError(f"{source}: parameter 'run.{twice}' is there twice, with dashes and underscores; name it once")
    both = [name for name in varied if name in search.run]
    if both:
        raise UsageError(f"{source}: '{both[0]}' is set under run and searched as run.{both[0]}; name it once")
    ours = [name for name in (*search.run, *varied) if name in OURS]
    if ours:
        raise UsageError(f"{source}: '{ours[0]}' cannot be set for trials: the search sets it for each")
