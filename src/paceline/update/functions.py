"""Functions that servers run over their part of a table, and the merging of their results.

`table.call(name, **numbers)` runs a function on each server, over the server's part of the table. `name` is one of the
functions below, or the import path of your own, "package.module:function". Over a dense table the call is::

    function(values, start, **numbers)    values: (elements of the server's range,), a copy; start: index of the first

and over a row table::

    function(rows, **numbers)             rows: a `RowWalk`, which yields pieces and stores changed ones

Both run without autograd. A function may return a dict of small tensors, which the caller receives. A dense table takes
over all changes of `values`.

"summary", "top" and "sample" change nothing; "scale" and "soft_threshold" change values.

Example:
    >>> import paceline
    >>> with paceline.connect() as ps:
    ...     w = ps.table("w", shape=(3,), update=paceline.update.Add(), init=torch.tensor([3.0, 0.0, -4.0]))
    ...     _ = w.call("scale", factor=0.5)
    ...     paceline.functions.total(w.call("summary"))["squares"]
    tensor(6.2500, dtype=torch.float64)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Literal, cast

import torch
from torch import Tensor
from torch.nn.functional import softshrink

from paceline.core.calls import checked, shown
from paceline.errors import UsageError
from paceline.update.dtypes import torch_dtype
from paceline.update.rows.initializers import first_rows
from paceline.update.rows.spec import First
from paceline.update.rows.walk import RowWalk
from paceline.update.user_code import member_at

__all__ = ["Kind", "Tensors", "function_at", "merge", "total"]

Kind = Literal["range", "rows"]
Tensors = dict[str, Tensor]

MAX_RESULT_BYTES = 1 << 26  # of one server
ORDER = "order"  # the tensor by which `merge` sorts
_ELEMENTS = 1 << 18  # of a dense table in one piece


@checked
def function_at(name: str, kind: Kind, allowed: AbstractSet[str] | None) -> Callable[..., object]:
    """Return a function of this module by its name, or one of yours by its import path.

    Args:
        name: "scale" for example, or "package.module:function".
        kind: "range" for dense tables, "rows" for row tables.
        allowed: import paths that may be loaded; None allows all.

    Raises:
        UsageError: the function does not exist, may not be loaded, or is not callable.
    """
    if kind not in ("range", "rows"):
        raise UsageError(f"function_at: kind is {shown(kind)}, expected 'range' or 'rows'.")
    known = _KNOWN[kind]
    if name in known:
        return known[name]
    if ":" not in name:
        raise UsageError(
            f"{shown(name)} names no function. Expected one of {', '.join(sorted(known))}, or the import path of one "
            "of your own: 'package.module:function'."
        )
    found = member_at(name, allowed, "function")
    if not callable(found):
        module_name, _, member = name.partition(":")
        raise UsageError(f"Module {module_name} has no function {member}.")
    return found


# -- results of all servers, merged ----------------------------------------------------------------------------------


def total(parts: Sequence[Mapping[str, Tensor]]) -> Tensors:
    """Return the sum of each tensor over the servers, for example of "summary".

    Example:
        >>> total([{"sum": torch.tensor(1.0)}, {"sum": torch.tensor(2.5)}])
        {'sum': tensor(3.5000)}
    """
    _require_parts(parts, "total")
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


@checked
def merge(parts: Sequence[Mapping[str, Tensor]], k: int) -> Tensors:
    """Return the k results of least "order" from all servers, for example of "top" and "sample".

    The result does not depend on the number of servers.

    Example:
        >>> parts = [{"ids": torch.tensor([i]), "order": torch.tensor([o])} for i, o in ((7, -1.0), (3, -2.0))]
        >>> merge(parts, 1)["ids"]
        tensor([3])
    """
    _require_parts(parts, "merge", ("ids", ORDER))
    if k < 0:
        raise UsageError(f"merge: k is {k}, expected 0 or more.")
    together = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    by_id = torch.argsort(together["ids"])
    first = by_id[torch.argsort(together[ORDER][by_id], stable=True)[:k]]
    return {name: tensor[first] for name, tensor in together.items()}


def _require_parts(parts: Sequence[Mapping[str, Tensor]], taker: str, names: Sequence[str] = ()) -> None:
    """Raise UsageError for what is not the results of servers: one mapping each, of the same tensors."""
    given = cast("object", parts)  # of scripts, which are not typed
    results = cast("Sequence[object]", given if isinstance(given, Sequence) else ())
    tensors = [
        cast("Mapping[object, object]", part).values() if isinstance(part, Mapping) else [part] for part in results
    ]
    if not results or not all(isinstance(tensor, Tensor) for part in tensors for tensor in part):
        raise UsageError(
            f"{taker}: parts is {shown(parts)}, expected what table.call(...) returned, one dict a server."
        )
    first = parts[0]
    for index, part in enumerate(parts):
        lacking = sorted(map(str, {*first, *names}.symmetric_difference(part)))
        if lacking:
            raise UsageError(
                f"{taker}: '{lacking[0]}' is not in every part, such as part {index}: give results of one call."
            )
        for name, found in part.items():
            least = 1 if taker == "merge" else 0
            alike = found.dim() >= least and found.shape[least:] == first[name].shape[least:]
            if not alike or found.dtype != first[name].dtype:
                raise UsageError(
                    f"{taker}: '{name}' is {shown(found)} in part {index} and {shown(first[name])} in part 0: give the "
                    "results of one call."
                )


# -- functions that change nothing -----------------------------------------------------------------------------------


def _summary(values: Tensor) -> Tensors:
    """Return the number of values, the number of non-zero ones, their sum, and the sum of their squares."""
    exact = values.double()
    return {
        "count": torch.tensor(values.numel()),
        "nonzero": values.count_nonzero(),
        "sum": exact.sum(),
        "squares": exact.square().sum(),
    }


def _summary_of_range(values: Tensor, start: int) -> Tensors:
    del start
    return _summary(values)


def _summary_of_rows(rows: RowWalk) -> Tensors:
    parts = [_summary(piece.values) for piece in rows.pieces()]
    return {"rows": torch.tensor(len(rows)), **total([_summary(torch.empty(0)), *parts])}


def _top_of_range(values: Tensor, start: int, *, k: int) -> Tensors:
    """Return the k elements of largest absolute value, with their positions in the flat table as "ids"."""
    return _first_elements(values, start, k, lambda _, part: part.double().abs().neg())


def _top_of_rows(rows: RowWalk, *, k: int) -> Tensors:
    """Return the k rows of largest norm."""
    parts = ((ids, values, values.double().norm(dim=1).neg()) for ids, values in _rows(rows))
    return _first_rows(rows, parts, k)


def _sample_of_range(values: Tensor, start: int, *, k: int, seed: int = 0) -> Tensors:
    """Return k random elements, with their positions in the flat table as "ids"."""
    return _first_elements(values, start, k, lambda places, _: _chance(places, seed))


def _sample_of_rows(rows: RowWalk, *, k: int, seed: int = 0) -> Tensors:
    """Return k random rows."""
    return _first_rows(rows, ((ids, values, _chance(ids, seed)) for ids, values in _rows(rows)), k)


def _chance(ids: Tensor, seed: int) -> Tensor:
    """Return a pseudorandom number for each id. The ids of the k least are a random sample, for any sharding."""
    return first_rows(First("uniform", 1.0, seed), ids, 1, torch.float64).view(-1)


def _first_elements(values: Tensor, start: int, k: int, order: Callable[[Tensor, Tensor], Tensor]) -> Tensors:
    """Return the k elements of least `order(positions, values)`."""
    none = {"ids": torch.empty(0, dtype=torch.int64), "values": values[:0], ORDER: torch.empty(0, dtype=torch.float64)}

    def parts() -> Iterator[Tensors]:
        for first in range(0, values.numel(), _ELEMENTS):
            part = values[first : first + _ELEMENTS]
            places = torch.arange(start + first, start + first + part.numel())
            yield {"ids": places, "values": part, ORDER: order(places, part)}

    return _first(none, parts(), k, values.numel())


def _rows(rows: RowWalk) -> Iterator[tuple[Tensor, Tensor]]:
    return ((piece.ids, piece.values) for piece in rows.pieces())


def _first_rows(rows: RowWalk, parts: Iterator[tuple[Tensor, Tensor, Tensor]], k: int) -> Tensors:
    """Return the k rows of least order, with memory for those and one piece."""
    dtype = torch_dtype(rows.spec.dtype)
    none: Tensors = {
        "ids": torch.empty(0, dtype=torch.int64),
        "values": torch.empty((0, rows.spec.width), dtype=dtype),
        ORDER: torch.empty(0, dtype=torch.float64),
    }
    named = ({"ids": ids, "values": values, ORDER: order} for ids, values, order in parts)
    return _first(none, named, k, len(rows))


def _first(none: Tensors, parts: Iterable[Tensors], k: int, num: int) -> Tensors:
    """Return the first k of `num` results; they are sorted each time that their number has doubled."""
    each_bytes = sum(tensor.element_size() * math.prod(tensor.shape[1:]) for tensor in none.values())
    most = MAX_RESULT_BYTES // each_bytes
    if k < 0:
        raise UsageError(f"k is {k}, expected 0 or more.")
    if min(k, num) > most:
        raise UsageError(f"k is {k}, expected at most {most}: a server returns no more than {MAX_RESULT_BYTES} bytes.")
    found, num_found = [none], 0
    for part in parts:
        found.append(part)
        num_found += len(part["ids"])
        if num_found > 2 * k + _ELEMENTS:
            found = [merge(found, k)]
            num_found = len(found[0]["ids"])
    return merge(found, k)


# -- functions that change values ------------------------------------------------------------------------------------


def _scale_range(values: Tensor, start: int, *, factor: float) -> None:
    """Multiply the values, for example for weight decay."""
    del start
    values.mul_(factor)


def _scale_rows(rows: RowWalk, *, factor: float) -> None:
    _change_rows(rows, lambda values: values * factor)


def _threshold_range(values: Tensor, start: int, *, threshold: float) -> None:
    """Move every value by `threshold` towards 0, at most to 0."""
    del start
    values.copy_(_shrunk(values, threshold))


def _threshold_rows(rows: RowWalk, *, threshold: float) -> None:
    _change_rows(rows, lambda values: _shrunk(values, threshold))


def _shrunk(values: Tensor, threshold: float) -> Tensor:
    if not threshold >= 0:
        raise UsageError(f"threshold is {threshold}, expected 0 or more.")
    return softshrink(values, threshold).add_(0.0)  # never -0


def _change_rows(rows: RowWalk, change: Callable[[Tensor], Tensor]) -> None:
    if rows.spec.rule.name == "ftrl":
        raise UsageError(
            "FTRL computes its values from its state, with each push: they cannot be changed by themselves."
        )
    for piece in rows.pieces():
        piece.values.copy_(change(piece.values))
        rows.put(piece)


_KNOWN: dict[Kind, dict[str, Callable[..., object]]] = {
    "range": {
        "summary": _summary_of_range,
        "top": _top_of_range,
        "sample": _sample_of_range,
        "scale": _scale_range,
        "soft_threshold": _threshold_range,
    },
    "rows": {
        "summary": _summary_of_rows,
        "top": _top_of_rows,
        "sample": _sample_of_rows,
        "scale": _scale_rows,
        "soft_threshold": _threshold_rows,
    },
}
