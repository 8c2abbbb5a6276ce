"""Global sequence of the batches of an epoch, the same for any number of workers; its rounds; the position in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, overload

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from paceline.core.calls import shown
from paceline.errors import UsageError

_EPOCHS_OF_A_SEED = 1_000_003  # later epochs repeat the shuffles of the next seed
MAX_SEED = 1 << 42  # so that the seeds of its epochs have 63 bits
_MAX_EPOCH = 1 << 62
# The parameters of a sequence of batches, by name: a position is valid only for equal ones.
Terms = Mapping[str, int]
_HINT = "Give it what state_dict() of the same source returned, or start without a state."


class EpochOrder(msgspec.Struct, frozen=True):
    """Parameters that determine, with the seed, the global sequence of batches of every epoch.

    In clock c, W workers have the batches c*W to c*W + W - 1; that of worker r is c*W + r.

    Args:
        num_samples: samples of an epoch.
        batch_size: samples of a batch.
        drop_last: leaves out a smaller last batch.
        shuffled: whether samples are shuffled, by seed and epoch; else ascending.
    """

    num_samples: int
    batch_size: int
    drop_last: bool
    shuffled: bool

    @property
    def num_batches(self) -> int:
        """Number of batches of an epoch."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def batches(self, seed: int, epoch: int) -> Batches:
        """Return the batches of an epoch. A shuffled epoch takes 8 bytes of memory a sample, others none."""
        shuffled = shuffle(self.num_samples, seed, epoch) if self.shuffled else None
        return Batches(self.num_samples, self.batch_size, range(self.num_batches), shuffled)

    def unshuffled(self) -> Batches:
        """Return the batches of an epoch in ascending order; every epoch has as many, of the same sizes."""
        return Batches(self.num_samples, self.batch_size, range(self.num_batches), None)


def shuffle(num_samples: int, seed: int, epoch: int) -> Tensor:
    """Return the indices of all samples, (num_samples,) int64, shuffled by this seed for this epoch."""
    generator = torch.Generator().manual_seed(seed * _EPOCHS_OF_A_SEED + epoch)
    return torch.randperm(num_samples, generator=generator)


@dataclass(frozen=True, slots=True)
class Batches(Sequence[list[int]]):
    """Batches as lists of sample indices; each list is made on access.

    Args:
        num_samples: samples of the epoch.
        batch_size: samples of a batch; the last one of the epoch may have fewer.
        numbers: the numbers of these batches in the epoch.
        shuffled: (num_samples,), the shuffled indices; None for ascending order.

    Example:
        >>> batches = EpochOrder(num_samples=5, batch_size=2, drop_last=False, shuffled=False).batches(seed=0, epoch=0)
        >>> batches[0], list(batches[1:])
        ([0, 1], [[2, 3], [4]])
    """

    num_samples: int
    batch_size: int
    numbers: range
    shuffled: Tensor | None

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> list[int]: ...

    @overload
    def __getitem__(self, index: slice) -> Batches: ...

    def __getitem__(self, index: int | slice) -> list[int] | Batches:
        if isinstance(index, slice):
            return Batches(self.num_samples, self.batch_size, self.numbers[index], self.shuffled)
        indices = self._places(index)
        if self.shuffled is None:
            return list(indices)
        return cast("list[int]", self.shuffled[indices.start : indices.stop].tolist())

    def size(self, index: int) -> int:
        """Return the number of samples of one batch."""
        return len(self._places(index))

    def _places(self, index: int) -> range:
        first = self.numbers[index] * self.batch_size
        return range(first, min(first + self.batch_size, self.num_samples))


