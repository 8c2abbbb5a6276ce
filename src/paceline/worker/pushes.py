"""Pushes of dense tables in flight: their memory, and the servers that have not answered yet."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, TypeVar
from weakref import WeakKeyDictionary

import msgspec
from msgspec.structs import replace
from torch import Tensor

from paceline.core.effects import Release
from paceline.core.exactly_once import WINDOW
from paceline.core.messages import Push
from paceline.core.worker import WorkerCore
from paceline.errors import PacelineError, ProtocolBug, UsageError
from paceline.transport.base import Transport
from paceline.transport.buffer_pool import poison
from paceline.update.dtypes import torch_dtype
from paceline.update.placement import as_tensor
from paceline.update.summing import num_nonfinite
from paceline.update.table import TableSpec
from paceline.wire.messages import PushFrame
from paceline.wire.send_queue import SendOrder
from paceline.worker.factored import FactoredPart

T = TypeVar("T")

_PAGE_BYTES: Final = 4096
_LEAST_PIECE_BYTES: Final = 128 << 10
_MOST_PIECES: Final = 32

NONFINITE_ADVICE = (
    "See whether the loss is finite, lower the learning rate, clip gradients, or declare nonfinite='zero'."
)


def pending_future(kind: type[T]) -> Future[T]:
    """Return a future for an answer of servers; it cannot be cancelled, as its message may be sent already."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


class PushOutcome(msgspec.Struct, frozen=True):
    """How a push ended: applied everywhere, or refused with a reason.

    `applied_on`: the ranks of servers that have applied their part of a push that others refused. Not empty only where
    updates are visible on arrival, after a refusal that a worker cannot foresee: each server then applies its part when
    it arrives, and keeps it.
    """

    applied: bool
    reason: str = ""
    applied_on: tuple[int, ...] = ()


_APPLIED: Final = PushOutcome(applied=True)


@dataclass(slots=True, eq=False)
class PendingPush:
    """A push in flight. It ends under the lock of the worker, `lock`."""

    lock: threading.Condition
    outcome: PushOutcome | None = None
    error: PacelineError | None = None
    _notes: list[Callable[[PushOutcome], None]] = field(default_factory=list[Callable[[PushOutcome], None]])
    _future: Future[PushOutcome] | None = None

    def end(self, outcome: PushOutcome | None, error: PacelineError | None = None) -> None:
        """Note how it has ended."""
        self.outcome, self.error = outcome, error
        if outcome is not None and not outcome.applied:
            for note in self._notes:
                note(outcome)
        if self._future is not None:
            self._settle(self._future)

    def when_refused(self, note: Callable[[PushOutcome], None]) -> None:
        """Have `note` called with the outcome, under the lock, if that is a refusal."""
        with self.lock:
            if self.outcome is None:
                self._notes.append(note)
            elif not self.outcome.applied:
                note(self.outcome)

    @property
    def future(self) -> Future[PushOutcome]:
        """How it ends, as a future; made on demand, as a training step needs none."""
        with self.lock:
            if self._future is None:
                self._future = pending_future(PushOutcome)
                self._settle(self._future)
            return self._future

    def _settle(self, future: Future[PushOutcome]) -> None:
        if self.outcome is not None:
            future.set_result(self.outcome)
        elif self.error is not None:
            future.set_exception(self.error)


@dataclass(slots=True)
class Answers:
    """The answers of servers to the parts of one push."""

    _refusals: dict[int, str] = field(default_factory=dict[int, str])  # by server
    applied_on: list[int] = field(default_factory=list[int])  # servers

    def note(self, effect: Release) -> None:
        """Note the final answer of a server to its part."""
        if effect.refused:
            self._refusals[effect.server] = effect.refused
        else:
            self.applied_on.append(effect.server)

    @property
    def refused(self) -> bool:
        """Whether some server refused its part."""
        return bool(self._refusals)

    def outcome(self) -> PushOutcome:
        """Return how the push ended, once all servers have answered."""
        if not self._refusals:
            return _APPLIED
        server, reason = next(iter(self._refusals.items()))  # later refusals may only follow from the first
        ranks = tuple(sorted(self.applied_on))
        if ranks:
            where = ", ".join(map(str, ranks))
            reason = f"server {server} refused its part: {reason}; it is applied on server {where}, and stays there"
        return PushOutcome(applied=False, reason=reason, applied_on=ranks)


def finished_push(outcome: PushOutcome) -> Future[PushOutcome]:
    """Return a future that holds this outcome already."""
    future = pending_future(PushOutcome)
    future.set_result(outcome)
    return future


class PushBuffer(msgspec.Struct, frozen=True, eq=False, weakref=True):
    """Memory of one push of a table, sent to all servers from here; `gradient` is (elements of the table,).

    `parts` are those of servers, once it has been used.
    """

    memory: memoryview
    gradient: Tensor
    parts: dict[int, memoryview] = msgspec.field(default_factory=dict[int, memoryview])


