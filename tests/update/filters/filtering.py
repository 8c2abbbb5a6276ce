"""Pushes, and a sum by id of what became of them, that the tests of this part share."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.update.filters import FilterSpec
from paceline.update.filters.pipeline import FilterPipeline, Kept
from paceline.update.rows.ops import row_ops


def pipeline_of(
    *filters: FilterSpec, width: int = 2, dtype: torch.dtype = torch.float64, worker: int = 0
) -> FilterPipeline:
    return FilterPipeline(filters, width, dtype, row_ops("torch"), worker)


def kept(pipeline: FilterPipeline) -> Kept:
    """Copies of the rows that are kept back, ids ascending."""
    return pipeline._error_feedback.read_all()


def num_kept(pipeline: FilterPipeline) -> int:
    """How many rows are kept back."""
    return len(kept(pipeline).ids)


def rest(pipeline: FilterPipeline) -> tuple[Tensor, Tensor]:
    """What is kept back: ids ascending, rows."""
    ids, rows, _ = kept(pipeline)
    return ids, rows


class Account:
    """Adds rows up by id, in the order given."""

    def __init__(self) -> None:
        self.sums: dict[int, Tensor] = defaultdict(lambda: torch.zeros(()))

    def add(self, ids: Tensor, rows: Tensor) -> None:
        for key, row in zip(ids.tolist(), rows, strict=True):
            self.sums[key] = self.sums[key] + row

    def add_all(self, other: "Account") -> None:
        for key, total in other.sums.items():
            self.sums[key] = self.sums[key] + total

    def agrees_with(self, other: "Account", tolerance: float = 0.0) -> bool:
        keys = self.sums.keys() | other.sums.keys()
        return all(((self.sums[key] - other.sums[key]).abs() <= tolerance).all() for key in keys)


def kept_in(pipeline: FilterPipeline) -> Account:
    """What the sieve keeps back now; it stays there."""
    account = Account()
    account.add(*rest(pipeline))
    return account


def row(*numbers: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([numbers], dtype=dtype)


def one(key: int) -> Tensor:
    return torch.tensor([key])


def pushed(
    pipeline: FilterPipeline, clock: int, rows: dict[int, Sequence[float]], dtype: torch.dtype = torch.float64
) -> dict:
    """Sift rows by id, and return by id what is sent."""
    filtered = pipeline.sift(torch.tensor(list(rows)), torch.tensor(list(rows.values()), dtype=dtype), clock)
    return dict(zip(filtered.ids.tolist(), filtered.decoded.tolist(), strict=True))
