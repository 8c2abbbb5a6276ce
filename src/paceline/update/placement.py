"""Placement of a table: the range of each server, computed equally on every worker and server."""

from __future__ import annotations

from typing import Final

import torch

from paceline.core.partition import Range, partition
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.errors import UsageError
from paceline.update.named_rules import granularity
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import TableSpec

_DTYPES: Final = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def spans(spec: TableSpec, settings: WorkerSettings | ServerSettings) -> tuple[Range, ...]:
    """Return the range of each server, by rank.

    Raises:
        UsageError: the table has fewer parameters (or whole tensors, where its rule needs them) than servers.
    """
    cut = "anywhere" if granularity(spec.rule) == "element" else "between_tensors"
    try:
        lengths = [segment.numel for segment in spec.segments]
        return partition(lengths, settings.num_servers, cut=cut, shares=settings.shares)
    except UsageError as error:
        raise UsageError(f"table '{spec.name}': {error}") from None


def torch_dtype(spec: TableSpec | RowTableSpec) -> torch.dtype:
    """Return the element type of a table."""
    return _DTYPES[spec.dtype]


def as_tensor(body: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat tensor over received memory, without a copy."""
    return torch.frombuffer(body, dtype=dtype) if len(body) else torch.empty(0, dtype=dtype)
