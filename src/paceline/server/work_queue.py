"""Work queues of dynamic sharding: server 0 alone assigns pieces of work, so each piece is assigned in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from paceline.core.messages import PushId
from paceline.core.work_queue import Life, WorkAnswer, WorkQueue, WorkRound
from paceline.errors import UsageError
from paceline.transport.base import EMPTY
from paceline.wire.requests import ClaimWork, RequestDone, RequestFailed, WorkQueueEntry, require_short

Send = Callable[[int, int, object, memoryview], None]

MAX_WORKS = 1024  # queues at a time
MAX_PIECES = 1 << 20  # unassigned pieces of one queue
MAX_ALL_PIECES = 1 << 22  # unassigned pieces of all queues
MAX_HOMES = 1 << 16  # shares of a round
MAX_TERMS = 64  # numbers that describe an epoch
MAX_OPEN_ROUNDS = 1 << 12  # rounds of one queue with unassigned pieces
MAX_EPOCHS = 64  # epochs of one queue that are agreed on and not known to be over


class _Agreement(msgspec.Struct, frozen=True):
    """The settings of an epoch that all its workers share, and the rank that sent them first."""

    terms: tuple[int, ...]
    start: int
    rank: int


@dataclass(slots=True)
class WorkQueueHost:
    """Answers claims of work, at once or as soon as the answer is known.

    The pieces that a worker holds count as done when one of its updates is applied, which contains all that it claimed
    before, or when it goes on to another round: so pieces of a refused push are not assigned again.
    A worker has one claim open at a time, and repeats it until it is answered: a copy gets the same answer.
    """

    send: Send
    _works: dict[str, WorkQueue] = field(default_factory=dict[str, WorkQueue])
    _at: dict[Life, str] = field(default_factory=dict[Life, str])  # the queue from which each worker claims
    # By queue and epoch. Invariant: contains every epoch that has a pending claim.
    _agreements: dict[tuple[str, int], _Agreement] = field(default_factory=dict[tuple[str, int], _Agreement])
    # Invariant: a worker is in at most one of these, one that has left in none.
    _waiting: dict[Life, ClaimWork] = field(default_factory=dict[Life, ClaimWork])
    _answers: dict[Life, tuple[int, memoryview]] = field(default_factory=dict[Life, tuple[int, memoryview]])
    _ended: set[Life] = field(default_factory=set[Life])
    is_used: bool = False  # a worker has made a claim

    def claim(self, life: Life, request: ClaimWork) -> None:
        """Add a claim; `release` answers it.

        Raises:
            UsageError: this worker divides the work in another way than the others.
        """
        self.is_used = True
        number, answer = self._answers.get(life, (0, EMPTY))
        if life in self._ended:
            self.send(*life, RequestFailed(request.number, f"worker {life[0]} takes no part"), EMPTY)
        elif request.number == number:
            self.send(*life, RequestDone(number), answer)
        elif request.number > number:
            self._require_valid(request)
            self._require_agreement(life, request)
            self._go_to(life, request.work)
            self._waiting[life] = request

    def release(self) -> None:
        """Answer the claims whose answer is known now, in the order of ranks.

        Each answer may decide claims of lower ranks, so this repeats until none is left.
        """
        while [life for life, request in sorted(self._waiting.items()) if self._answers_now(life, request)]:
            pass

    def _answers_now(self, life: Life, request: ClaimWork) -> bool:
        start = self._agreements[request.work, request.epoch].start
        answer = WorkAnswer("elsewhere", WorkRound(request.epoch, 0))  # claimed again from there
        if start == request.start:
            place = WorkRound(request.epoch, request.round)
            answer = self._works[request.work].claim(life, place, request.sizes, request.clock)
        if answer is None:
            return False
        del self._waiting[life]
        content = memoryview(msgspec.msgpack.encode(WorkQueueEntry(answer, start)))
        self._answers[life] = request.number, content
        self.send(*life, RequestDone(request.number), content)
        return True

    def waiting(self) -> list[tuple[int, str, list[int]]]:
        """Return which workers wait for an answer, about which work, and which workers hold pieces of that."""
        return [
            (rank, request.work, self._works[request.work].holders()) for (rank, _), request in self._waiting.items()
        ]

    def settle(self, push_ids: Iterable[PushId]) -> None:
        """Count pieces as done of workers whose pushes are applied: they have claimed none since they sent these."""
        for push_id in push_ids:
            life = push_id.worker, push_id.incarnation
            work = self._at.get(life)
            if work is not None:
                self._works[work].settle(life)
                self.release()

    def remove_worker(self, life: Life) -> None:
        """Make the unfinished pieces of a worker that has left available to others."""
        self._ended.add(life)
        self._waiting.pop(life, None)
        self._answers.pop(life, None)
        self._at.pop(life, None)
        for work_queue in self._works.values():
            work_queue.end_life(life)

    def _go_to(self, life: Life, work: str) -> None:
        """Move a worker to this queue; its pieces of another queue count as done."""
        before = self._at.get(life, work)
        if before != work:
            self._works[before].settle(life)
        self._works.setdefault(work, WorkQueue())
        self._at[life] = work

    def _require_valid(self, request: ClaimWork) -> None:
        """Raise UsageError for numbers that no valid claim can have."""
        require_short("work", request.work)
        if len(request.sizes) > MAX_HOMES or len(request.terms) > MAX_TERMS:
            raise UsageError(
                f"a round of {request.work} has {len(request.sizes)} shares and {len(request.terms)} terms, expected "
                f"at most {MAX_HOMES} and {MAX_TERMS}"
            )
        work_queue = self._works.get(request.work)
        num_free = 0 if work_queue is None else work_queue.num_free
        numbers = (request.epoch, request.round, request.start, request.clock, *request.sizes)
        if min(numbers) < 0 or sum(request.sizes) + num_free > MAX_PIECES:
            raise UsageError(
                f"round {request.round} of epoch {request.epoch} of {request.work} has {sum(request.sizes)} pieces and "
                f"{num_free} are left of earlier ones: expected at most {MAX_PIECES} together, and no number below 0"
            )
        num_rounds = 0 if work_queue is None else work_queue.num_rounds
        num_pieces = sum(request.sizes) + sum(other.num_free for other in self._works.values())
        if num_pieces > MAX_ALL_PIECES or num_rounds >= MAX_OPEN_ROUNDS:
            raise UsageError(
                f"{num_pieces} pieces of all work and {num_rounds} rounds of {request.work} would be free at a time, "
                f"expected at most {MAX_ALL_PIECES} and {MAX_OPEN_ROUNDS}"
            )
        if work_queue is None and len(self._works) >= MAX_WORKS:
            raise UsageError(
                f"the slices of {MAX_WORKS} loaders are dealt out already: make each loader once, before the loop over "
                "epochs, and not anew in every turn"
            )

    def _require_agreement(self, life: Life, request: ClaimWork) -> None:
        """Raise UsageError if settings or start differ from other workers'; a restarted worker may start later."""
        begins, works = life[1] == 0, {work for work, _ in self._agreements}
        if (
            request.work,
            request.epoch,
        ) not in self._agreements:  # older epochs are over and do not start again
            kept = {(waiting.work, waiting.epoch) for waiting in self._waiting.values()}
            self._agreements = {
                (work, epoch): agreed
                for (work, epoch), agreed in self._agreements.items()
                if work != request.work or epoch >= request.epoch - 1 or (work, epoch) in kept
            }
            if sum(work == request.work for work, _ in self._agreements) >= MAX_EPOCHS:
                raise UsageError(f"{MAX_EPOCHS} epochs of {request.work} are begun and not over: finish one first")
        start = request.start if begins or request.work not in works else 0  # only the first epoch starts in the middle
        new = _Agreement(request.terms, start, life[0])
        agreed = self._agreements.setdefault((request.work, request.epoch), new)
        if agreed.terms != request.terms:
            raise UsageError(
                f"workers {agreed.rank} and {life[0]} do not cut {request.work} alike: (samples, batch size, "
                f"drop last, shuffled, seed, slices, epoch) is {agreed.terms} there and {request.terms} here. "
                "Give all workers the same loader."
            )
        if begins and agreed.start != request.start:
            raise UsageError(
                f"workers {agreed.rank} and {life[0]} do not begin {request.work} alike: after {agreed.start} batches "
                f"of epoch {request.epoch} there and after {request.start} here. Give all workers the same state."
            )