def piece_ends(size_bytes: int) -> list[int]:
    """Return where the pieces of a push end: a few dozen, but none so short that its frame costs more than it.

    Values leave once the first piece has come from all workers, and the last ones after the last piece: there, pieces
    are shorter.

    >>> [end >> 10 for end in piece_ends(1 << 20)]
    [32, 96, 224, 352, 480, 608, 736, 864, 928, 992, 1024]
    >>> len(piece_ends(100_000_000))
    35
    """
    pages = -(-size_bytes // (_MOST_PIECES * _PAGE_BYTES))
    piece = max(_LEAST_PIECE_BYTES, pages * _PAGE_BYTES)
    short = -(-piece // (4 * _PAGE_BYTES)) * _PAGE_BYTES
    if size_bytes < 2 * piece or short == piece:
        return [*range(piece, size_bytes, piece), size_bytes]
    tail = size_bytes - 3 * short
    return [short, *range(3 * short, tail, piece), tail, size_bytes - short, size_bytes]


def allocate(transport: Transport, spec: TableSpec) -> PushBuffer:
    """Return new memory for pushes of a table."""
    dtype = torch_dtype(spec.dtype)
    memory = transport.allocate(spec.numel * dtype.itemsize)
    return PushBuffer(memory, as_tensor(memory, dtype))


@dataclass(slots=True)
class Outgoing:
    """One push from the user's call to the last server's answer."""

    frame: PushFrame
    buffer: PushBuffer
    bodies: dict[int, memoryview]  # by server, parts of the buffer. Invariant: exactly those that have not answered
    pending: PendingPush
    in_pieces: set[int]  # servers that are sent their part in pieces, and have not been sent it yet
    factored: dict[int, FactoredPart]  # by server, what it is sent in the place of its part of the buffer
    order: SendOrder = field(default_factory=SendOrder)  # of the pieces
    answers: Answers = field(default_factory=Answers)


@dataclass(slots=True)
class ClockCounts:
    """Counts of the pushes of a table that are in flight, by the clock in which they were made."""

    _counts: dict[int, int] = field(default_factory=dict[int, int])

    def add(self, push: Push) -> None:
        """Count a push that is sent."""
        self._counts[push.clock] = self._counts.get(push.clock, 0) + 1

    def remove(self, push: Push) -> None:
        """Stop counting a push that is answered."""
        self._counts[push.clock] -= 1
        if not self._counts[push.clock]:
            del self._counts[push.clock]

    def of_clock(self, clock: int) -> int:
        """Return how many of the pushes were made in this clock."""
        return self._counts.get(clock, 0)

    def has_older(self, clock: int) -> bool:
        """Return whether one was made before this clock."""
        return any(made < clock for made in self._counts)


def may_push(core: WorkerCore, table: str) -> bool:
    """Return whether servers accept one more push; raises UsageError if none before this worker finishes its clock."""
    if core.may_push(table):
        return True
    if core.waits_for_own_clock(table):
        raise UsageError(
            f"worker {core.settings.sender.worker} has made {WINDOW} pushes of table '{table}' in clock {core.clock}, "
            "which servers keep until it is complete: push more at a time, or finish clocks more often."
        )
    return False


def require_fit(spec: TableSpec, gradient: Tensor) -> None:
    """Raise UsageError for a gradient of a wrong shape or dtype."""
    if gradient.shape != (spec.numel,) or gradient.dtype != torch_dtype(spec.dtype):
        raise UsageError(
            f"a push to table '{spec.name}' is {tuple(gradient.shape)} {gradient.dtype}, "
            f"expected ({spec.numel},) {torch_dtype(spec.dtype)}"
        )


def objection(spec: TableSpec, gradient: Tensor, *, is_sent: bool = False) -> str:
    """Return why a gradient that fits its table is not pushed, or not applied if it is sent; "" if it is finite."""
    if spec.nonfinite in ("zero", "ignore"):
        return ""
    num_bad = num_nonfinite(gradient)
    if not num_bad:
        return ""
    return (
        f"{num_bad} of {gradient.numel()} elements of the gradient for table '{spec.name}' are NaN or infinite"
        f"{_where(spec, gradient)}; it was not {'applied' if is_sent else 'sent'}. {NONFINITE_ADVICE}"
    )


def _where(spec: TableSpec, gradient: Tensor) -> str:
    """Name the parameters with nonfinite values, where a table has several."""
    parts = zip(spec.segments, gradient.split([segment.numel for segment in spec.segments]), strict=True)
    bad = [segment.name for segment, part in parts if not part.isfinite().all()]
    return "" if bad == [spec.name] else f", in {some_parameters(bad, len(spec.segments))}"


def some_parameters(bad: Sequence[str], num: int) -> str:
    """Name the first of some parameters, and count the others.

    >>> some_parameters(["0.weight", "0.bias"], 4)
    "parameter '0.weight' and 1 more of 4"
    """
    return f"parameter '{bad[0]}'" + (f" and {len(bad) - 1} more of {num}" if len(bad) > 1 else "")


@dataclass(slots=True)
class Pushes:
    """The pushes of one dense table: those in flight, and their memory. Used under the lock of the worker node.

    At most `limit` buffers are kept, and as many pushes are in flight. Where servers hold pushes until their clock is
    complete (`held`), those of the current clock do not count: they remain in flight until this worker finishes it.
    A buffer that is dropped instead of returned is freed, and not reused.
    """

    limit: int
    held: bool
    make: Callable[[], PushBuffer]
    poisons: bool = False
    _free: list[PushBuffer] = field(default_factory=list[PushBuffer])
    # -> shown. Of one that a call has dropped, as it was interrupted, nothing is left here.
    _lent: WeakKeyDictionary[PushBuffer, bool] = field(default_factory=WeakKeyDictionary[PushBuffer, bool])
    _under_way: dict[int, Outgoing] = field(default_factory=dict[int, Outgoing])  # by sequence number
    _counts: ClockCounts = field(default_factory=ClockCounts)

    def __len__(self) -> int:
        """Count the pushes in flight."""
        return len(self._under_way)

    @property
    def num_buffers(self) -> int:
        """The number of buffers, free and lent."""
        return len(self._free) + len(self._lent)

    def has_slot(self, clock: int) -> bool:
        """Return whether one more push can be made in this clock without waiting for earlier ones."""
        is_free = bool(self._free) or self.num_buffers < self.limit
        return is_free or (self.held and not self._counts.has_older(clock))

    def lend(self, *, shown: bool) -> PushBuffer:
        """Return a buffer: the one returned last, else a new one, also beyond the limit.

        The content of one that is `shown` may be read after its push, until it is overwritten: a gradient lies in it.
        """
        buffer = self._free.pop() if self._free else self.make()
        self._lent[buffer] = shown
        return buffer

    def reclaim(self, buffer: PushBuffer) -> None:
        """Return a lent buffer: no push in flight needs its content any more.

        Raises:
            ProtocolBug: it is not lent.
        """
        shown = self._lent.pop(buffer, None)
        if shown is None:
            raise ProtocolBug(f"memory of {buffer.memory.nbytes} bytes for pushes was given back twice")
        if self.poisons and not shown:
            poison(buffer.memory)
        if self.num_buffers < self.limit:
            self._free.append(buffer)

    def num_held(self, clock: int) -> int:
        """Count the pushes that are applied when this clock is finished."""
        return self._counts.of_clock(clock) if self.held else 0

    def prepare(
        self,
        buffer: PushBuffer,
        bodies: dict[int, memoryview],
        frame: PushFrame,
        pending: PendingPush,
        in_pieces: Collection[int] = (),
        factored: dict[int, FactoredPart] | None = None,
    ) -> None:
        """Add a push that is about to be sent, in pieces or with factors to some servers."""
        self._under_way[frame.push.id.seq] = Outgoing(frame, buffer, bodies, pending, set(in_pieces), factored or {})
        self._counts.add(frame.push)

    def outgoing(self, push: Push) -> Outgoing | None:
        """Return a push in flight; None if it is answered or abandoned."""
        return self._under_way.get(push.id.seq)

    def release(self, effect: Release, explain: Callable[[Tensor], str] = lambda _: "") -> Outgoing | None:
        """Note the answer of a server; once all have answered, free the buffer and return the push.

        `explain` says of a gradient that was not looked at here what may be wrong with it, if a server refuses it.
        """
        outgoing = self._under_way.get(effect.id.seq)
        if outgoing is None:
            return None
        if effect.refused and not outgoing.frame.screened:  # now, as long as the gradient is there
            effect = replace(effect, refused=explain(outgoing.buffer.gradient) or effect.refused)
        outgoing.bodies.pop(effect.server)
        outgoing.answers.note(effect)
        if outgoing.bodies:
            return None
        self.reclaim(outgoing.buffer)
        self._counts.remove(outgoing.frame.push)
        return self._under_way.pop(effect.id.seq)

    def abandon(self, error: PacelineError) -> None:
        """End all pushes with an error: whether they were applied is unknown."""
        while self._under_way:
            _, outgoing = self._under_way.popitem()
            outgoing.pending.end(None, error)
        self._counts = ClockCounts()

    def close(self) -> None:
        """Release all buffers, except what the user still uses."""
        self._free.clear()
        self._lent.clear()
