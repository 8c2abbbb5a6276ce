"""Slices of a clock's samples, so that workers that finish early take slices of a slow one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import msgspec
import torch
from torch.utils.data import DataLoader

from paceline.core.work_queue import WorkAnswer, WorkRound
from paceline.data.order import EpochOrder, EpochRounds, num_slices, terms_of
from paceline.data.partition import DataCut, Sharding
from paceline.data.sharding import PositionedLoader, ShardedLoader
from paceline.errors import UsageError
from paceline.wire.malformed import read_answer_of
from paceline.wire.requests import ClaimWork, WorkQueueEntry, read_work_answer
from paceline.worker.rpc import Rpc

_Source = TypeVar("_Source")
_Sample = TypeVar("_Sample", covariant=True)

_WORK_HOST = 0  # the server with the queue of slices
# Slices left for each worker from which on none is requested ahead: a worker at half the speed of the others finishes
# two before those have taken the rest.
_MANY = 4


class ClockSlices(Protocol):
    """This worker's slices of the current clock, as far as optimizers need to know of them."""

    @property
    def num_samples(self) -> int:
        """Number of samples in the current slice; 0 where there is none."""
        ...

    @property
    def weight(self) -> float:
        """Weight of the current slice: its samples, scaled to the number of samples in the current clock."""
        ...

    @property
    def num_expected(self) -> int:
        """Expected number of samples of all workers in the current clock; 0 where it is not known."""
        ...

    def claim_next(self) -> bool:
        """Claim the next slice of the current clock; return whether this worker gets one. Blocks until known."""
        ...


class AccumulatesSlices(Protocol):
    """Distributed optimizer that adds up the gradients of slices."""

    def accumulate_slices(self, slices: ClockSlices) -> None:
        """Finish a clock only with this worker's last slice of it."""
        ...

    def drop_slices(self) -> None:
        """Drop the gradients added up in the current clock."""
        ...


@dataclass(slots=True)
class Slicing:
    """What this worker needs to request slices.

    Args:
        num_workers: of the job.
        calls: requests to servers.
        optimizers: those in use.
        clock: returns the current clock of this worker.
        is_elastic: whether workers come and go, so that slices are shared out in any case.
    """

    num_workers: int
    calls: Rpc
    optimizers: Collection[AccumulatesSlices]
    clock: Callable[[], int]
    is_elastic: bool = False
    _num_loaders: int = 0
    _slices: ClockSlices | None = None  # those of the most recent loop

    def name_next(self) -> str:
        """Return the name of the next loader's work queue; all workers make their loaders in the same order."""
        self._num_loaders += 1
        return f"the slices of loader {self._num_loaders}"

    def open_queue(self, work: str, order: EpochOrder, seed: int, slices: int, epoch: int) -> SliceQueue:
        """Return the work queue of this name for an epoch of this order."""
        return SliceQueue(self.calls, self.clock, work, (*map(int, terms_of(order, seed).values()), slices, epoch))

    def start(self, slices: ClockSlices) -> None:
        """Make optimizers add up the gradients of these slices.

        Raises:
            UsageError: no optimizer, or one that does not support slices; or the loop over other slices is not over.
        """
        if not self.optimizers:
            raise UsageError(
                "a loop over slices or leased batches needs an optimizer from paceline.distributed, whose step() "
                "finishes the clock with the last of them: make it before the loop, or leave out slices that you gave."
            )
        if self._slices is not None and self._slices.num_samples:
            raise UsageError("a loop over slices is within another one: the steps would be of both; slice one of them.")
        for optimizer in list(self.optimizers):
            try:
                optimizer.accumulate_slices(slices)
            except UsageError as error:
                if not self.is_elastic:
                    raise
                raise UsageError(f"workers of this job come and go, and share batches as slices: {error}") from error
        self._slices = slices

    def leave(self) -> None:
        """Drop the gradients that optimizers have added up in an unfinished clock, after its loop was left."""
        for optimizer in list(self.optimizers):
            optimizer.drop_slices()


class SliceQueue(msgspec.Struct, frozen=True):
    """Work queue on a server, by name, with the parameters that all workers have to agree on."""

    calls: Rpc
    clock: Callable[[], int]
    work: str
    terms: tuple[int, ...]

    def request(self, place: WorkRound, sizes: tuple[int, ...], start: int) -> Future[memoryview]:
        """Request a slice of this worker's current round; `start` is the number of batches before the round."""
        return self.calls.start_call(
            _WORK_HOST,
            lambda number: ClaimWork(
                number, self.work, place.epoch, place.number, sizes, self.terms, start, self.clock()
            ),
        )

    def wait_answer(self, requested: Future[memoryview], place: WorkRound) -> WorkQueueEntry:
        """Return the result of a request; blocks for one round trip, and at the end of an epoch for all workers."""
        what = f"{self.work}: those of round {place.number} of pass {place.epoch} or its end"
        return read_answer_of(_WORK_HOST, what, read_work_answer, self.calls.wait_answer(requested, what))


