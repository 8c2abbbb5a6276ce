"""Functions over a server's whole part of a table: run them, check what they changed, and encode what they return."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import cast

import torch
from safetensors.torch import save
from torch import Tensor

from paceline.errors import PacelineError, UsageError
from paceline.server.memory_check import require_memory
from paceline.server.served_table import TableHost
from paceline.update.functions import MAX_RESULT_BYTES, function_at
from paceline.update.rows.store import RowStore
from paceline.update.rows.walk import RowWalk
from paceline.update.shard import Shard
from paceline.update.summing import num_nonfinite
from paceline.wire.requests import COUNT_BYTES, CallFunction


def call_over_range(request: CallFunction, shard: Shard, host: TableHost) -> memoryview:
    """Run a function over the values of a shard; return the body of the answer. Raises UsageError if it fails."""
    with _named(request, host):
        function = function_at(request.name, "range", host.allowed_paths)
        if not shard.initialised:
            raise UsageError("the table has no values yet")
        require_memory(f"a copy of table '{shard.spec.name}'", shard.values.nbytes)
        values = shard.values.clone()
        result = _packed_result(function(values, shard.span.start, **request.numbers))
        num_changed = _num_changed(shard, values)
        if num_changed:
            shard.store(values)
            host.note_changed(shard.spec.name)
        return _answer(num_changed, result)


def call_over_rows(
    request: CallFunction, store: RowStore, clock: int, host: TableHost, mark_changed: Callable[[Tensor], None]
) -> memoryview:
    """Run a function over all rows here; return the body of the answer.

    Raises:
        UsageError: it fails; rows that it had changed before stay so.
    """
    with _named(request, host):
        function = function_at(request.name, "rows", host.allowed_paths)
        walk = RowWalk(store, clock, mark_changed)
        try:
            result = _packed_result(function(walk, **request.numbers))
        except BaseException as error:
            if not walk.num_changed:
                raise
            raise UsageError(
                f"{_story(error)}; {walk.num_changed} rows had been changed before, and stay so"
            ) from error
        finally:
            if walk.num_changed:
                host.note_changed(store.spec.name)
        return _answer(walk.num_changed, result)


@contextmanager
def _named(request: CallFunction, host: TableHost) -> Generator[None]:
    """Turn any error into one that names the function; a user's function may raise anything, and the server goes on."""
    try:
        with torch.no_grad():
            yield
    except BaseException as error:
        where = f"function {request.name} over table '{request.table_call.table}' on {host.name}"
        raise UsageError(f"{where} failed: {_story(error)}") from error


def _num_changed(shard: Shard, values: Tensor) -> int:
    """Return how many values a function has changed; raises UsageError if they do not fit the table."""
    if values.shape != shard.values.shape or values.dtype != shard.values.dtype:
        raise UsageError(
            f"its values are {tuple(values.shape)} {values.dtype} now, expected {tuple(shard.values.shape)} "
            f"{shard.values.dtype}: change them in place"
        )
    item = values.element_size()
    differs = (values.view(torch.uint8) != shard.values.view(torch.uint8)).view(-1, item).any(1)
    num_changed = int(differs.sum())
    num_bad = num_nonfinite(values) if num_changed else 0
    if num_bad and shard.spec.nonfinite != "ignore":
        raise UsageError(f"{num_bad} of its {values.numel()} new values are NaN or infinite")
    return num_changed


def _packed_result(result: object) -> bytes:
    """Encode the tensors that a function returned; raises UsageError for other objects, or too many bytes."""
    found: object = {} if result is None else result
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor)
        for name, tensor in cast("dict[object, object]", found).items()
    ):
        raise UsageError(f"it returned {type(result).__name__}, expected a dict of tensors by name, or None")
    tensors = {
        name: tensor.detach().cpu().contiguous().clone() for name, tensor in cast("dict[str, Tensor]", found).items()
    }
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if size_bytes > MAX_RESULT_BYTES:
        raise UsageError(f"it returned {size_bytes} bytes, expected at most {MAX_RESULT_BYTES}: return less, or export")
    return save(tensors)


def _answer(num_changed: int, result: bytes) -> memoryview:
    return memoryview(num_changed.to_bytes(COUNT_BYTES, "little") + result)


def _story(error: BaseException) -> str:
    """Return what went wrong and, for errors from user code, where."""
    if isinstance(error, PacelineError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].name}, line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