class EpochRounds(msgspec.Struct, frozen=True):
    """The rounds of an epoch, or of the rest of one: the batches of all workers for one clock, each cut into slices.

    Indices are made on access.

    Args:
        batches: of the whole epoch.
        num_workers: the number of shares of a round, a batch each; in the last round some may be empty.
        slices: the number of slices of a share.
        start: the number of batches before the first round.
    """

    batches: Batches
    num_workers: int
    slices: int
    start: int = 0

    def __len__(self) -> int:
        return -(-(len(self.batches) - self.start) // self.num_workers)

    def sizes(self, number: int) -> tuple[int, ...]:
        """Return the number of slices in each worker's share of a round; empty after the last round."""
        first = self.num_before(number)
        own = [num_slices(self.batches[at : at + 1], self.slices) for at in range(first, first + self.num_workers)]
        return tuple(own) if any(own) else ()

    def num_samples(self, number: int) -> int:
        """Return the number of samples of a round; after the last round, as many as in the last one."""
        first = self.num_before(min(number, len(self) - 1))
        return sum(self.batches.size(at) for at in range(first, min(first + self.num_workers, len(self.batches))))

    def slice(self, number: int, home: int, index: int) -> list[int]:
        """Return the sample indices of one slice of a worker's share of a round."""
        return part(self.batches[self.num_before(number) + home], self.slices, index)

    def slices_of(self, home: int, number: int, index: int = 0) -> Iterator[list[int]]:
        """Yield the slices of one worker's shares, from a slice of a round to the end of the epoch."""
        for batch in self.batches[self.start + number * self.num_workers + home :: self.num_workers]:
            yield from (part(batch, self.slices, at) for at in range(index, min(self.slices, len(batch))))
            index = 0

    def starting(self, start: int) -> EpochRounds:
        """Return the rounds of the same epoch that start after `start` batches."""
        return replace(self, start=start)

    def num_before(self, number: int) -> int:
        """Return the number of batches of the epoch before a round."""
        return min(self.start + number * self.num_workers, len(self.batches))


def part(batch: list[int], slices: int, index: int) -> list[int]:
    """Return one of `slices` parts of a batch, as even as possible; a smaller batch has a part for each sample.

    >>> [part([5, 6, 7, 8, 9], slices=3, index=index) for index in range(3)]
    [[5], [6, 7], [8, 9]]
    """
    num, parts = len(batch), min(slices, len(batch))
    return batch[num * index // parts : num * (index + 1) // parts]


def num_slices(batches: Batches, slices: int) -> int:
    """Return the number of slices of some batches of an epoch, in ascending order; only the last may be smaller.

    >>> from paceline.data.order import EpochOrder
    >>> num_slices(EpochOrder(num_samples=8, batch_size=6, drop_last=False, shuffled=False).unshuffled(), slices=3)
    5
    """
    return (len(batches) - 1) * slices + min(slices, batches.size(-1)) if batches else 0


class Position(msgspec.Struct, frozen=True):
    """How far the workers have read an epoch together.

    Args:
        epoch: the current one, or the next one.
        num_done: batches of it (or items of an iterable) that all workers together were given.
    """

    epoch: int = 0
    num_done: int = 0


@dataclass(slots=True)
class PositionTracker:
    """The position reached in a source, and the start of the next pass.

    Args:
        terms: the parameters that positions in the source depend on.
        most: `num_done` at the end of an epoch; None if not known.
    """

    terms: Terms
    most: int | None = None
    reached: Position = Position()
    next: Position = Position()

    def start_pass(self) -> Position:
        """Begin a pass: return its start; the pass after it is of the following epoch."""
        self.reached, self.next = self.next, Position(self.next.epoch + 1)
        return self.reached

    def reach(self, num_done: int) -> None:
        """Record how much of the current epoch was given out."""
        self.reached = Position(self.reached.epoch, num_done if self.most is None else min(num_done, self.most))

    def end(self) -> None:
        """Record the end of the current epoch."""
        self.reached = Position(self.reached.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Make the next pass one of this epoch: the rest of it if it is under way, else all of it.

        Raises:
            UsageError: the number of the epoch is not valid.
        """
        if not isinstance(epoch, int) or not 0 <= epoch <= _MAX_EPOCH:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"the next epoch of a source is to be {shown(epoch)}, expected a whole number, from 0 on, of 62 bits."
            )
        if epoch != self.next.epoch:
            self.reached = self.next = Position(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position, as plain integers and booleans by name.

        >>> PositionTracker({"num_samples": 1000, "shuffled": True}).state_dict()
        {'epoch': 0, 'num_done': 0, 'num_samples': 1000, 'shuffled': True}
        """
        return {"epoch": self.reached.epoch, "num_done": self.reached.num_done, **self.terms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next pass.

        Raises:
            UsageError: the state is not valid, or is of another source; the message names both values.
        """
        self.reached = self.next = _read(state, self.terms, self.most)


def terms_of(order: EpochOrder, seed: int) -> dict[str, int]:
    """Return the parameters that a position in batches depends on."""
    return {
        "num_samples": order.num_samples,
        "batch_size": order.batch_size,
        "drop_last": order.drop_last,
        "shuffled": order.shuffled,
        "seed": seed,
    }


def _read(state: Mapping[str, Any], terms: Terms, most: int | None) -> Position:
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance] - it comes from callers
        raise UsageError(f"a state of a source is {state!r}, expected a mapping of names to numbers. {_HINT}")
    expected = {"epoch", "num_done", *terms}
    if set(state) != expected:
        raise UsageError(f"a state with {_listed(state)} is not of this source, whose has {_listed(expected)}. {_HINT}")
    if wrong := [f"{name}={value!r}" for name, value in state.items() if not isinstance(value, int)]:
        raise UsageError(f"in a state of a source is {', '.join(wrong)}, expected whole numbers. {_HINT}")
    if other := [f"{name} {state[name]}, not {terms[name]}" for name in terms if state[name] != terms[name]]:
        raise UsageError(f"a state of another source, or of this one read otherwise: {'; '.join(other)}. {_HINT}")
    position = Position(int(state["epoch"]), int(state["num_done"]))
    is_over = position.epoch > _MAX_EPOCH or (most is not None and position.num_done > most)
    if is_over or min(position.epoch, position.num_done) < 0:
        raise UsageError(
            f"a state of a source is in epoch {position.epoch} after {position.num_done} of "
            f"{'any number' if most is None else most}, which is not a position in it. {_HINT}"
        )
    return position


def _listed(names: Mapping[str, Any] | set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
