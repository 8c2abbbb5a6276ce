"""Layout of rows in the body of a frame: the ids if they are sent, then encoded rows, then echoes.

An echo is a column of the rule's state that readers are sent with the values and send back with their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from paceline.errors import PeerError
from paceline.transport.base import EMPTY
from paceline.update.dtypes import torch_dtype
from paceline.update.filters.encoding import RowEncoding, codec_of
from paceline.update.rows.rules import RowRule
from paceline.update.rows.spec import RowTableSpec

ID_BYTES = 8


class RowBody(msgspec.Struct, frozen=True):
    """A decoded body: the ids if they were sent, rows (n, width) and echoes (n, echo width)."""

    ids: Tensor | None
    rows: Tensor
    echo: Tensor | None

    @property
    def together(self) -> Tensor:
        """Rows and echoes side by side: (n, width + echo width)."""
        return self.rows if self.echo is None else torch.cat([self.rows, self.echo], dim=1)


@dataclass(slots=True)
class RowBodyLayout:
    """The layout of one table's rows in one direction."""

    codec: RowEncoding
    width: int
    dtype: torch.dtype
    echo_width: int = 0
    full_width: int = field(init=False)  # numbers of a row and its echo
    encoded_bytes: int = field(init=False)  # of a row without its echo
    row_bytes: int = field(init=False)  # of a row, without its id

    def __post_init__(self) -> None:
        """Compute the sizes, which every step asks for."""
        self.full_width = self.width + self.echo_width
        self.encoded_bytes = self.codec.row_bytes(self.width, self.dtype)
        self.row_bytes = self.encoded_bytes + self.echo_width * self.dtype.itemsize

    def num_rows(self, size_bytes: int) -> int:
        """Return how many rows with their ids a body of this size has."""
        return size_bytes // (ID_BYTES + self.row_bytes)

    def pack(self, ids: Tensor | None, encoded: Tensor, echo: Tensor | None = None) -> memoryview:
        """Return a body; `encoded` is what the codec made of the rows."""
        parts = [_as_bytes(part) for part in (ids, encoded, echo) if part is not None]
        return parts[0].data if len(parts) == 1 else np.concatenate(parts).data

    def pack_rows(self, ids: Tensor | None, rows: Tensor) -> memoryview:
        """Return a body of rows that have their echoes beside them, as a store reads them: (n, width + echo width)."""
        if not self.echo_width:
            return self.pack(ids, self.codec.encode(rows))
        values, echo = rows[:, : self.width], rows[:, self.width :]
        return self.pack(ids, self.codec.encode(values.contiguous()), echo.contiguous())

    def unpack(self, body: memoryview, num: int, *, with_ids: bool) -> RowBody:
        """Read a body of `num` rows; the tensors may be views of it.

        Raises:
            PeerError: the body has another size.
        """
        expected = num * (self.row_bytes + ID_BYTES * with_ids)
        if num < 0 or len(body) != expected:
            raise PeerError(f"{num} rows came in {len(body)} bytes, expected {expected}")
        start = num * ID_BYTES * with_ids
        middle = start + num * self.encoded_bytes
        ids = ids_of(body[:start]) if with_ids else None
        data = _from_bytes(body[start:middle], torch.uint8).view(num, self.encoded_bytes)
        rows = self.codec.decode(data, self.width, self.dtype)
        echo = _from_bytes(body[middle:], self.dtype).view(num, self.echo_width) if self.echo_width else None
        return RowBody(ids, rows, echo)


def ids_of(body: memoryview) -> Tensor:
    """Return the ids that a body consists of.

    Raises:
        PeerError: its size is not that of whole ids.
    """
    if len(body) % ID_BYTES:
        raise PeerError(f"ids came in {len(body)} bytes, expected a multiple of {ID_BYTES}")
    return _from_bytes(body, torch.int64)


def ids_body(ids: Tensor) -> memoryview:
    """Return a body of ids alone."""
    return _as_bytes(ids).data


def changes_body(changes: Sequence[tuple[Tensor, Tensor, Tensor]]) -> memoryview:
    """Return a body of changes of rows: the ids, (n,), values, (n, width), and removed ids, (m,), of each."""
    parts = [_as_bytes(part) for change in changes for part in change]
    return np.concatenate(parts).data if parts else EMPTY


def changes_of(
    body: memoryview, nums: Sequence[tuple[int, int]], width: int, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Read a body of changes, each with its number of rows and of removed ids; the tensors may be views of it.

    Raises:
        PeerError: the body has another size.
    """
    value_bytes = width * dtype.itemsize
    expected = sum(num * (ID_BYTES + value_bytes) + num_removed * ID_BYTES for num, num_removed in nums)
    if len(body) != expected:
        raise PeerError(f"changes of {len(nums)} updates came in {len(body)} bytes, expected {expected}")
    found, at = list[tuple[Tensor, Tensor, Tensor]](), 0
    for num, num_removed in nums:
        ends = [at + ID_BYTES * num, at + (ID_BYTES + value_bytes) * num]
        ids, values = body[at : ends[0]], body[ends[0] : ends[1]]
        at = ends[1] + ID_BYTES * num_removed
        found.append((ids_of(ids), _from_bytes(values, dtype).view(num, width), ids_of(body[ends[1] : at])))
    return found


def _as_bytes(part: Tensor) -> npt.NDArray[np.uint8]:
    if part.dtype is torch.bfloat16:  # which numpy does not have
        part = part.contiguous().view(-1).view(torch.uint8)
    # Calls of numpy keep the interpreter's lock: other threads that run do not come between each two of them.
    return part.contiguous().numpy().reshape(-1).view(np.uint8)


def _from_bytes(body: memoryview, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor over memory that may not be aligned for its type."""
    if not len(body):
        return torch.empty(0, dtype=dtype)
    numbers = torch.frombuffer(body, dtype=dtype)
    aligned = numbers.data_ptr() % dtype.itemsize == 0
    return numbers if aligned else torch.frombuffer(body, dtype=torch.uint8).clone().view(dtype)


def body_layouts(spec: RowTableSpec, rule: RowRule) -> tuple[RowBodyLayout, RowBodyLayout]:
    """Return the layouts of a table's rows in pushes and in the frames of servers."""
    dtype = torch_dtype(spec.dtype)
    widths = {column.name: column.width or spec.width for column in rule.columns}
    echo_width = widths[rule.echo] if rule.echo else 0
    up = RowBodyLayout(codec_of(spec.filters, "push"), spec.width, dtype, echo_width)
    down = RowBodyLayout(codec_of(spec.filters, "pull"), spec.width, dtype, echo_width)
    return up, down
