"""A batch request and its result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError


@dataclass(frozen=True, slots=True)
class BatchRequest:
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


def require_served(num_samples: int, size_bytes: int, max_bytes: int) -> None:
    """Raise UsageError for so many samples of so many bytes where a batch may have no more than `max_bytes`."""
    if size_bytes > max_bytes:
        raise UsageError(
            f"a batch of {num_samples} samples has {size_bytes} bytes, at most {max_bytes} are served: choose a "
            "smaller batch size"
        )


@dataclass(frozen=True, slots=True)
class Faults:
    """Records that were skipped so far: how often, and why the first ones."""

    num_skipped: int
    reasons: tuple[str, ...]
