"""Filters of row tables: they leave rows out of pushes, or make pushes and pulls smaller. Each is plain data.

A push goes through them in this order, however they are listed: `KKT` and `Significant` leave rows out, `TopK` picks
among what is left, `RandomSkip` draws, and one of `Cast` and `Int8` makes the numbers smaller. What is left out or
rounded off by `Significant`, `TopK`, `Cast` and `Int8` is kept back on the worker and added to the next push of its
row, so that nothing is lost. Pulls know `Cast` and `Int8` alone; what these round off there is not kept. `KeyCache`
makes ids smaller in both directions.

Rows with NaN or infinity are sent as they are, whatever the filters say: the table decides about them.

Example:
    >>> import paceline
    >>> paceline.filters.TopK(0.1).name
    'top_k'
    >>> declared = (paceline.filters.KeyCache(), paceline.filters.TopK(0.1), paceline.filters.Int8(on="push"))
    >>> paceline.filters.check_filters(declared)
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from paceline.errors import UsageError
from paceline.update.filters.check import check_filters
from paceline.update.rows.spec import FilterSpec
from paceline.update.rules import Hyper

__all__ = [
    "KKT",
    "Cast",
    "FilterSpec",
    "Int8",
    "KeyCache",
    "On",
    "RandomSkip",
    "Significant",
    "TopK",
    "check_filters",
]

On: TypeAlias = Literal["push", "pull", "both"]

_DIRECTIONS: dict[str, Hyper] = {
    "push": {"push": True, "pull": False},
    "pull": {"push": False, "pull": True},
    "both": {"push": True, "pull": True},
}
_CASTS = ("bfloat16", "float16")


def KeyCache(max_lists: int = 64, max_ids: int = 1 << 22) -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends 16 bytes instead of a list of ids that the server has seen before.

    Worth it where the same batch comes again, once an epoch for example: of ids and numbers of 8 bytes each it saves
    half. It loses nothing: a server that no longer has the list asks for it.

    Args:
        max_lists: how many lists are remembered for each worker and server; the least recently used one goes first.
        max_ids: how many ids these lists have together, 8 bytes each.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> KeyCache(max_lists=8).numbers["max_lists"]
        8
    """
    return _checked("key_cache", {"max_lists": max_lists, "max_ids": max_ids})


def Cast(dtype: Literal["bfloat16", "float16"], on: On = "both") -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends numbers as "bfloat16" or "float16", 2 bytes each.

    On pushes, what is rounded off is kept back and added to the next push of its row: a worker keeps up to one row of
    the table's dtype for each row that it ever pushed. "float16" ends at ±65504: greater numbers are sent as that, and
    of a push the rest follows; for pulled values so great, take "bfloat16".

    Args:
        dtype: how numbers travel.
        on: "push", "pull" or "both".

    Raises:
        UsageError: `dtype` or `on` is none of those.

    Example:
        >>> Cast("bfloat16", on="pull").numbers
        {'push': False, 'pull': True}
    """
    if dtype not in _CASTS:
        raise UsageError(f"Filter Cast: dtype is '{dtype}', expected one of {', '.join(_CASTS)}.")
    return _checked(dtype, _direction("Cast", on))


def Int8(on: On = "both") -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends each number as one byte, and 4 bytes a row for their scale.

    The scale of a row is its greatest magnitude / 127, and each number is off by half of that at most. On pushes, what
    is rounded off is kept back as with `Cast`. Rows of a single float32 get longer by it.

    Args:
        on: "push", "pull" or "both".

    Raises:
        UsageError: `on` is none of those.

    Example:
        >>> Int8(on="push").numbers
        {'push': True, 'pull': False}
    """
    return _checked("int8", _direction("Int8", on))


def TopK(share: float, max_age: int = 0) -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends the rows of each push with the greatest Euclidean norm; the others are kept back.

    A row that is kept back grows with each push of it, until it is among them.

    Args:
        share: of the rows of a push, in (0, 1]; rounded up, so that one row is sent at least.
        max_age: a row that was kept back so many clocks goes with the next push, whatever its norm; 0 is no limit.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> TopK(0.05, max_age=10).numbers
        {'share': 0.05, 'max_age': 10}
    """
    return _checked("top_k", {"share": share, "max_age": max_age})


def Significant(threshold: float, max_age: int = 0) -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends rows with a number of a magnitude above `threshold`; the others are kept back.

    A row that is kept back grows with each push of it, until it is significant.

    Args:
        threshold: greater than 0, in the units of what is pushed.
        max_age: a row that was kept back so many clocks goes with the next push, whatever it is; 0 is no limit.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> Significant(1e-3).numbers
        {'threshold': 0.001, 'max_age': 0}
    """
    return _checked("significant", {"threshold": threshold, "max_age": max_age})


def RandomSkip(keep: float, seed: int = 0) -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends each row with probability `keep`, divided by it, and forgets the others.

    What arrives is right on average, with more noise: a row that is skipped is gone and not kept back.

    Args:
        keep: in (0, 1].
        seed: what makes one run differ from another; workers differ by themselves.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> RandomSkip(0.5, seed=3).numbers
        {'keep': 0.5, 'seed': 3}
    """
    return _checked("random_skip", {"keep": keep, "seed": seed})


def KKT(l1: float, margin: float = 0.0, reset_every: int = 10) -> FilterSpec:  # noqa: N802 - as in the literature
    """Return the filter for models with an L1 penalty: rows that are zero and would stay so are not sent.

    A row is left out and forgotten if all its values are 0 and each number pushed for it is below `l1 - margin` in
    magnitude. As a worker sees only its own share of the gradient, that may be wrong for a while: every `reset_every`
    clocks everything is sent. A model has converged only if it still has after such a clock.

    Args:
        l1: the penalty, greater than 0, in the units of what one worker pushes: with `scale="sum"` and 4 workers, a
            quarter of that of the whole objective.
        margin: in [0, l1), the greater the more is sent.
        reset_every: clocks from one that sends everything to the next, 2 or more; clock 0 is the first such.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> KKT(l1=0.1, margin=0.01).numbers
        {'l1': 0.1, 'margin': 0.01, 'reset_every': 10}
    """
    return _checked("kkt", {"l1": l1, "margin": margin, "reset_every": reset_every})


def _direction(name: str, on: str) -> Hyper:
    if on not in _DIRECTIONS:
        raise UsageError(f"Filter {name}: on is '{on}', expected one of {', '.join(_DIRECTIONS)}.")
    return dict(_DIRECTIONS[on])


def _checked(name: str, numbers: Hyper) -> FilterSpec:
    spec = FilterSpec(name, numbers)
    check_filters((spec,))
    return spec
