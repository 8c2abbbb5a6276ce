"""The collectives, made of rounds: on flat, contiguous tensors in the memory of the host.

A tensor longer than a slot goes in chunks. Reductions add in the order of ranks, so that all workers get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import starmap
from typing import Final, Protocol, final

import torch
from msgspec.structs import replace
from torch import Tensor

from paceline.collective.rounds import REFUSAL_BYTES, REFUSED, Call, Piece, Round, Rounds, no_piece, nothing
from paceline.errors import UsageError
from paceline.transport.deadline import Deadline

Combine = Callable[..., Tensor]

DIRECT_BYTES: Final = 64 << 10  # up to here, each worker adds up everything itself, which saves a round
_LINE_BYTES: Final = 64  # parts of a chunk begin at lines of the cache


class Exchange(Protocol):
    """The collectives of one worker, in its thread, one at a time; tensors are flat, and as long on all workers."""

    def all_reduce(self, call: Call, flat: Tensor, combine: Combine, deadline: Deadline) -> None:
        """Replace a tensor by the reduction of those of all workers."""
        ...

    def reduce(self, call: Call, flat: Tensor, combine: Combine, root: int, deadline: Deadline) -> None:
        """Replace the root's tensor by the reduction of those of all workers."""
        ...

    def broadcast(self, call: Call, flat: Tensor, root: int, deadline: Deadline) -> None:
        """Replace the tensors of all workers by the root's."""
        ...

    def all_gather(self, call: Call, flat: Tensor, found: Sequence[Tensor], deadline: Deadline) -> None:
        """Copy the tensor of each worker to the one of its rank in `found`."""
        ...

    def gather(self, call: Call, flat: Tensor, found: Sequence[Tensor], root: int, deadline: Deadline) -> None:
        """Copy the tensor of each worker to the one of its rank in the root's `found`; that of the others is empty."""
        ...

    def scatter(self, call: Call, given: Sequence[Tensor], own: Tensor, root: int, deadline: Deadline) -> None:
        """Copy the tensor of each rank in the root's `given` to that worker's `own`; that of the others is empty."""
        ...

    def reduce_scatter(
        self, call: Call, given: Sequence[Tensor], own: Tensor, combine: Combine, deadline: Deadline
    ) -> None:
        """Replace `own` by the reduction of what all workers have given for its rank."""
        ...

    def all_to_all(self, call: Call, given: Sequence[Tensor], found: Sequence[Tensor], deadline: Deadline) -> None:
        """Copy what each worker has given for this one to the tensor of its rank in `found`; all are equally long."""
        ...

    def barrier(self, call: Call, deadline: Deadline) -> None:
        """Wait for all workers."""
        ...

    def close(self) -> None:
        """Release memory, once no call is under way any more. May be repeated."""
        ...


