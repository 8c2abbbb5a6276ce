"""Filters of row tables: they omit rows from pushes, or make pushes and pulls smaller. Each is plain data.

A push passes them in this order, however they are listed: `KKT` and `Significant` omit rows, `TopK` selects from the
rest, `RandomSkip` draws, and one of `Cast` and `Int8` shortens the numbers. Rows omitted by `Significant` and `TopK`,
and rounding errors of `Cast` and `Int8`, are kept on the worker and added to the next push of the row (error feedback),
so that nothing is lost. On pulls only `Cast` and `Int8` act, without error feedback. `KeyCache` shortens ids in both
directions.

Rows with NaN or infinity are always sent as they are: the table's `nonfinite` decides about them.

Example:
    >>> import paceline
    >>> paceline.filters.TopK(0.1).name
    'top_k'
    >>> declared = (paceline.filters.KeyCache(), paceline.filters.TopK(0.1), paceline.filters.Int8(on="push"))
    >>> paceline.filters.check_filters(declared)
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from paceline.core.calls import checked_late
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


@checked_late
def KeyCache(max_lists: int = 64, max_ids: int = 1 << 22) -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends 16 bytes instead of a list of ids that the server has seen before.

    Useful if batches repeat, once an epoch for example: of ids and numbers of 8 bytes each it saves half. It is
    lossless: a server that no longer has the list requests it.

    Args:
        max_lists: number of lists kept for each worker and server; the least recently used list is dropped first.
        max_ids: number of ids in these lists together, 8 bytes each.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> KeyCache(max_lists=8).numbers["max_lists"]
        8
    """
    return _checked("key_cache", {"max_lists": max_lists, "max_ids": max_ids})


@checked_late
def Cast(dtype: Literal["bfloat16", "float16"], on: On = "both") -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends numbers as "bfloat16" or "float16", 2 bytes each.

    On pushes, rounding errors are added to the next push of the row: a worker keeps up to one row of the table's dtype
    for each row that it ever pushed. "float16" saturates at ±65504; of a push, the rest follows later. For greater
    pulled values, use "bfloat16".

    Args:
        dtype: of the numbers that are sent.
        on: "push", "pull" or "both".

    Raises:
        UsageError: `dtype` or `on` is not one of these.

    Example:
        >>> Cast("bfloat16", on="pull").numbers
        {'push': False, 'pull': True}
    """
    if dtype not in _CASTS:
        raise UsageError(f"Filter Cast: dtype is '{dtype}', expected one of {', '.join(_CASTS)}.")
    return _checked(dtype, _direction("Cast", on))


@checked_late
def Int8(on: On = "both") -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends each number as one byte, and 4 bytes a row for their scale.

    The scale of a row is its greatest magnitude / 127; the error of a number is at most half of that. On pushes, errors
    are added to the next push, as with `Cast`. Rows of a single float32 get longer.

    Args:
        on: "push", "pull" or "both".

    Raises:
        UsageError: `on` is not one of these.

    Example:
        >>> Int8(on="push").numbers
        {'push': True, 'pull': False}
    """
    return _checked("int8", _direction("Int8", on))


@checked_late
def TopK(share: float, max_age: int = 0) -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends the rows of each push with the greatest Euclidean norm; the others are kept back.

    A row that is kept back adds up its pushes until it is sent.

    Args:
        share: of the rows of a push, in (0, 1]; rounded up, so that at least one row is sent.
        max_age: a row kept back for this many clocks is sent with the next push, whatever its norm; 0 means no limit.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> TopK(0.05, max_age=10).numbers
        {'share': 0.05, 'max_age': 10}
    """
    return _checked("top_k", {"share": share, "max_age": max_age})


@checked_late
def Significant(threshold: float, max_age: int = 0) -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends rows with a number of a magnitude above `threshold`; the others are kept back.

    A row that is kept back adds up its pushes until it is significant.

    Args:
        threshold: greater than 0, in the units of what is pushed.
        max_age: a row kept back for this many clocks is sent with the next push, whatever it is; 0 means no limit.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> Significant(1e-3).numbers
        {'threshold': 0.001, 'max_age': 0}
    """
    return _checked("significant", {"threshold": threshold, "max_age": max_age})


@checked_late
def RandomSkip(keep: float, seed: int = 0) -> FilterSpec:  # noqa: N802 - reads like a class
    """Return the filter that sends each row with probability `keep`, divided by `keep`, and drops the others.

    Pushes are right on average, with more noise: a skipped row is not kept back.

    Args:
        keep: in (0, 1].
        seed: of the draws, which also differ between workers.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> RandomSkip(0.5, seed=3).numbers
        {'keep': 0.5, 'seed': 3}
    """
    return _checked("random_skip", {"keep": keep, "seed": seed})


@checked_late
def KKT(l1: float, margin: float = 0.0, reset_every: int = 10) -> FilterSpec:  # noqa: N802 - as in the literature
    """Return the filter for models with an L1 penalty: rows that are zero and would stay zero are not sent.

    A row is dropped if all its values are 0 and each number pushed for it is below `l1 - margin` in magnitude. A worker
    sees only its own share of the gradient, so this may be wrong for a while: every `reset_every` clocks all rows are
    sent. A model has converged only if it still has after such a clock.

    Args:
        l1: the penalty, greater than 0, in the units of what one worker pushes: with `scale="sum"` and 4 workers, a
            quarter of that of the whole objective.
        margin: in [0, l1); a greater margin sends more.
        reset_every: clocks between those that send all rows, 2 or more; clock 0 is the first.

    Raises:
        UsageError: a number is out of its range.

    Example:
        >>> KKT(l1=0.1, margin=0.01).numbers
        {'l1': 0.1, 'margin': 0.01, 'reset_every': 10}
    """
    return _checked("kkt", {"l1": l1, "margin": margin, "reset_every": reset_every})


def _direction(name: str, on: str) -> Hyper:
    if not isinstance(on, str) or on not in _DIRECTIONS:  # pyright: ignore[reportUnnecessaryIsInstance] - not typed
        raise UsageError(f"Filter {name}: on is '{on}', expected one of {', '.join(_DIRECTIONS)}.")
    return dict(_DIRECTIONS[on])


def _checked(name: str, numbers: Hyper) -> FilterSpec:
    spec = FilterSpec(name, numbers)
    check_filters((spec,))
    return spec
