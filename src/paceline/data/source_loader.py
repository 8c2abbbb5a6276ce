"""Loader over a declared source. Data servers make its batches; without data servers this process does."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import msgspec
import torch

from paceline.data.order import Batches, EpochOrder, EpochRounds, PositionTracker, num_slices, terms_of
from paceline.data.partition import Sharding
from paceline.data.service.client import MAX_PREFETCH
from paceline.data.service.messages import MAX_SAMPLES
from paceline.data.slicing import SliceWalk, Slicing, tell_of_lacking_step
from paceline.data.sources.batch import Batch, BatchRequest
from paceline.data.sources.reader import Reader
from paceline.data.steps_of_pass import StepsOfPass
from paceline.errors import UsageError
from paceline.observe.trace import Epoch, Trace


@dataclass(slots=True)
class SampleTally:
    """Sample counts of one pass.

    Args:
        worker: rank of the worker that counts.
        epoch: of the pass.
        num_samples: returned to the loop.
        num_skipped: left out because they could not be decoded.
        num_again: read again after a worker died with them. Under bsp their updates count once all the same; where
            updates show on arrival, servers may have applied some of them twice.

    Samples that were read but not returned, because the loop was left, count as skipped and as read again all the same.
    """

    worker: int
    epoch: int
    num_samples: int = 0
    num_skipped: int = 0
    num_again: int = 0

    def tell(self, trace: Trace, tell: Callable[[str], None], reasons: tuple[str, ...]) -> None:
        """Record the counts, and report skipped samples, with the first reason, and those read again."""
        trace.record(
            Epoch(time.monotonic(), self.worker, self.epoch, self.num_samples, self.num_skipped, self.num_again)
        )
        trace.flush()  # so that a report on stderr has its record, also if this process is killed
        if self.num_skipped:
            why = f": {reasons[0]}" if reasons else ""
            tell(
                f"worker {self.worker} left out {self.num_skipped} of {self.num_samples + self.num_skipped} records of "
                f"epoch {self.epoch} that could not be decoded{why}"
            )
        if self.num_again:
            tell(
                f"worker {self.worker} was dealt {self.num_again} samples of epoch {self.epoch} again, which a worker "
                "had that has died"
            )


@dataclass(slots=True)
class SlicedBatches:
    """The batches of a loop over slices, and what optimizers need to know of them; a `ClockSlices`.

    A slice without a decodable record is left out. So `claim_next` reads the slice after the current one, because the
    step has to know whether it is the last of its clock.
    """

    walk: SliceWalk
    reader: Reader
    rank: int
    prefetch: int
    tally: SampleTally
    skips: bool  # whether records that cannot be decoded are left out
    num_samples: int = 0  # in the current batch
    _rescale: float = 1.0  # of the current batch, see `SliceWalk.rescale`
    _held: tuple[Batch, float] | None = None  # the next batch, once `claim_next` has read it
    _pieces: Iterator[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        """Begin the walk."""
        self._pieces = iter(self.walk)
        self._expect()

    @property
    def weight(self) -> float:
        """Weight of the current batch; see `SliceWalk.weight`."""
        return self.num_samples * self._rescale

    @property
    def num_expected(self) -> int:
        """Number of samples of all workers in the current clock; 0 if records may be left out."""
        return 0 if self.skips or not self.num_samples else self.walk.num_expected

    @property
    def lacks_step(self) -> bool:
        """Whether no step came after the batch that was given last."""
        return self._held is None and self.walk.lacks_step

    def claim_next(self) -> bool:
        """Claim the next batch of the current clock; return whether this worker gets one. Blocks until it is read."""
        if not self.num_samples:
            return False
        while self._held is None and self.walk.claim_next():
            batch = self._read(next(self._pieces))
            self._held = (batch, self.walk.rescale) if batch.num_samples else None
        return self._held is not None

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches that have samples."""
        while True:
            coming, self._held = self._held or self._next(), None
            if coming is None:
                return
            batch, self._rescale = coming
            self.num_samples = batch.num_samples
            self.tally.num_samples += batch.num_samples
            yield batch

    def _next(self) -> tuple[Batch, float] | None:
        batch = next((batch for batch in map(self._read, self._pieces) if batch.num_samples), None)
        return None if batch is None else (batch, self.walk.rescale)

    def _read(self, indices: list[int]) -> Batch:
        batch = self.reader.read(BatchRequest(self.tally.epoch, tuple(indices)))
        self.tally.num_skipped += batch.num_skipped
        if self.walk.is_again:
            self.tally.num_again += len(indices)
        self._expect()
        return batch

    def _expect(self) -> None:
        """Announce the likely next batches to the reader: those of this worker's own shares."""
        own = islice(self.walk.own_next(self.rank), self.prefetch + 1)
        self.reader.expect([BatchRequest(self.tally.epoch, tuple(indices)) for indices in own])


_FIXED: Final = "Or give paceline.feed leases=False: then every worker has a fixed share."


class FeedPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a source is cut into batches, and how these are assigned to workers.

    Args:
        batch_size: number of samples of a batch, a worker's share of one clock.
        shuffle: whether samples are shuffled, by seed and epoch.
        drop_last: leaves out a smaller last batch.
        leases: whether batches go to any worker that has time for them.
        slices: number of slices of a batch, which workers get one by one.
        prefetch: number of batches that are made before they are read.
        skips: whether records that cannot be decoded are left out.

    Raises:
        UsageError: an option is not valid.
    """

    batch_size: int
    shuffle: bool = False
    drop_last: bool = False
    leases: bool = True
    slices: int = 1
    prefetch: int = 2
    skips: bool = False

    def __post_init__(self) -> None:
        """Validate the options."""
        _check("batch_size", self.batch_size, 1, MAX_SAMPLES)
        _check("slices", self.slices, 1, self.batch_size)
        _check("prefetch", self.prefetch, 0, MAX_PREFETCH)
        for name, flag in (("shuffle", self.shuffle), ("drop_last", self.drop_last), ("leases", self.leases)):
            if not isinstance(flag, bool):  # pyright: ignore[reportUnnecessaryIsInstance] - it comes from callers
                raise UsageError(f"{name} is {flag!r}, expected True or False.")
        if self.slices > 1 and not self.leases:
            raise UsageError(
                f"slices={self.slices} are parts of a batch that workers get one by one: leave out leases=False, or "
                "slices."
            )


class FedLoader:
    """This worker's batches of a source that all workers share. Iterating it reads one epoch, or the rest of one.

    A pass while gradients are off is for evaluation: it reads this worker's own batches of a whole epoch, without
    leases, and leaves the position unchanged. Made by `paceline.feed`.
    """

    def __init__(self, reader: Reader, plan: FeedPlan, sharding: Sharding, slicing: Slicing, trace: Trace) -> None:
        self._reader = reader
        self._plan = plan
        self._sharding = sharding
        self._slicing = slicing
        self._trace = trace
        self._order = EpochOrder(reader.num_samples, plan.batch_size, plan.drop_last, plan.shuffle)
        self._check()
        sharding.note_size(self._order.num_batches, f"batches of a source of {self.num_samples} samples")
        self._tracker = PositionTracker(terms_of(self._order, sharding.seed), self._order.num_batches)
        self._work = slicing.name_next() if plan.leases else ""
        self._next_pass = 0  # as the server counts
        self._walk: SliceWalk | None = None  # of the current pass
        self._has_told = False  # of a leased batch without a step

    def __repr__(self) -> str:
        here, order = self._sharding, self._order
        return f"FedLoader({order.num_batches} batches of {order.batch_size}, worker {here.rank} of {here.size})"

    @property
    def num_samples(self) -> int:
        """Number of samples of the source, of all workers together."""
        return self._order.num_samples

    @property
    def batch_size(self) -> int:
        """Number of samples of a batch; the last one of an epoch may be smaller."""
        return self._order.batch_size

    @property
    def epoch(self) -> int:
        """Epoch of the next pass."""
        return self._tracker.next.epoch

    def __len__(self) -> int:
        """Return the number of this worker's own batches or slices in the next pass; it may get others with leases."""
        batches = self._order.unshuffled()[self._tracker.next.num_done + self._sharding.rank :: self._sharding.size]
        return num_slices(batches, self._plan.slices)

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by this epoch from the next pass on, from its start unless under way; call it on all workers."""
        self._tracker.set_epoch(epoch)

    def state_dict(self) -> dict[str, int]:
        """Return the position, as plain numbers; another number of workers may continue there.

        Without leases it includes, inside a loop, the current batch of every worker. With leases it is the end of the
        last clock that this worker has finished: call it after `step()`.
        """
        self._note()
        return self._tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at this position with the next pass; all workers need the same state.

        Raises:
            UsageError: the state is of another source, seed or way to cut it; the message names the values.
        """
        self._tracker.load_state_dict(state)

    def close(self) -> None:
        """Release files, connections and memory before the session does; batches stay valid."""
        self._reader.close()

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches of one epoch, or of the rest of one."""
        if self._plan.leases and torch.is_grad_enabled():
            yield from self._iterate_slices()
        else:
            yield from self.through(lambda batches: batches)

    # -- fixed shares ------------------------------------------------------------------------------------------------

    def through(self, stage: Callable[[Iterator[Any]], Iterator[Any]]) -> Iterator[Any]:
        """Yield the batches of one epoch through a stage that may read ahead; a batch counts when it is yielded.

        For a batch without a decodable record, a clock is finished without a gradient.

        Raises:
            UsageError: with leases, as the next batch is known only when it is requested.
        """
        epoch, size = self.epoch, self._sharding.size
        if not torch.is_grad_enabled():
            own = self._own(0, self._sharding.evaluation())
            yield from (batch.content for batch in self._read_all(epoch, own) if batch.num_samples)
            return
        if self._plan.leases:
            raise UsageError("the next batch is known only when it is requested: give feed leases=False.")
        own, tally = self._own(self._tracker.next.num_done, self._sharding), SampleTally(self._sharding.rank, epoch)
        num_rounds = -(-(self._order.num_batches - self._tracker.start_pass().num_done) // size)
        waiting: deque[Batch] = deque()  # read, and not yielded yet
        steps = StepsOfPass(self._sharding.clock)
        try:
            for content in self._sharding.timed(stage(_contents(self._read_all(epoch, own), waiting))):
                while not self._settle(waiting.popleft(), tally):
                    pass
                steps.begin_batch()
                yield content
                steps.end_batch()
            for batch in waiting:
                self._settle(batch, tally)
            if num_rounds > len(own) and (steps.others_step_again or self._sharding.joins_batches()):
                self._sharding.on_missing()
        finally:
            self._tell(tally)
        self._tracker.end()

    def _own(self, start: int, sharding: Sharding) -> Batches:
        """Return the batches of a share of the next epoch, from batch `start` of all workers on."""
        return self._order.batches(sharding.seed, self.epoch)[start + sharding.rank :: sharding.size]

    def _read_all(self, epoch: int, batches: Iterable[list[int]]) -> Iterator[Batch]:
        """Read batches one by one, while the following ones are made."""
        requests = (BatchRequest(epoch, tuple(indices)) for indices in batches)
        window = deque(islice(requests, self._plan.prefetch + 1))
        self._reader.expect(window)
        while window:
            batch = self._reader.read(window.popleft())
            window.extend(islice(requests, 1))
            self._reader.expect(window)
            yield batch

    def _settle(self, batch: Batch, tally: SampleTally) -> bool:
        """Count a batch; return whether it has samples."""
        tally.num_samples += batch.num_samples
        tally.num_skipped += batch.num_skipped
        self._tracker.reach(self._tracker.reached.num_done + self._sharding.size)
        if batch.num_samples:
            self._sharding.on_samples(batch.num_samples)
        else:
            self._sharding.on_missing()
        return batch.num_samples > 0

    # -- leases ------------------------------------------------------------------------------------------------------

    def _iterate_slices(self) -> Iterator[Any]:
        tally = SampleTally(self._sharding.rank, self.epoch)
        batches = self._begin(tally)
        self._walk = batches.walk
        try:
            for batch in self._sharding.timed(batches):
                self._sharding.on_samples(batch.num_samples)
                yield batch.content
                if batches.lacks_step and not self._has_told:
                    self._has_told = True
                    tell_of_lacking_step(self._sharding)
        except BaseException:  # also GeneratorExit, after a break
            self._slicing.leave()
            raise
        finally:
            batches.num_samples = 0
            self._note()
            self._walk = None
            self._tell(tally)
        self._tracker.end()

    def _begin(self, tally: SampleTally) -> SlicedBatches:
        """Start a pass. The server knows it by its epoch, or by the next number where that epoch was read before."""
        order, plan, sharding = self._order, self._plan, self._sharding
        number = max(self._next_pass, self.epoch)
        batches = order.batches(sharding.seed, self.epoch)
        rounds = EpochRounds(batches, sharding.size, plan.slices, self._tracker.next.num_done)
        slice_queue = self._slicing.open_queue(self._work, order, sharding.seed, plan.slices, self.epoch)
        walk = SliceWalk(slice_queue, rounds, number, sharding.on_missing, sharding.size)
        own = SlicedBatches(walk, self._reader, sharding.rank, plan.prefetch, tally, plan.skips)
        try:
            self._slicing.start(own)
        except UsageError as error:
            raise UsageError(f"{error} {_FIXED}") from error
        self._next_pass = number + 1
        self._tracker.start_pass()
        return own

    def _note(self) -> None:
        """Record the position of the current pass."""
        if self._walk is not None:
            self._tracker.reach(self._walk.num_done)

    # -- both --------------------------------------------------------------------------------------------------------

    def _tell(self, tally: SampleTally) -> None:
        """Report the sample counts of an epoch that has ended or was left."""
        tally.tell(self._trace, self._sharding.tell, self._reader.skipped().reasons)

    def _check(self) -> None:
        if not self._order.num_batches:
            why = (
                f"fewer than a batch of {self.batch_size}, and drop_last leaves out the rest"
                if self.num_samples
                else ""
            )
            raise UsageError(f"there is nothing to feed: the source has {self.num_samples} samples{why and ', '}{why}.")
        if self._sharding.is_elastic and not self._plan.leases:
            raise UsageError(
                "the workers of this job come and go, and a fixed share would not be read while its worker is not "
                "there: leave out leases=False."
            )
        num_workers = self._slicing.num_workers
        if self._plan.leases and self._sharding.size != num_workers:
            raise UsageError(
                f"the model is cut over the workers, {num_workers // self._sharding.size} for each replica, which "
                f"would have to be dealt the same batches. {_FIXED}"
            )


def _contents(batches: Iterator[Batch], waiting: deque[Batch]) -> Iterator[Any]:
    """Yield the contents of the batches that have samples; append every batch to `waiting`."""
    for batch in batches:
        waiting.append(batch)
        if batch.num_samples:
            yield batch.content


def _check(name: str, number: int, least: int, most: int) -> None:
    is_number = isinstance(number, int) and not isinstance(number, bool)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_number or not least <= number <= most:
        raise UsageError(f"{name} is {number!r}, expected a whole number from {least} to {most}.")
