"""Layout of a range of a table: which part of which segment lies where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.partition import Range
    from paceline.update.table import TableSpec


@dataclass(frozen=True, slots=True)
class SegmentPiece:
    """The part of one segment that lies in a range.

    Args:
        segment: index of the segment in the table.
        start: first element, counted from the start of the segment.
        stop: one past the last element, counted likewise.
        offset: first element, counted from the start of the range.
        whole: whether this is all of the segment.
        shape: of the segment when whole, else flat.
        group: hyperparameter group.
        total: number of elements of the segment.
    """

    segment: int
    start: int
    stop: int
    offset: int
    whole: bool
    shape: tuple[int, ...]
    group: int
    total: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def view(self, flat: Tensor) -> Tensor:
        """Return this piece of a flat tensor of the whole range, in its shape; a view, no copy."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


def cut(spec: TableSpec, span: Range) -> tuple[SegmentPiece, ...]:
    """Return the pieces of the segments that lie in `span`, in order; none of them is empty."""
    found: list[SegmentPiece] = []
    for index, (segment, offset) in enumerate(zip(spec.segments, spec.offsets, strict=True)):
        numel = segment.numel
        start, stop = max(span.start - offset, 0), min(span.stop - offset, numel)
        if start < stop:
            whole = stop - start == numel
            shape = segment.shape if whole else (stop - start,)
            found.append(
                SegmentPiece(index, start, stop, offset + start - span.start, whole, shape, segment.group, numel)
            )
    return tuple(found)
