"""The collectives, made of rounds: on flat, contiguous tensors in the memory of the host.

A tensor longer than a slot goes in chunks. Reductions add in the order of ranks, so that all workers get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch
from torch import Tensor

from paceline.collective.rounds import SLOT_BYTES, Call, Piece, Rounds, nothing
from paceline.transport.deadline import Deadline

Combine = Callable[..., Tensor]

DIRECT_BYTES: Final = 64 << 10  # up to here, each worker adds up everything itself, which saves a round
_LINE_BYTES: Final = 64  # parts of a chunk begin at lines of the cache


def all_reduce(rounds: Rounds, call: Call, flat: Tensor, combine: Combine, deadline: Deadline) -> None:
    """Replace a tensor by the reduction of those of all workers.

    Each worker reduces its part of a chunk, and takes the parts of the others. Where there are two, or little to do,
    each reduces the whole.
    """
    num_workers = rounds.peers.size
    is_direct = num_workers == 2 or flat.nbytes <= DIRECT_BYTES
    for chunk in _chunks(flat):
        if is_direct:
            rounds.run(call, deadline, _filling(chunk), _reducing(chunk, combine, rounds.peers.rank))
            continue
        parts = _parts(chunk, num_workers)
        start, stop = parts[rounds.peers.rank]
        own = chunk[start:stop]
        reducing = _reducing(own, combine, rounds.peers.rank, start)
        rounds.run(call, deadline, _filling(chunk), reducing, _bytes(parts, chunk))

        def fill(slot: Tensor, own: Tensor = own, start: int = start) -> None:
            _typed(slot, own, start).copy_(own)

        def take(slots: Sequence[Tensor], chunk: Tensor = chunk, parts: Sequence[Piece] = parts) -> None:
            for rank, (first, last) in enumerate(parts):
                if rank != rounds.peers.rank:
                    chunk[first:last].copy_(_typed(slots[rank], chunk[first:last], first))

        rounds.run(call, deadline, fill, take, _bytes([(start, stop)] * num_workers, chunk))


def reduce(rounds: Rounds, call: Call, flat: Tensor, combine: Combine, root: int, deadline: Deadline) -> None:
    """Replace the root's tensor by the reduction of those of all workers."""
    is_root = rounds.peers.rank == root
    for chunk in _chunks(flat):
        take = _reducing(chunk, combine, root) if is_root else nothing
        rounds.run(call, deadline, _filling(chunk), take, _only(root, chunk.nbytes, rounds.peers.size))


def broadcast(rounds: Rounds, call: Call, flat: Tensor, root: int, deadline: Deadline) -> None:
    """Replace the tensors of all workers by the root's."""
    is_root, num_workers = rounds.peers.rank == root, rounds.peers.size
    for chunk in _chunks(flat):

        def take(slots: Sequence[Tensor], chunk: Tensor = chunk) -> None:
            chunk.copy_(_typed(slots[root], chunk))

        pieces = [(0, chunk.nbytes if is_root else 0)] * num_workers
        rounds.run(call, deadline, _filling(chunk) if is_root else nothing, nothing if is_root else take, pieces)


def all_gather(rounds: Rounds, call: Call, flat: Tensor, found: Sequence[Tensor], deadline: Deadline) -> None:
    """Copy the tensor of each worker to the one of its rank in `found`."""
    _gather(rounds, call, flat, found, lambda chunk: [(0, chunk.nbytes)] * rounds.peers.size, deadline)


def gather(rounds: Rounds, call: Call, flat: Tensor, found: Sequence[Tensor], root: int, deadline: Deadline) -> None:
    """Copy the tensor of each worker to the one of its rank in the root's `found`; that of the others is empty."""
    _gather(rounds, call, flat, found, lambda chunk: _only(root, chunk.nbytes, rounds.peers.size), deadline)


def _gather(
    rounds: Rounds,
    call: Call,
    flat: Tensor,
    found: Sequence[Tensor],
    pieces: Callable[[Tensor], Sequence[Piece]],
    deadline: Deadline,
) -> None:
    for index, chunk in enumerate(_chunks(flat)):
        start = index * _step(flat)

        def take(slots: Sequence[Tensor], start: int = start, length: int = len(chunk)) -> None:
            for slot, one in zip(slots, found, strict=False):
                piece = one[start : start + length]
                piece.copy_(_typed(slot, piece))

        rounds.run(call, deadline, _filling(chunk), take, pieces(chunk))


