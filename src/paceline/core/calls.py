"""Checks of the calls that scripts make: what does not fit is a `UsageError` that says what was given and expected."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from math import prod
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar, cast

from paceline.errors import PacelineError, UsageError

P = ParamSpec("P")
R = TypeVar("R")

MOST_SHOWN: Final = 60
_MOST_LISTED: Final = 3  # names in a message
_LONGEST_PATH: Final = 4096  # characters


class WrongCall(UsageError, TypeError):
    """A call with an argument too many, too few, or of another type. Also a `TypeError`, as Python raises."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Have calls of a public function raise WrongCall where arguments are missing, unknown or of the wrong type.

    The type is checked of parameters that are declared as numbers, texts, paths, bytes, or True and False.

    >>> @checked
    ... def scaled(value: float, *, times: int | None = 1) -> float: return value * times
    >>> scaled(2.0, times="3")
    Traceback (most recent call last):
    paceline.core.calls.WrongCall: scaled: times is '3', expected a whole number or None.
    >>> scaled()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    paceline.core.calls.WrongCall: scaled() missing ... argument: 'value'; expected scaled(value, *, times=1).
    """
    problem, binding, wrong = _problem_finder(function), _binding_problem, WrongCall

    def call(*args: Any, **given: Any) -> Any:  # noqa: ANN401 - whatever the function takes
        found = problem(args, given)
        if found:
            raise wrong(found)
        try:
            return function(*args, **given)
        except TypeError as error:
            found = binding(function, error)
            if not found:
                raise
        raise wrong(found)

    return _in_the_place_of(function, call)


def checked_late(function: Callable[P, R]) -> Callable[P, R]:
    """Do as `checked`, but look at types only when the call has failed: for functions that training calls all the time.

    >>> @checked_late
    ... def scaled(value: float, *, times: int | None = 1) -> float: return value * times
    >>> scaled(2.0, times="3")
    Traceback (most recent call last):
    paceline.core.calls.WrongCall: scaled: times is '3', expected a whole number or None.
    """
    problem, binding, wrong, ours = _problem_finder(function), _binding_problem, WrongCall, PacelineError

    def call(*args: Any, **given: Any) -> Any:  # noqa: ANN401 - whatever the function takes
        try:
            return function(*args, **given)
        except Exception as error:
            found = "" if isinstance(error, ours) else binding(function, error) or problem(args, given)
            if not found:
                raise
        raise wrong(found)

    return _in_the_place_of(function, call)


def _in_the_place_of(function: Callable[P, R], call: FunctionType | Callable[..., object]) -> Callable[P, R]:
    """Return a wrapper with the names and the globals of its function, by which doctest finds what a module defines."""
    call = cast("FunctionType", call)
    made = FunctionType(call.__code__, function.__globals__, function.__name__, None, call.__closure__)
    return cast("Callable[P, R]", update_wrapper(made, function))


def _problem_finder(function: Callable[..., object]) -> Callable[[tuple[object, ...], Mapping[str, object]], str]:
    """Return a function that says what is wrong with the types of arguments, "" if nothing is."""
    declared = inspect.signature(function).parameters.values()
    checks = {each.name: _check(str(each.annotation)) for each in declared if each.kind not in _GATHERING}
    names = tuple(each.name for each in declared if each.kind in _BY_POSITION)

    def problem(args: tuple[object, ...], given: Mapping[str, object]) -> str:
        for name, value in (*zip(names, args, strict=False), *given.items()):
            check = checks.get(name)
            if check is not None and not check(value):
                return _problem(function, name, value)
        return ""

    return problem


def _binding_problem(function: Callable[..., object], error: BaseException) -> str:
    """Return what is wrong with a call that Python itself refused, "" for an error from inside of the function."""
    place = error.__traceback__
    if not isinstance(error, TypeError) or place is None or place.tb_next is not None:
        return ""
    return f"{error}; expected {_usage(function)}."


_BY_POSITION: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_GATHERING: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _is_one(value: object) -> bool:
    try:
        return prod(getattr(value, "shape", ())) == 1
    except RuntimeError:  # of torch: a nested tensor, or a parameter whose shape is not known yet
        return False


def _is_whole(value: object) -> bool:
    is_float = getattr(value, "is_floating_point", None)  # tensors of one element have __index__, whatever they hold
    return hasattr(type(value), "__index__") and _is_one(value) and not (is_float is not None and is_float())


def _is_real(value: object) -> bool:
    if isinstance(value, int):  # which may be beyond what a float holds
        return abs(value) <= sys.float_info.max
    return (hasattr(type(value), "__float__") or _is_whole(value)) and _is_one(value)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool) or (_is_whole(value) and value in (0, 1)) or type(value).__name__ == "bool"


def is_path(value: object) -> bool:
    """Return whether a value can name a file, whether or not there is one."""
    if not isinstance(value, str):
        return hasattr(type(value), "__fspath__")
    try:
        value.encode(errors="surrogateescape")  # as names of files that are no text are decoded
    except UnicodeEncodeError:
        return False
    return "\0" not in value and 0 < len(value) < _LONGEST_PATH


_KINDS: Final[dict[str, tuple[Callable[[object], bool], str]]] = {
    "int": (_is_whole, "a whole number"),
    "float": (_is_real, "a number"),
    "bool": (_is_flag, "True or False"),
    "Tensor": (lambda value: hasattr(value, "untyped_storage"), "a tensor"),
    "str": (lambda value: isinstance(value, str), "a text"),
    "bytes": (lambda value: isinstance(value, bytes), "bytes"),
    "Path": (is_path, "a path"),
    "PathLike": (is_path, "a path"),
    "None": (lambda value: value is None, "None"),
}


def _check(annotation: str) -> Callable[[object], bool] | None:
    """Return whether a value is of the declared type, as a function; None for types that are not checked here."""
    names = annotation.split(" | ")
    kinds = [_KINDS.get(name) for name in names if not (name == "str" and "Path" in names)]  # a path may be a text
    found = [kind[0] for kind in kinds if kind is not None]
    return None if len(found) < len(kinds) else lambda value: any(fits(value) for fits in found)


def _problem(function: Callable[..., object], name: str, value: object) -> str:
    kinds = str(inspect.signature(function).parameters[name].annotation).split(" | ")
    expected = " or ".join(_KINDS[kind][1] for kind in kinds)
    return f"{function.__qualname__.removesuffix('.__init__')}: {name} is {shown(value)}, expected {expected}."


def listed(names: Sequence[str]) -> str:
    """Return a few names, for messages.

    >>> listed(["a", "b", "c", "d", "e"])
    "'a', 'b', 'c' and 2 others"
    """
    first = ", ".join(f"'{name}'" for name in names[:_MOST_LISTED])
    return f"{first} and {len(names) - _MOST_LISTED} others" if len(names) > _MOST_LISTED else first


def shortened(text: str) -> str:
    """Return a text cut to 60 characters."""
    return text if len(text) <= MOST_SHOWN else f"{text[: MOST_SHOWN - 4]}..."


def shown(value: object) -> str:
    """Return a short description of any value, for messages.

    >>> shown("x" * 100)
    "'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx..."
    """
    if isinstance(value, type):  # of which a `shape` is that of its objects
        return f"the class {value.__name__}"
    try:
        shape = getattr(value, "shape", None)
    except RuntimeError:  # as above
        return f"a {type(value).__name__} without a shape"
    if shape is not None:
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    return shortened(repr(value[: 2 * MOST_SHOWN] if isinstance(value, str | bytes) else value))


def _usage(function: Callable[..., object]) -> str:
    """Return how a function is called, without types."""
    plain = [
        each.replace(annotation=inspect.Parameter.empty)
        for each in inspect.signature(function).parameters.values()
        if each.name != "self"
    ]
    return f"{function.__name__}{inspect.Signature(plain)}"
