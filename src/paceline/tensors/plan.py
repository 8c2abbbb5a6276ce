"""How one update goes through a range: in chunks that fit a cache, and what to add up and to step in each.

Torch computes most elements of a tensor several at a time, in lanes, and the last few one by one. Some of its
operations round differently in these two ways. Where they do, elements are therefore computed the way that they would
be in the whole tensor: it is cut at multiples of the lanes only, and a block that the range cuts off is filled up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

from torch.nn.functional import pad

from paceline.tensors.kernels import Kernel, Numbers, Operands

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.tensors.pieces import Piece

BLOCK: Final = 64  # elements: a multiple of what torch computes at a time, whatever the machine and the dtype
_WHOLE: Final = (0, 0)


class Age(NamedTuple):
    """What pieces must have in common to be stepped together.

    Args:
        group: of hyperparameters.
        step: how many steps they have taken.
        fresh: whether their state has never been written.
    """

    group: int
    step: float
    fresh: bool


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements of a piece that are stepped together.

    Args:
        start: first element, counted from the start of the range.
        stop: one past the last element.
        piece: index of the piece.
        filling: elements of the same block that lie before and after it, outside of the range.
    """

    start: int
    stop: int
    piece: int
    filling: tuple[int, int] = _WHOLE


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a kernel: neighbouring or scattered slices of one group and age, on views made once.

    Args:
        age: of all slices before this step.
        piece: index of one of their pieces.
        spans: (start, stop) of each, counted from the start of the chunk.
        values: views of them.
        state: views of their state by name.
        filling: see `Slice`; a call that fills up has one slice.
    """

    age: Age
    piece: int
    spans: tuple[tuple[int, int], ...]
    values: list[Tensor]
    state: dict[str, list[Tensor]]
    filling: tuple[int, int]

    def run(
        self, kernel: Kernel, gradient: Tensor, spare: Tensor, step: float, numbers: Numbers, divisor: float
    ) -> None:
        """Take one step with the gradient of the chunk, which is yet to be divided by `divisor`."""
        gradients = [gradient[start:stop] for start, stop in self.spans]
        if self.filling == _WHOLE:
            kernel.step(Operands(self.values, gradients, self.state, step, self.age.fresh, spare, divisor), numbers)
            return
        values = [pad(value, self.filling) for value in self.values]
        state = {name: [pad(part, self.filling) for part in parts] for name, parts in self.state.items()}
        gradients = [pad(part, self.filling) for part in gradients]
        kernel.step(Operands(values, gradients, state, step, self.age.fresh, spare, divisor), numbers)
        for own, filled in ((self.values, values), *((self.state[name], state[name]) for name in state)):
            own[0].copy_(filled[0][self.filling[0] :][: own[0].numel()])


@dataclass(frozen=True, slots=True)
class Chunk:
    """Neighbouring elements that one thread takes from gradients to values.

    Args:
        start: first element, counted from the start of the range.
        stop: one past the last element.
        sums: (start, stop) in the range with the indices of the contributions that have a gradient there.
        calls: what to step, in any order.
    """

    start: int
    stop: int
    sums: tuple[tuple[tuple[int, int], tuple[int, ...]], ...]
    calls: tuple[Call, ...]


def cut_into_chunks(pieces: Sequence[Piece], taken: Sequence[int], size: int, *, in_lanes: bool) -> list[list[Slice]]:
    """Return the slices of each chunk.

    Args:
        pieces: of the range.
        taken: indices of the pieces that are stepped.
        size: elements that a chunk spans at most; a multiple of a block.
        in_lanes: whether elements must be computed as they would be in the whole tensor.
    """
    chunks: list[list[Slice]] = []
    for index in taken:
        piece = pieces[index]
        for start, stop, filling in _parts(piece) if in_lanes else [(piece.start, piece.stop, _WHOLE)]:
            shift, position = piece.offset - piece.start, start
            while position < stop:
                room = chunks[-1][0].start + size - (position + shift) if chunks else 0
                end = min(stop, position + room)
                if end < stop:
                    end -= end % BLOCK
                if end > position:
                    chunks[-1].append(Slice(position + shift, end + shift, index, filling))
                    position = end
                else:
                    end = stop if stop - position <= size else (position + size) // BLOCK * BLOCK
                    chunks.append([Slice(position + shift, end + shift, index, filling)])
                    position = end
    return chunks


def _parts(piece: Piece) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Return (start, stop, filling), counted in the segment: a block that is cut off at either end, and the middle."""
    head = min(piece.stop, -(-piece.start // BLOCK) * BLOCK)
    tail = piece.stop if piece.stop == piece.total else max(head, piece.stop // BLOCK * BLOCK)
    for start, stop in ((piece.start, head), (head, tail), (tail, piece.stop)):
        if start < stop:
            whole = (start, stop) == (head, tail)
            block = start // BLOCK * BLOCK
            yield start, stop, _WHOLE if whole else (start - block, min(block + BLOCK, piece.total) - stop)


def make_chunk(
    slices: Sequence[Slice],
    having: Sequence[tuple[int, ...]],
    ages: Sequence[Age],
    memory: tuple[Tensor, Mapping[str, Tensor]],
    names: Sequence[tuple[str, ...]],
    *,
    in_lanes: bool,
) -> Chunk:
    """Return what to do with the slices of one chunk.

    Args:
        slices: as `cut_into_chunks` made them.
        having: of each piece of the range, the contributions that have a gradient for it.
        ages: of each piece.
        memory: values of the range, and its state by name.
        names: of the states of each group.
        in_lanes: whether neighbours must stay apart.
    """
    start = slices[0].start
    sums = [
        ((members[0].start, members[-1].stop), having[members[0].piece])
        for members in _neighbours(slices, [having[each.piece] for each in slices])
    ]
    grouped: dict[tuple[Age, tuple[int, int], int], list[tuple[int, int, int]]] = {}
    keys = [ages[each.piece] for each in slices]
    runs = [[each] for each in slices] if in_lanes else _neighbours(slices, keys)
    for run in runs:
        first, last = run[0], run[-1]
        alone = first.start if first.filling != _WHOLE else -1
        grouped.setdefault((ages[first.piece], first.filling, alone), []).append((first.start, last.stop, first.piece))
    values, state = memory
    calls = tuple(
        Call(
            age,
            members[0][2],
            tuple((a - start, b - start) for a, b, _ in members),
            [values[a:b] for a, b, _ in members],
            {name: [state[name][a:b] for a, b, _ in members] for name in names[age.group]},
            filling,
        )
        for (age, filling, _), members in grouped.items()
    )
    return Chunk(start, slices[-1].stop, tuple(sums), calls)


def _neighbours(slices: Sequence[Slice], keys: Sequence[object]) -> list[list[Slice]]:
    """Return the slices in runs without a gap, of equal keys."""
    shifts: list[int] = []  # rises at every gap
    reached = slices[0].start
    for each in slices:
        shifts.append((shifts[-1] if shifts else 0) + (each.start != reached))
        reached = each.stop
    together = groupby(zip(slices, keys, shifts, strict=True), key=lambda found: found[1:])
    return [[each for each, _, _ in members] for _, members in together]
