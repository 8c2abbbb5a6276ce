"""Which batch is wanted, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Ask:
    """Which batch is wanted: the samples with these indices, in this order, as they are in this epoch."""

    epoch: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Batch:
    """What a loop gets.

    Args:
        content: tensors, lists of str and lists of bytes, in lists and dicts as torch's `default_collate` makes them;
            None where no record was left.
        num_samples: in it; fewer than were asked for where records were skipped.
        num_skipped: records that were left out because they could not be decoded.
    """

    content: Any
    num_samples: int
    num_skipped: int


@dataclass(frozen=True, slots=True)
class Faults:
    """Records that were skipped so far: how often, and why the first ones."""

    num_skipped: int
    reasons: tuple[str, ...]
