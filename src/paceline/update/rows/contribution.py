"""Contributions of pushes to the rows of one server, and their combination to one gradient per row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import torch
from msgspec.structs import replace

from paceline.update.rules import Hyper
from paceline.update.summing import divisor_of, num_missing, zeroed

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.update.rows.ops import RowOps
    from paceline.update.table import Scale


class RowContribution(msgspec.Struct, frozen=True):
    """The part of one push that one server gets.

    Args:
        ids: (n,), int64; the rows of repeated ids are summed.
        gradient: (n, width), dtype of the table. It is the worker's memory, so only read it.
        count: samples behind the gradient, 0 or more.
        hyper: hyperparameters of the only group as of this push; empty to leave them as they are.
        echo: (n, width of the rule's echo), as read with the values; NaN for rows that were not read. None means NaN
            everywhere.
        clock: of the worker; it may be ahead of the table.
        expected: samples behind all contributions to the update if none is missing; 0 where that is not known.
    """

    ids: Tensor
    gradient: Tensor
    count: float = 1.0
    hyper: tuple[Hyper, ...] = ()
    echo: Tensor | None = None
    clock: int = 0
    expected: float = 0.0

    def finite(self) -> tuple[RowContribution, int]:
        """Return the contribution with NaN and infinity replaced by zeros, and the number of these."""
        num_bad = self.gradient.numel() - int(self.gradient.isfinite().sum())
        return (replace(self, gradient=zeroed(self.gradient)) if num_bad else self), num_bad

    def only(self, kept: Tensor) -> RowContribution:
        """Return the contribution with only the rows where `kept`, (n,) bool, is true."""
        echo = None if self.echo is None else self.echo[kept]
        return replace(self, ids=self.ids[kept], gradient=self.gradient[kept], echo=echo)

    def echo_rows(self, width: int) -> Tensor:
        """Return the echo, (n, width), of the gradient's dtype."""
        return self.gradient.new_full((len(self.ids), width), math.nan) if self.echo is None else self.echo


class Combined(msgspec.Struct, frozen=True):
    """One update: distinct ids in order of first appearance, with a gradient and maybe an echo for each.

    Args:
        ids: (n,), distinct.
        gradient: (n, width), summed and scaled; may be a worker's memory, so only read it.
        echo: (n, width of the echo), of the first push with the row; None for rules without an echo.
    """

    ids: Tensor
    gradient: Tensor
    echo: Tensor | None

    def part(self, piece: slice) -> Combined:
        """Return some of the rows."""
        echo = None if self.echo is None else part_of(self.echo, piece)
        return Combined(part_of(self.ids, piece), part_of(self.gradient, piece), echo)


def combine(contributions: Sequence[RowContribution], scale: Scale, ops: RowOps, echo_width: int) -> Combined:
    """Add the gradients of each row in the order given, then scale as dense tables do.

    A contribution without a row counts as zeros there: "mean" divides by the number of all contributions, and
    "samples" by the samples of all, or those that were expected.

    Args:
        contributions: at least one.
        scale: see `RowTableSpec`.
        ops: finds repeated ids, and adds rows.
        echo_width: 0 for a rule without echo.
    """
    counts = [contribution.count for contribution in contributions]
    missing = num_missing(counts, [contribution.expected for contribution in contributions], scale)
    all_samples = [*counts, missing] if missing else counts
    gradients = [contribution.gradient for contribution in contributions]
    if scale == "samples" and len(set(all_samples)) > 1:
        gradients = [gradient * count for gradient, count in zip(gradients, counts, strict=True)]
    ids, inverse = ops.unique(_joined([contribution.ids for contribution in contributions]))
    gradient = _joined(gradients)
    echo = _joined([contribution.echo_rows(echo_width) for contribution in contributions]) if echo_width else None
    if ids.numel() < inverse.numel():
        gradient = ops.sum_rows(gradient, inverse, ids.numel())
        echo = None if echo is None else echo[_first_positions(inverse)]
    divisor = divisor_of(all_samples, scale)
    return Combined(ids, gradient if divisor == 1.0 else gradient / divisor, echo)


def part_of(tensor: Tensor, piece: slice) -> Tensor:
    """Return a slice of a tensor: itself where that is all of it."""
    return tensor if piece.stop - piece.start == tensor.shape[0] else tensor[piece]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(list(parts))


def _first_positions(inverse: Tensor) -> Tensor:
    """Return the first position of each number in `inverse`, whose numbers first appear in ascending order."""
    highest = inverse.cummax(0).values
    is_first = torch.ones(len(inverse), dtype=torch.bool)
    is_first[1:] = highest[1:] > highest[:-1]
    return is_first.nonzero().view(-1)
