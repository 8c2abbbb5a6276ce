"""Updates by rules that have no kernel: other classes of torch.optim, and the user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, final

import torch

from paceline.errors import UsageError
from paceline.update.rules import Hyper, UpdateRule
from paceline.update.summing import CHUNK, Contribution, combine_stretch
from paceline.update.table import NonFinite, Scale, SegmentPiece
from paceline.update.thread_pool import ThreadPool, stretches
from paceline.update.torch_rule import TorchRule
from paceline.update.user_code import own_code

if TYPE_CHECKING:
    from torch import Tensor


@final
class WholeTensors:
    """Combines the gradients of a range, then hands all of it to a rule.

    Args:
        rule: fresh, for this range alone.
        pieces: of the range.
        values: (elements of the range,), changed in place.
        policy: scale and treatment of non-finite elements, see `TableSpec`.
        threads: add the gradients.
    """

    def __init__(
        self,
        rule: UpdateRule,
        pieces: Sequence[SegmentPiece],
        values: Tensor,
        policy: tuple[Scale, NonFinite],
        threads: ThreadPool,
    ) -> None:
        self._rule, self._pieces, self._policy, self._threads = rule, pieces, policy, threads
        self._values = values
        self._views = [piece.view(values) for piece in pieces]
        self._sum: Tensor | None = None  # made at the first update that has to add; same shape as the values

    def apply(self, contributions: Sequence[Contribution], hyper: tuple[Hyper, ...]) -> int:
        """Update the values once; return how many elements of gradients were taken as 0."""
        having = [
            tuple(index for index, c in enumerate(contributions) if piece.segment not in c.absent)
            for piece in self._pieces
        ]
        combined, num_zeroed = self._combine(contributions, having)
        gradients = [piece.view(combined) if there else None for piece, there in zip(self._pieces, having, strict=True)]
        if self._pieces:
            with own_code("The update rule"):
                self._rule.update(self._views, gradients, hyper, [piece.group for piece in self._pieces])
        return num_zeroed

    def state(self) -> Mapping[str, Tensor]:
        """Return the live state of every piece; see `UpdateRule.state`."""
        with own_code("The update rule"):
            return self._rule.state()

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a copy of `state`; see `UpdateRule.load_state`.

        Raises:
            UsageError: a state has another shape than the rule gives it.
        """
        if isinstance(self._rule, TorchRule):
            self._rule.check_state(state, self._views)
        elif self._rule.granularity == "element":
            for key, value in state.items():
                expected = self._views[int(key.partition(".")[0])].shape
                if value.shape not in ((), expected):
                    raise UsageError(
                        f"State '{key}' has shape {tuple(value.shape)}, expected {tuple(expected)}, or () for one "
                        "number."
                    )
        with own_code("The update rule"):
            self._rule.load_state(state)

    def _combine(self, contributions: Sequence[Contribution], having: Sequence[tuple[int, ...]]) -> tuple[Tensor, int]:
        """Return the combined gradient of the range and how much of it was zeroed; a single one is used as it is."""
        if len(contributions) == 1 and self._policy[1] != "zero":
            return contributions[0].gradient, 0
        total = torch.empty_like(self._values) if self._sum is None else self._sum
        self._sum = total
        jobs = [
            ((first + start, first + stop), there)
            for first, length, there in _runs(self._pieces, having)
            for start, stop in stretches(length, CHUNK)
        ]

        def add(job: tuple[tuple[int, int], tuple[int, ...]], thread: int) -> int:
            del thread
            span, there = job
            return combine_stretch(total[slice(*span)], span, there, contributions, self._policy, divide=True)

        return total, self._threads.total(jobs, add)


def _runs(pieces: Sequence[SegmentPiece], having: Sequence[tuple[int, ...]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (start, length, contributions) of neighbouring pieces that the same contributions have a gradient for."""
    found: list[tuple[int, int, tuple[int, ...]]] = []
    for there, group in groupby(zip(pieces, having, strict=True), key=lambda pair: pair[1]):
        members = [piece for piece, _ in group]
        if there:
            found.append((members[0].offset, sum(piece.numel for piece in members), there))
    return found
