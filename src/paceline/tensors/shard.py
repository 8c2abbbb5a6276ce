"""One range of one table on one server: its values, its update rule, and nothing that decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, final

import torch

from paceline.errors import ProtocolBug
from paceline.tensors.pieces import Piece, cut
from paceline.tensors.rules import Hyper, UpdateRule
from paceline.tensors.summing import combine, num_nonfinite

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.core.partition import Range
    from paceline.tensors.table import TableSpec

VALUES = "values"


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one push brings to a shard.

    Args:
        gradient: (elements of the range,), dtype of the table. The worker's memory: only ever read. What it holds for
            absent segments is not looked at.
        count: samples behind the gradient, 0 or more.
        absent: indices of the segments that have no gradient (frozen, or unused in this step).
        hyper: hyperparameters of each group as of this push; empty to leave them as they are.
    """

    gradient: Tensor
    count: float = 1.0
    absent: frozenset[int] = frozenset()
    hyper: tuple[Hyper, ...] = ()


@final
class Shard:
    """The values of one range of a table and the rule that updates them; used by one thread at a time.

    Args:
        spec: the whole table.
        span: the range of it that lies here; may be empty.
        rule: fresh, for this shard alone.

    Raises:
        ProtocolBug: the range cuts a tensor that the rule needs whole.

    Example:
        >>> from paceline.core.partition import Range
        >>> from paceline.tensors.table import Segment, TableSpec
        >>> from paceline.tensors.update import SGD, resolve
        >>> spec = TableSpec("w", (Segment("w", (2,)),), "float32", SGD(lr=0.5), "bsp", "mean", "reject")
        >>> shard = Shard(spec, Range(0, 0, 2), rule=resolve(spec.rule, allowed=None))
        >>> shard.store(torch.tensor([1.0, 2.0]))
        >>> shard.apply([Contribution(torch.tensor([2.0, 4.0]))])
        >>> shard.values
        tensor([0., 0.])
    """

    def __init__(self, spec: TableSpec, span: Range, *, rule: UpdateRule) -> None:
        self.spec = spec
        self.span = span
        self.values: Tensor = torch.zeros(span.length, dtype=getattr(torch, spec.dtype))
        self.initialised = False
        self.version = 0  # number of updates so far
        self.num_zeroed = 0  # non-finite gradient elements that were taken as 0, over all updates
        self._rule = rule
        self._pieces = cut(spec, span)
        self._views = [piece.view(self.values) for piece in self._pieces]
        self.hyper: tuple[Hyper, ...] = spec.rule.groups  # of each group, as the last push that said so
        self._sum: Tensor | None = None  # made at the first update that has to add; same shape as the values
        self._require_whole_tensors()

    def store(self, values: Tensor) -> None:
        """Overwrite the values with a copy of `values`: (elements of the range,), dtype of the table."""
        self._require_fit(values, "values")
        self.values.copy_(values)
        self.initialised = True

    def copy_values(self, out: Tensor) -> None:
        """Copy the values to `out`: (elements of the range,)."""
        out.copy_(self.values)

    def screen(self, gradient: Tensor, absent: frozenset[int] = frozenset()) -> int:
        """Return how many elements of a pushed gradient are NaN or infinite, absent segments aside."""
        self._require_fit(gradient, "gradient")
        if not absent:
            return num_nonfinite(gradient)
        return sum(num_nonfinite(piece.view(gradient)) for piece in self._pieces if piece.segment not in absent)

    @torch.no_grad()
    def apply(self, contributions: Sequence[Contribution]) -> None:
        """Update the values once with all contributions: added in the order given, scaled, then given to the rule.

        The hyperparameters of the first contribution win and stay until others arrive. A segment that is absent from
        all contributions stays untouched; one that is absent from some counts as zeros there.

        Raises:
            ProtocolBug: there is no contribution, or one does not fit this shard.
        """
        self._require_contributions(contributions)
        self.hyper = contributions[0].hyper or self.hyper
        contributions = self._without_nonfinite(contributions)
        present = [[c for c in contributions if piece.segment not in c.absent] for piece in self._pieces]
        combined = self._combine(contributions, present)
        gradients = [
            piece.view(combined) if having else None for piece, having in zip(self._pieces, present, strict=True)
        ]
        if self._pieces:
            self._rule.update(self._views, gradients, self.hyper, [piece.group for piece in self._pieces])
        self.version += 1

    def state(self) -> dict[str, Tensor]:
        """Return "values" and the rule's "<segment>.<state>" tensors: live, so copy them before the next update."""
        named = {VALUES: self.values}
        for key, value in self._rule.state().items():
            index, _, name = key.partition(".")
            if not (index.isdecimal() and int(index) < len(self._pieces) and name):
                raise ProtocolBug(
                    f"Table '{self.spec.name}': the rule {self.spec.rule.name} names a state '{key}', expected "
                    f"'<piece>.<name>' with a piece below {len(self._pieces)}. Name the states of the rule so."
                )
            named[f"{self._pieces[int(index)].segment}.{name}"] = value
        return named

    def load_state(self, state: Mapping[str, Tensor], *, version: int = 0) -> None:
        """Continue from a copy of what `state` of a shard with the same range returned after `version` updates."""
        index_of = {piece.segment: index for index, piece in enumerate(self._pieces)}
        named: dict[str, Tensor] = {}
        for key, value in state.items():
            if key == VALUES:
                continue
            segment, _, name = key.partition(".")
            if not (segment.isdecimal() and int(segment) in index_of):
                raise ProtocolBug(
                    f"Table '{self.spec.name}': state '{key}' belongs to no segment in elements "
                    f"{self.span.start} to {self.span.stop}. Load the state of this very range."
                )
            named[f"{index_of[int(segment)]}.{name}"] = value
        self.store(state[VALUES])
        self._rule.load_state(named)
        self.version = version

    def _combine(self, contributions: Sequence[Contribution], present: Sequence[Sequence[Contribution]]) -> Tensor:
        """Return the combined gradient of the range; a single one is used as it is."""
        if len(contributions) == 1:
            return contributions[0].gradient
        if self._sum is None:
            self._sum = torch.empty_like(self.values)
        everyone = [c.count for c in contributions]
        for start, stop, having in _runs(self._pieces, present):
            parts = [c.gradient[start:stop] for c in having]
            combine(self._sum[start:stop], parts, [c.count for c in having], everyone, self.spec.scale)
        return self._sum

    def _without_nonfinite(self, contributions: Sequence[Contribution]) -> Sequence[Contribution]:
        if self.spec.nonfinite != "zero":
            return contributions
        return [self._cleaned(contribution) for contribution in contributions]

    def _cleaned(self, contribution: Contribution) -> Contribution:
        found = self.screen(contribution.gradient, contribution.absent)
        if not found:
            return contribution
        self.num_zeroed += found
        gradient = torch.nan_to_num(contribution.gradient, nan=0.0, posinf=0.0, neginf=0.0)
        return Contribution(gradient, contribution.count, contribution.absent, contribution.hyper)

    def _require_whole_tensors(self) -> None:
        for piece in self._pieces:
            if self._rule.granularity == "tensor" and not piece.whole:
                name = self.spec.segments[piece.segment].name
                raise ProtocolBug(
                    f"Table '{self.spec.name}': {self.spec.rule.name} needs whole tensors, but the range of server "
                    f"{self.span.server} cuts '{name}' to its elements {piece.start} to {piece.stop}."
                )

    def _require_contributions(self, contributions: Sequence[Contribution]) -> None:
        if not contributions:
            raise ProtocolBug(f"Table '{self.spec.name}': an update without contributions, expected at least one.")
        for contribution in contributions:
            self._require_fit(contribution.gradient, "gradient")
            if contribution.hyper and len(contribution.hyper) != len(self.spec.rule.groups):
                raise ProtocolBug(
                    f"Table '{self.spec.name}': a push carries hyperparameters of {len(contribution.hyper)} groups, "
                    f"expected {len(self.spec.rule.groups)}."
                )

    def _require_fit(self, tensor: Tensor, what: str) -> None:
        if tensor.shape != self.values.shape or tensor.dtype != self.values.dtype:
            raise ProtocolBug(
                f"Table '{self.spec.name}', server {self.span.server}: got {what} of shape {tuple(tensor.shape)} and "
                f"{tensor.dtype}, expected {tuple(self.values.shape)} and {self.values.dtype}."
            )


def _runs(
    pieces: Sequence[Piece], present: Sequence[Sequence[Contribution]]
) -> list[tuple[int, int, Sequence[Contribution]]]:
    """Return (start, stop, contributions) of neighbouring pieces that the same contributions have a gradient for."""
    found: list[tuple[int, int, Sequence[Contribution]]] = []
    for _, group in groupby(zip(pieces, present, strict=True), key=lambda pair: [id(c) for c in pair[1]]):
        members = list(group)
        (first, having), (last, _) = members[0], members[-1]
        if having:
            found.append((first.offset, last.offset + last.numel, having))
    return found
