"""Named tensors on the servers: the first push to a name creates the tensor, without a declaration."""

from __future__ import annotations

import math
from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.update.dtypes import dtype_name
from paceline.update.named_rules import Add
from paceline.update.table import TABLE_DTYPES, DType, Segment, TableSpec, decode_table, shown_name
from paceline.wire.malformed import read_answer_of
from paceline.wire.requests import NAMED, Describe
from paceline.worker.pushes import PushOutcome, pending_future
from paceline.worker.table import Table
from paceline.worker.table_opener import TableOpener


class _Tensor(msgspec.Struct, frozen=True):
    """A tensor stored flat in a table, which may have more elements."""

    table: Table
    shape: tuple[int, ...]

    def push(self, tensor: Tensor) -> Future[PushOutcome]:
        flat = tensor.detach().reshape(-1)
        return self.table.push(torch.nn.functional.pad(flat, (0, self.table.spec.numel - flat.numel())))

    def cut(self, values: Tensor) -> Tensor:
        return values[: math.prod(self.shape)].view(self.shape)


@dataclass(slots=True)
class NamedTensors:
    """The named tensors of one worker. A read contains every push that was acknowledged before it started."""

    opening: TableOpener
    _tensors: dict[str, _Tensor] = field(default_factory=dict[str, _Tensor])

    def push(self, name: str, tensor: Tensor) -> Future[PushOutcome]:
        """Add a tensor to the one of this name; blocks to create it if needed, and while two pushes are in flight.

        Raises:
            UsageError: the tensor is of another shape or dtype than the first, sparse, of whole numbers, or not finite.
        """
        dtype = dtype_name(tensor.dtype)
        is_dense = tensor.layout == torch.strided and not tensor.is_nested
        if dtype not in TABLE_DTYPES or not is_dense:
            kind = f"a tensor of {dtype}" if is_dense else "a nested tensor" if tensor.is_nested else "a sparse tensor"
            raise UsageError(
                f"push to '{name}' got {kind}, expected a dense one of {', '.join(TABLE_DTYPES)}: use .double() for "
                "counts, and a table with rows=... for what is sparse."
            )
        shape = tuple(tensor.shape)
        found = self._tensors.get(name) or self._open(name, self._spec(name, shape, dtype))
        if (found.shape, found.table.spec.dtype) != (shape, dtype):
            raise UsageError(
                f"push to '{name}' got {dtype} {shape}, expected {found.table.spec.dtype} {found.shape} as it was "
                f"made; worker {self.opening.rank}"
            )
        return found.push(tensor)

    def pull(self, name: str) -> Tensor:
        """Return the tensor of this name; blocks until it exists and its values have arrived."""
        found = self._opened(name)
        return found.cut(found.table.pull())

    def pull_later(self, name: str) -> Future[Tensor]:
        """Request the tensor of this name; blocks until it exists, but not for its values."""
        found = self._opened(name)
        result = pending_future(Tensor)

        def finish(done: Future[Tensor]) -> None:
            error = done.exception()
            if error is None:
                result.set_result(found.cut(done.result()))
            else:
                result.set_exception(error)

        found.table.pull_later().add_done_callback(finish)
        return result

    def _opened(self, name: str) -> _Tensor:
        return self._tensors.get(name) or self._open(name, self._described(name))

    def _open(self, name: str, spec: TableSpec) -> _Tensor:
        self._tensors[name] = _Tensor(self.opening.open_shared(spec, (spec.numel,)), spec.segments[0].shape)
        return self._tensors[name]

    def _described(self, name: str) -> TableSpec:
        if not name.isprintable():  # no push can make it
            raise UsageError(f"pull of {shown_name(name)}, which has characters that cannot be printed.")
        rpc = self.opening.node.rpc
        told = rpc.call(0, lambda number: Describe(number, NAMED + name), f"the first push to '{name}'")
        return read_answer_of(0, f"the settings of '{name}'", decode_table, told)

    def _spec(self, name: str, shape: tuple[int, ...], dtype: DType) -> TableSpec:
        tensor = Segment(NAMED + name, shape)
        lacking = self.opening.node.num_servers - tensor.numel  # each server holds one element at least
        segments = (tensor, Segment("padding", (lacking,))) if lacking > 0 else (tensor,)
        return TableSpec(NAMED + name, segments, dtype, Add(), "asynchronous", "sum", "halt")