def scatter(rounds: Rounds, call: Call, given: Sequence[Tensor], own: Tensor, root: int, deadline: Deadline) -> None:
    """Copy the tensor of each rank in the root's `given` to that worker's `own`."""
    _spread(rounds, call, given, len(own), lambda slots, at: own[at].copy_(slots[root]), deadline)


def reduce_scatter(
    rounds: Rounds, call: Call, given: Sequence[Tensor], own: Tensor, combine: Combine, deadline: Deadline
) -> None:
    """Replace `own` by the reduction of what all workers have given for its rank."""
    _spread(rounds, call, given, len(own), lambda slots, at: _reduce_into(own[at], slots, combine), deadline)


def all_to_all(
    rounds: Rounds, call: Call, given: Sequence[Tensor], found: Sequence[Tensor], deadline: Deadline
) -> None:
    """Copy what each worker has given for this one to the tensor of its rank in `found`; all are equally long."""

    def take(slots: Sequence[Tensor], at: slice) -> None:
        for slot, tensor in zip(slots, found, strict=True):
            tensor[at].copy_(slot)

    _spread(rounds, call, given, len(found[0]), take, deadline)


def _spread(
    rounds: Rounds,
    call: Call,
    given: Sequence[Tensor],
    length: int,
    take: Callable[[Sequence[Tensor], slice], object],
    deadline: Deadline,
) -> None:
    """Put what is for each worker side by side into a slot, in chunks of tensors that are `length` long.

    `take` is called with what all slots have for this worker, and where in the tensors that is.
    """
    num_workers, rank, dtype = rounds.peers.size, rounds.peers.rank, call.dtype
    step = max(1, SLOT_BYTES // num_workers // _LINE_BYTES * _LINE_BYTES // dtype.itemsize)
    width = step * dtype.itemsize
    for start in range(0, max(1, length), step):
        at = slice(start, min(start + step, length))
        num_bytes = (at.stop - at.start) * dtype.itemsize

        def fill(slot: Tensor, at: slice = at, num_bytes: int = num_bytes) -> None:
            for other, tensor in enumerate(given):
                slot[other * width : other * width + num_bytes].view(dtype).copy_(tensor[at])

        def take_own(slots: Sequence[Tensor], at: slice = at, num_bytes: int = num_bytes) -> None:
            take([slot[rank * width : rank * width + num_bytes].view(dtype) for slot in slots], at)

        pieces = [(other * width, other * width + (num_bytes if given else 0)) for other in range(num_workers)]
        rounds.run(call, deadline, fill, take_own, pieces)


def _step(flat: Tensor) -> int:
    return SLOT_BYTES // flat.element_size()


def _chunks(flat: Tensor) -> Iterator[Tensor]:
    """Return what fits into a slot at once, one empty chunk of an empty tensor: a call is at least one round."""
    step = _step(flat)
    return (flat[start : start + step] for start in range(0, max(1, len(flat)), step))


def _parts(chunk: Tensor, num_workers: int) -> list[Piece]:
    """Return the part of a chunk that each worker reduces, in elements."""
    line = _LINE_BYTES // chunk.element_size()
    width = -(-len(chunk) // (num_workers * line)) * line
    return [(min(rank * width, len(chunk)), min((rank + 1) * width, len(chunk))) for rank in range(num_workers)]


def _bytes(parts: Sequence[Piece], chunk: Tensor) -> list[Piece]:
    size = chunk.element_size()
    return [(start * size, stop * size) for start, stop in parts]


def _only(root: int, num_bytes: int, num_workers: int) -> list[Piece]:
    return [(0, num_bytes if rank == root else 0) for rank in range(num_workers)]


def _typed(slot: Tensor, like: Tensor, start: int = 0) -> Tensor:
    """Return what a slot has for a tensor, `start` elements after its beginning, as its dtype."""
    first = start * like.element_size()
    return slot[first : first + like.nbytes].view(like.dtype)


def _filling(chunk: Tensor) -> Callable[[Tensor], object]:
    return lambda slot: _typed(slot, chunk).copy_(chunk)


def _reducing(own: Tensor, combine: Combine, rank: int, start: int = 0) -> Callable[[Sequence[Tensor]], object]:
    """Return what reduces a part of the slots into `own`, which holds what this worker has put there."""

    def take(slots: Sequence[Tensor]) -> None:
        given = [_typed(slot, own, start) for slot in slots]
        if rank < 2:  # one of the first two to be read: not overwritten before
            given[rank] = own
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