@final
class RoundsExchange:
    """Collectives among the workers that make rounds together; roots are places among these."""

    def __init__(self, rounds: Rounds) -> None:
        self._rounds = rounds
        self._size: Final = rounds.size
        self._place: Final = rounds.place

    def all_reduce(self, call: Call, flat: Tensor, combine: Combine, deadline: Deadline) -> None:
        """Reduce and give to all; see `Exchange`.

        Each worker reduces its part of a chunk, and takes the parts of the others. Where there are two, or little to
        do, each reduces the whole.
        """
        chunks = list(self._chunks(flat))
        if self._size == 2 or flat.nbytes <= DIRECT_BYTES:
            self._run(call, deadline, (self._reduce_whole(chunk, combine) for chunk in chunks))
            return
        parts = [_parts(chunk, self._size) for chunk in chunks]
        sums = [self._sum_part(*each, combine) for each in zip(chunks, parts, strict=True)]
        wholes = [self._give_part(*each) for each in zip(chunks, parts, strict=True)]
        self._run(call, deadline, _in_turns(sums, wholes, num_ahead=int(self._rounds.is_overlapping)))

    def _reduce_whole(self, chunk: Tensor, combine: Combine) -> Round:
        return Round(_filling(chunk), _reducing(chunk, combine, self._place), _whole(chunk))

    def _sum_part(self, chunk: Tensor, parts: Sequence[tuple[int, int]], combine: Combine) -> Round:
        """Have this worker reduce its part of a chunk."""
        bytes_of, (start, stop) = _bytes(parts, chunk), parts[self._place]
        reducing = _reducing(chunk[start:stop], combine, self._place, start)
        return Round(_filling(chunk), reducing, lambda _, to: bytes_of[to])

    def _give_part(self, chunk: Tensor, parts: Sequence[tuple[int, int]]) -> Round:
        """Give all others the part of a chunk that this worker has reduced, and take theirs."""
        bytes_of, (start, stop) = _bytes(parts, chunk), parts[self._place]

        def take(slots: Sequence[Tensor]) -> None:
            for place, (first, last) in enumerate(parts):
                if place != self._place:
                    chunk[first:last].copy_(_typed(slots[place], chunk[first:last], first))

        return Round(_filling(chunk[start:stop], start), take, lambda source, _: bytes_of[source])

    def reduce(self, call: Call, flat: Tensor, combine: Combine, root: int, deadline: Deadline) -> None:
        """Reduce to the root; see `Exchange`."""

        def step(chunk: Tensor) -> Round:
            take = _reducing(chunk, combine, root) if self._place == root else nothing
            return Round(_filling(chunk), take, _towards(root, chunk))

        self._run(call, deadline, map(step, self._chunks(flat)))

    def broadcast(self, call: Call, flat: Tensor, root: int, deadline: Deadline) -> None:
        """Give all the root's tensor; see `Exchange`."""

        def step(chunk: Tensor) -> Round:
            def take(slots: Sequence[Tensor]) -> None:
                chunk.copy_(_typed(slots[root], chunk))

            how = (_filling(chunk), nothing) if self._place == root else (nothing, take)
            return Round(*how, _from(root, chunk))

        self._run(call, deadline, map(step, self._chunks(flat)))

    def all_gather(self, call: Call, flat: Tensor, found: Sequence[Tensor], deadline: Deadline) -> None:
        """Give all to all; see `Exchange`."""
        self._gather(call, flat, found, _whole, deadline)

    def gather(self, call: Call, flat: Tensor, found: Sequence[Tensor], root: int, deadline: Deadline) -> None:
        """Give all to the root; see `Exchange`."""
        self._gather(call, flat, found, lambda chunk: _towards(root, chunk), deadline)

    def _gather(
        self,
        call: Call,
        flat: Tensor,
        found: Sequence[Tensor],
        piece: Callable[[Tensor], Piece],
        deadline: Deadline,
    ) -> None:
        step = self._rounds.slot_bytes // flat.element_size()

        def gathering(number: int, chunk: Tensor) -> Round:
            start, stop = number * step, number * step + len(chunk)

            def take(slots: Sequence[Tensor]) -> None:
                for slot, one in zip(slots, found, strict=False):
                    part = one[start:stop]
                    if part.data_ptr() != chunk.data_ptr():  # else this worker's own, which is given where it belongs
                        part.copy_(_typed(slot, part))

            return Round(_filling(chunk), take, piece(chunk))

        self._run(call, deadline, starmap(gathering, enumerate(self._chunks(flat))))

    def scatter(self, call: Call, given: Sequence[Tensor], own: Tensor, root: int, deadline: Deadline) -> None:
        """Give each what the root has for it; see `Exchange`."""
        self._spread(call, given, len(own), lambda slots, at: own[at].copy_(slots[root]), deadline, root)

    def reduce_scatter(
        self, call: Call, given: Sequence[Tensor], own: Tensor, combine: Combine, deadline: Deadline
    ) -> None:
        """Give each the reduction of what is for it; see `Exchange`."""
        self._spread(call, given, len(own), lambda slots, at: _reduce_into(own[at], slots, combine), deadline)

    def all_to_all(self, call: Call, given: Sequence[Tensor], found: Sequence[Tensor], deadline: Deadline) -> None:
        """Give each what all have for it; see `Exchange`."""

        def take(slots: Sequence[Tensor], at: slice) -> None:
            for slot, tensor in zip(slots, found, strict=True):
                tensor[at].copy_(slot)

        self._spread(call, given, len(found[0]), take, deadline)

    def barrier(self, call: Call, deadline: Deadline) -> None:
        """Wait for all; see `Exchange`."""
        self._run(call, deadline, [Round(nothing, nothing, no_piece)])

    def refuse(self, text: str, deadline: Deadline) -> None:
        """Tell the others, instead of making their call, why it is not made: that raises UsageError there."""
        told = text.encode()[: REFUSAL_BYTES - 1].ljust(REFUSAL_BYTES, b"\0")
        words = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        with suppress(UsageError):  # of their calls, which are others
            self._run(REFUSED, deadline, [Round(_filling(words), nothing, _whole(words))])

    def close(self) -> None:
        """Release the memory of the rounds; see `Exchange`."""
        self._rounds.close()

    def _spread(
        self,
        call: Call,
        given: Sequence[Tensor],
        length: int,
        take: Callable[[Sequence[Tensor], slice], object],
        deadline: Deadline,
        root: int | None = None,
    ) -> None:
        """Put what is for each worker side by side into a slot, in chunks of tensors that are `length` long.

        `take` is called with what all slots have for this worker, and where in the tensors that is. Only the root has
        given something, if there is one.
        """
        place, itemsize = self._place, call.dtype.itemsize
        step = max(1, self._rounds.slot_bytes // self._size // _LINE_BYTES * _LINE_BYTES // itemsize)
        width = step * itemsize

        def spreading(start: int) -> Round:
            at = slice(start, min(start + step, length))
            num_bytes = (at.stop - at.start) * itemsize

            def fill(slot: Tensor) -> None:
                for other, tensor in enumerate(given):
                    slot[other * width : other * width + num_bytes].view(call.dtype).copy_(tensor[at])

            def take_own(slots: Sequence[Tensor]) -> None:
                take([slot[place * width : place * width + num_bytes].view(call.dtype) for slot in slots], at)

            def piece(source: int, to: int) -> tuple[int, int]:
                return (to * width, to * width + num_bytes) if root in (None, source) else (0, 0)

            return Round(fill, take_own, piece)

        self._run(call, deadline, map(spreading, range(0, max(1, length), step)))

    def _run(self, call: Call, deadline: Deadline, steps: Iterable[Round]) -> None:
        self._rounds.run(call, deadline, steps)

    def _chunks(self, flat: Tensor) -> Iterator[Tensor]:
        """Return what fits into a slot at once, one empty chunk of an empty tensor: a call is at least one round."""
        step = self._rounds.slot_bytes // flat.element_size()
        return (flat[start : start + step] for start in range(0, max(1, len(flat)), step))


def _in_turns(sums: Sequence[Round], wholes: Sequence[Round], num_ahead: int) -> Iterator[Round]:
    """Return the rounds in which parts are added, and those that give them to all, each so many after the former."""
    places: list[int] = []  # of the sums, among all rounds
    num_steps = 0
    for number in range(len(sums) + num_ahead):
        if number < len(sums):
            places.append(num_steps)
            num_steps += 1
            yield sums[number]
        if number >= num_ahead:
            num_steps += 1
            yield replace(wholes[number - num_ahead], needs=places[number - num_ahead])


def _parts(chunk: Tensor, num_workers: int) -> list[tuple[int, int]]:
    """Return the part of a chunk that each worker reduces, in elements."""
    line = _LINE_BYTES // chunk.element_size()
    width = -(-len(chunk) // (num_workers * line)) * line
    return [(min(place * width, len(chunk)), min((place + 1) * width, len(chunk))) for place in range(num_workers)]


def _bytes(parts: Sequence[tuple[int, int]], chunk: Tensor) -> list[tuple[int, int]]:
    size = chunk.element_size()
    return [(start * size, stop * size) for start, stop in parts]


def _whole(chunk: Tensor) -> Piece:
    """All of a chunk, from each worker to each."""
    piece = (0, chunk.nbytes)
    return lambda _source, _to: piece


def _towards(root: int, chunk: Tensor) -> Piece:
    return lambda _, to: (0, chunk.nbytes if to == root else 0)


def _from(root: int, chunk: Tensor) -> Piece:
    return lambda source, _: (0, chunk.nbytes if source == root else 0)


def _typed(slot: Tensor, like: Tensor, start: int = 0) -> Tensor:
    """Return what a slot has for a tensor, `start` elements after its beginning, as its dtype."""
    first = start * like.element_size()
    return slot[first : first + like.nbytes].view(like.dtype)


def _filling(chunk: Tensor, start: int = 0) -> Callable[[Tensor], object]:
    return lambda slot: _typed(slot, chunk, start).copy_(chunk)


def _reducing(own: Tensor, combine: Combine, place: int, start: int = 0) -> Callable[[Sequence[Tensor]], object]:
    """Return a function that reduces a part of the slots into `own`, which holds this worker's values."""

    def take(slots: Sequence[Tensor]) -> None:
        given = [_typed(slot, own, start) for slot in slots]
        if place < 2:  # one of the first two to be read: not overwritten before
            given[place] = own
        _reduce_into(own, given, combine)

    return take


def _reduce_into(own: Tensor, given: Sequence[Tensor], combine: Combine) -> None:
    """Combine tensors in order; `own` may be one of the first two."""
    if len(given) == 1:
        own.copy_(given[0])
        return
    combine(given[0], given[1], out=own)
    for one in given[2:]:
        combine(own, one, out=own)


COMBINE: Final[dict[str, Combine]] = {
    "SUM": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}
REDUCTIONS: Final = tuple(COMBINE)
