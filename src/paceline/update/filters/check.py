"""Validation of filters: their names, their numbers, and combinations that contradict each other."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import msgspec

from paceline.errors import UsageError
from paceline.update.rows.spec import FilterSpec

CODECS = ("bfloat16", "float16", "int8")
DIRECTIONS = ("push", "pull")


class _Number(msgspec.Struct, frozen=True):
    """The valid values of a number of a filter, in words and as a predicate."""

    words: str
    types: tuple[type, ...]
    fits: Callable[[float], bool]

    def accepts(self, value: object) -> bool:
        if not isinstance(value, int | float) or type(value) not in self.types:
            return False
        return math.isfinite(value) and self.fits(value)


def _whole(least: int, most: int = 1 << 62) -> _Number:
    return _Number(f"a whole number from {least} to {most}", (int,), lambda value: least <= value <= most)


_SWITCH = _Number("true or false", (bool,), lambda _: True)
_SHARE = _Number("a number in (0, 1]", (int, float), lambda value: 0 < value <= 1)
_POSITIVE = _Number("a finite number greater than 0", (int, float), lambda value: value > 0)
_NOT_NEGATIVE = _Number("a finite number, 0 or greater", (int, float), lambda value: value >= 0)
_AGE = _whole(0)

_FILTERS: Mapping[str, Mapping[str, _Number]] = {
    "key_cache": {"max_lists": _whole(1, 1 << 16), "max_ids": _whole(1, 1 << 24)},  # both ends hold that many
    "kkt": {"l1": _POSITIVE, "margin": _NOT_NEGATIVE, "reset_every": _whole(2)},
    "significant": {"threshold": _POSITIVE, "max_age": _AGE},
    "top_k": {"share": _SHARE, "max_age": _AGE},
    "random_skip": {"keep": _SHARE, "seed": _whole(0)},
    **{codec: dict.fromkeys(DIRECTIONS, _SWITCH) for codec in CODECS},
}


def check_filters(filters: Sequence[FilterSpec]) -> None:
    """Raise UsageError for the first problem with the filters of one table.

    Example:
        >>> check_filters([FilterSpec("snappy", {})])
        Traceback (most recent call last):
        ...
        paceline.errors.UsageError: There is no filter 'snappy'. There are key_cache, kkt, significant, top_k, \
random_skip, bfloat16, float16, int8.
    """
    given = cast("object", filters)  # of scripts, which are not typed
    for spec in cast("Sequence[object]", given if isinstance(given, Sequence) else (given,)):
        if not isinstance(spec, FilterSpec):
            raise UsageError(f"a filter is a {type(spec).__name__}, expected one of paceline.filters.")
    for problem in _problems(filters):
        raise UsageError(problem)


def number(spec: FilterSpec, name: str) -> float:
    """Return one number of a valid filter."""
    value = spec.numbers[name]
    if not isinstance(value, int | float):
        raise UsageError(f"Filter {spec.name}: {name} is {value}, expected a number.")
    return value


def named(filters: Sequence[FilterSpec], name: str) -> FilterSpec | None:
    """Return the filter of that name, if it is among them."""
    return next((spec for spec in filters if spec.name == name), None)


def _problems(filters: Sequence[FilterSpec]) -> Iterator[str]:
    for spec in filters:
        if spec.name not in _FILTERS:
            yield f"There is no filter '{spec.name}'. There are {', '.join(_FILTERS)}."
        yield from _number_problems(spec, _FILTERS[spec.name])
    for name, count in Counter(spec.name for spec in filters).items():
        if count > 1:
            yield f"Filter {name} is given {count} times, expected once. Leave one of them out."
    for direction in DIRECTIONS:
        codecs = [spec.name for spec in filters if spec.name in CODECS and spec.numbers[direction]]
        if len(codecs) > 1:
            yield (
                f"Filters {' and '.join(codecs)} both say how the numbers of a {direction} travel. "
                f"Give one of {', '.join(CODECS)} for each of {' and '.join(DIRECTIONS)}."
            )


def _number_problems(spec: FilterSpec, expected: Mapping[str, _Number]) -> Iterator[str]:
    if set(spec.numbers) != set(expected):
        yield f"Filter {spec.name} has the numbers {_listed(spec.numbers)}, expected {_listed(expected)}."
    for name, what in expected.items():
        if not what.accepts(spec.numbers[name]):
            yield f"Filter {spec.name}: {name} is {spec.numbers[name]}, expected {what.words}."
    if spec.name in CODECS and not any(spec.numbers.values()):
        yield f"Filter {spec.name} is for neither pushes nor pulls. Leave it out."
    if spec.name == "kkt" and number(spec, "margin") >= number(spec, "l1"):
        yield f"Filter kkt: margin is {number(spec, 'margin')}, expected less than l1, which is {number(spec, 'l1')}."


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names) or "none"