@dataclass(slots=True)
class SliceWalk:
    """A worker's progress through the rounds of one epoch, slice by slice.

    A round holds the batches of all workers for one clock. This worker requests its slices one by one, and the step
    after each has to know whether another one follows. While many are left, the next is requested before the current
    one is computed, so that the answer is there in time; near the end of a round only afterwards, so that no worker
    holds slices that another could start.
    """

    slice_queue: SliceQueue
    rounds: EpochRounds
    epoch: int  # as the server counts; it never decreases
    on_missing: Callable[[], None]  # finishes a clock without a gradient
    num_workers: int
    num_samples: int = 0  # of the current slice
    _number: int = 0  # of the round
    _taken: WorkAnswer | None = None  # the answer with the current slice
    _requested: Future[memoryview] | None = None  # request for the slice after the current one
    _next: WorkAnswer | None = None  # its answer, once known
    _has_stepped: bool = False  # after the last slice of the round, with the step that finishes the clock

    @property
    def num_done(self) -> int:
        """Number of the epoch's batches, over all workers, in the clocks that this worker has finished."""
        return self.rounds.num_before(self._number + self._has_stepped)

    @property
    def lacks_step(self) -> bool:
        """Whether no step came after the slice that was given last."""
        return self._next is None

    @property
    def is_again(self) -> bool:
        """Whether the current slice was given before to a worker that ended without delivering its gradients."""
        return self._taken is not None and self._taken.again

    @property
    def num_expected(self) -> int:
        """Number of samples in this round over all workers; 0 where there is no current slice."""
        return self.rounds.num_samples(self._number) if self.num_samples else 0

    @property
    def weight(self) -> float:
        """Weight of the current slice: differs from its number of samples where it is of a round of another size."""
        return self.num_samples * self.rescale

    @property
    def rescale(self) -> float:
        """Return the ratio of this round's number of samples to that of the current slice's round."""
        if self._taken is None:
            return 1.0
        return self.rounds.num_samples(self._number) / self.rounds.num_samples(self._taken.round.number)

    def own_next(self, rank: int) -> Iterator[list[int]]:
        """Yield the slices of this worker's own shares from here on, which it gets unless other workers take them."""
        number, index = self._number, 0
        if self._taken is not None and self._taken.round.number == number:
            number, index = (number, self._taken.index + 1) if self._taken.home == rank else (number + 1, 0)
        return self.rounds.slices_of(rank, number, index)

    def claim_next(self) -> bool:
        """Claim the next slice of the current clock; return whether this worker gets one. Blocks for one round trip."""
        if not self.num_samples:
            return False
        if self._next is None:
            self._next = self._answer()
        self._has_stepped = self._next.word != "piece"
        return not self._has_stepped

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the sample indices of each slice that this worker is given."""
        while True:
            answer = self._next or self._answer()
            self._next, self.num_samples = None, 0
            match answer.word:
                case "piece":
                    indices = self.rounds.slice(answer.round.number, answer.home, answer.index)
                    self._taken, self.num_samples, self._has_stepped = answer, len(indices), False
                    if answer.num_left >= _MANY * self.num_workers:
                        self._request()
                    yield indices
                case "rest":
                    self._finish_round()
                case "elsewhere" if answer.round.epoch == self.epoch:
                    self._number = answer.round.number
                case _:
                    return

    def _request(self) -> None:
        sizes = self.rounds.sizes(self._number)
        self._requested = self.slice_queue.request(WorkRound(self.epoch, self._number), sizes, self.rounds.start)

    def _answer(self) -> WorkAnswer:
        """Return the next answer for this worker; blocks until it is there.

        For a worker that was started again, the answer may name another first batch of the rounds.
        """
        if self._requested is None:
            self._request()
        requested, self._requested = self._requested, None
        assert requested is not None, "asked above"
        entry = self.slice_queue.wait_answer(requested, WorkRound(self.epoch, self._number))
        if entry.answer.round.epoch == self.epoch:
            self.rounds = self.rounds.starting(entry.start)
        return entry.answer

    def _finish_round(self) -> None:
        """Go on to the next round; a clock in which this worker got no slice is finished without a gradient."""
        if not self._has_stepped:
            self._has_stepped = True  # before the clock ends: a snapshot that is due then has the position after it
            self.on_missing()
        self._number, self._has_stepped = self._number + 1, False


class SlicedLoader(PositionedLoader[_Sample]):
    """Sharded loader whose batches are slices, shared out while workers run. Iterating it is one epoch.

    `batch_size` is the number of samples in all slices of a worker's share of a clock.
    """

    def __init__(
        self, loader: DataLoader[_Sample], sharding: Sharding, slices: int, slicing: Slicing, cut: DataCut | None = None
    ) -> None:
        self._whole = ShardedLoader(loader, sharding, cut)
        super().__init__(loader, self._whole.own_sampler)
        _check(loader, sharding, slices, slicing)
        self._sharding = sharding
        self._slices = slices
        self._slicing = slicing
        self._work = slicing.name_next()
        self._next_pass = 0  # as the server counts
        self._walk: SliceWalk | None = None  # the pass under way
        self._has_told = False  # of a slice without a step

    def __repr__(self) -> str:
        return f"SlicedLoader({self._slices} slices a worker of {self._whole!r})"

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return self._whole.epoch

    def __len__(self) -> int:
        """Return the number of slices in this worker's own shares of one epoch; it may get more, or fewer."""
        num_done, sharding = self._whole.tracker.next.num_done, self._sharding
        return num_slices(self._whole.order.unshuffled()[num_done + sharding.rank :: sharding.size], self._slices)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by this epoch from the next pass on, from its start unless under way; call it on all workers."""
        self._whole.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # pyright: ignore[reportIncompatibleMethodOverride] - torch names its class
        """Yield the slices of one epoch; while gradients are off, this worker's own batches, whole."""
        if not torch.is_grad_enabled():
            yield from self._whole
            return
        walk, tracker = self._begin(), self._whole.tracker
        self._walk = walk
        try:
            for batch in self._sharding.timed(self._whole.load(walk)):
                self._sharding.on_samples(walk.num_samples)
                yield batch
                if walk.lacks_step and not self._has_told:
                    self._has_told = True
                    tell_of_lacking_step(self._sharding)
        except BaseException:  # also GeneratorExit, after a break
            self._slicing.leave()
            raise
        finally:
            walk.num_samples = 0
            self._note()
            self._walk = None
        tracker.end()

    def state_dict(self) -> dict[str, int]:
        """Return the position, as plain numbers: the end of the last clock that this worker has finished.

        It is the same on all workers that have finished the same number of clocks; call it after `step()`. Another
        number of workers may continue there, with other slices or without.
        """
        self._note()
        return self._whole.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next pass; all workers need the same state.

        Raises:
            UsageError: the state is of another source, seed or partition; the message names the values.
        """
        self._whole.load_state_dict(state)

    def _note(self) -> None:
        """Record the position of the current pass."""
        if self._walk is not None:
            self._whole.tracker.reach(self._walk.num_done)

    def _begin(self) -> SliceWalk:
        """Start a pass. The server knows it by its epoch, or by the next number where that epoch was read before."""
        sharding, whole, number = self._sharding, self._whole, max(self._next_pass, self._whole.epoch)
        slice_queue = self._slicing.open_queue(self._work, whole.order, sharding.seed, self._slices, whole.epoch)
        rounds = EpochRounds(whole.batches(), sharding.size, self._slices, whole.tracker.next.num_done)
        walk = SliceWalk(slice_queue, rounds, number, sharding.on_missing, sharding.size)
        self._slicing.start(walk)
        self._next_pass = number + 1
        whole.tracker.start_pass()
        return walk


def tell_of_lacking_step(sharding: Sharding) -> None:
    """Tell that a loop over slices or leased batches has left one without a step."""
    sharding.tell(
        f"worker {sharding.rank}: a slice or a leased batch had no step() before the next one: its gradients count for "
        "nothing, or with the weight of the next one alone where they were added to its own. Step after each of them; "
        "to add up the gradients of several batches, leave slices out, or give feed leases=False."
    )


def slice_source(
    source: _Source, sharding: Sharding, slices: int, slicing: Slicing, cut: DataCut | None = None
) -> _Source:
    """Return a loader over this worker's slices of `source`, used in its place; see `paceline.shard`.

    Raises:
        UsageError: `source` is not a loader, or does not support slices.
    """
    if slicing.is_elastic and not isinstance(source, DataLoader):
        raise UsageError(
            f"the workers of this job come and go, and a part of this {type(source).__name__} would not be read while "
            "its worker is not there: shard a DataLoader, or use paceline.feed."
        )
    if not isinstance(source, DataLoader):
        raise UsageError(f"slices are parts of the batches of a DataLoader, and this is a {type(source).__name__}.")
    if (cut or DataCut()).partition not in (None, "strided"):
        raise UsageError(
            "slices go to the workers that have time for them, from batches in their order: leave out partition."
        )
    return cast("_Source", SlicedLoader(cast("DataLoader[Any]", source), sharding, slices, slicing, cut))


def _check(loader: DataLoader[Any], sharding: Sharding, slices: int, slicing: Slicing) -> None:
    if not 1 <= slices <= cast("int", loader.batch_size):
        raise UsageError(
            f"slices is {slices}, expected 1 to {loader.batch_size}: a slice has a sample at least, and the batch of "
            f"the loader, which is cut, has {loader.batch_size}."
        )
    if loader.num_workers:
        raise UsageError(
            f"the loader has num_workers={loader.num_workers}, but which samples a worker gets is known only when it "
            "asks for the next slice: make it with num_workers=0, or leave slices out."
        )
    if sharding.size != slicing.num_workers:
        raise UsageError(
            f"the model is cut over the workers, {slicing.num_workers // sharding.size} for each replica, which would "
            "have to take the same slices: leave slices out."
        )
