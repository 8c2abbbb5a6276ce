"""What becomes of pushes that are cut up and summed with others on their way."""

from __future__ import annotations

import math
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from paceline.errors import PacelineError
from paceline.node.outgoing import PushOutcome, promise


@dataclass(slots=True)
class _Promise:
    push: int
    future: Future[PushOutcome] = field(default_factory=lambda: promise(PushOutcome))
    last_chunk: int = -1  # the one that had the last of it, once that is sent
    refused: str = ""

    def was_sent_before(self, chunk: int) -> bool:
        return 0 <= self.last_chunk < chunk


@dataclass(slots=True)
class Promises:
    """Futures of pushes, each of which goes out in chunks that may have parts of others too.

    Pushes and chunks are numbered from 0. A push is answered when all of it was sent and every chunk up to then is
    answered; if one of these was refused that may have had some of it, so was the push.
    """

    # Both in the order of the pushes: those of which something waits, and those that are sent and not answered.
    _waiting: deque[_Promise] = field(default_factory=deque[_Promise])
    _sent: deque[_Promise] = field(default_factory=deque[_Promise])
    _under_way: set[int] = field(default_factory=set[int])
    _num_chunks: int = 0

    def make(self, push: int) -> Future[PushOutcome]:
        """Return the future of a push, the newest."""
        made = _Promise(push)
        self._waiting.append(made)
        return made.future

    def sent(self, answer: Future[PushOutcome], oldest_waiting: int, num_pushes: int) -> None:
        """Note that a chunk of the pushes below `num_pushes` was sent, and nothing waits of those before the oldest."""
        chunk, self._num_chunks = self._num_chunks, self._num_chunks + 1
        self._under_way.add(chunk)
        while self._waiting and self._waiting[0].push < oldest_waiting:
            moved = self._waiting.popleft()
            moved.last_chunk = chunk
            self._sent.append(moved)
        answer.add_done_callback(lambda answered: self._answered(chunk, answered, num_pushes))

    def abandon(self, error: PacelineError) -> None:
        """End all futures with an error."""
        self._under_way.clear()
        for queue in (self._sent, self._waiting):
            while queue:
                queue.popleft().future.set_exception(error)

    def _answered(self, chunk: int, answer: Future[PushOutcome], num_pushes: int) -> None:
        if answer.exception() is not None:
            return  # everything is over, and `abandon` says so
        self._under_way.discard(chunk)
        refused = answer.result().reason
        for made in (*self._sent, *self._waiting) if refused else ():
            if made.push < num_pushes and not made.was_sent_before(chunk):
                made.refused = refused
        oldest = min(self._under_way, default=math.inf)
        while self._sent and self._sent[0].last_chunk < oldest:
            ended = self._sent.popleft()
            ended.future.set_result(PushOutcome(applied=not ended.refused, reason=ended.refused))
