"""Reader of batches from the data servers, which all make the same: requested ahead, from any connected server."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Final

import msgspec
import numpy as np

from paceline.core.settings import WAIT_TIMEOUT_S
from paceline.data.service.buffer_pool import borrowed, forget_writes
from paceline.data.service.messages import (
    MAX_RECIPE_BYTES,
    MAX_SAMPLES,
    MAX_UNANSWERED,
    NO_LENT_BUFFER,
    BatchAnswer,
    BatchFailed,
    OpenSource,
    ReadBatches,
    SourceOpened,
    decode,
    encode,
)
from paceline.data.sources.batch import Batch, BatchRequest, unpack
from paceline.data.sources.declared import BatchRecipe, encode_recipe
from paceline.data.sources.records import SkippedRecords
from paceline.errors import DeadlineExceeded, PacelineError, PeerError, UsageError
from paceline.stopwatch import Stopwatch
from paceline.transport.base import Frame, Transport
from paceline.wire.connection import PersistentConnection
from paceline.wire.messages import Hello
from paceline.worker.waits import ADVICE, About, Waits


@dataclass(slots=True, eq=False)
class PendingBatch:
    """A batch that has been requested, or is about to be.

    Args:
        server: the data server that was sent the request; None if there is none, or it is lost.
        urgent: whether the loop waits for it.
        outcome: the batch or the error.
    """

    request: BatchRequest
    number: int
    urgent: bool = False
    server: int | None = None
    outcome: Batch | PacelineError | None = None


@dataclass(slots=True)
class PendingBatches:
    """The batch requests of one loop, which reads one batch at a time, within a credit.

    There are at most `prefetch + 1`, including the batch that is read, and one more if that batch was not expected.
    A batch that has arrived and is no longer expected is dropped when its place is needed.
    """

    prefetch: int
    _of: dict[BatchRequest, PendingBatch] = field(
        default_factory=dict[BatchRequest, PendingBatch]
    )  # in the order of their creation
    _expected: list[BatchRequest] = field(default_factory=list[BatchRequest])
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def expect(self, requests: Sequence[BatchRequest]) -> None:
        """Order the batches that will be read next, as far as there is credit, in place of those expected before."""
        self._expected = list(requests)
        self._use_credit(self.prefetch + 1)

    def mark_urgent(self, request: BatchRequest) -> PendingBatch:
        """Return the order of the batch that the loop waits for now."""
        pending = self._of.get(request)
        if pending is None:
            pending = self._of[request] = PendingBatch(request, next(self._numbers))
        pending.urgent = True
        if request in self._expected:
            self._expected.remove(request)
        self._use_credit(self.prefetch + 1)
        return pending

    def remove(self, pending: PendingBatch) -> None:
        """Remove an order whose outcome the loop has taken."""
        self._of.pop(pending.request, None)
        self._use_credit(self.prefetch)

    def note_answer(self, server: int, number: int, outcome: Batch | PacelineError) -> None:
        """Record the answer of a data server.

        Raises:
            PeerError: there is no such request to it.
        """
        pending = next((pending for pending in self.under_way(server) if pending.number == number), None)
        if pending is None:
            raise PeerError(f"data server {server} answers a request that it was not sent")
        pending.outcome = outcome
        self._use_credit(self.prefetch)

    def unassign(self, server: int) -> None:
        """Mark the unanswered requests of a lost data server as not requested."""
        for pending in self.under_way(server):
            pending.server = None

    def under_way(self, server: int) -> list[PendingBatch]:
        """Return the unanswered requests to this data server."""
        return [pending for pending in self._of.values() if pending.server == server and pending.outcome is None]

    def unassigned(self) -> list[PendingBatch]:
        """Return the orders that are not requested yet: urgent ones first, then those that are needed soonest."""
        waiting = [pending for pending in self._of.values() if pending.server is None and pending.outcome is None]
        return sorted(waiting, key=lambda pending: not pending.urgent)

    def clear(self) -> None:
        """Drop all orders."""
        self._of.clear()
        self._expected.clear()

    def _use_credit(self, credit: int) -> None:
        for request in self._expected:
            if request in self._of:
                continue
            if len(self._of) >= credit and not self._drop_one():
                return
            self._of[request] = PendingBatch(request, next(self._numbers))

    def _drop_one(self) -> bool:
        """Drop a batch that has arrived and is not expected any more; return False when there is none."""
        expected = set(self._expected)
        for request, pending in self._of.items():
            if pending.outcome is not None and not pending.urgent and request not in expected:
                del self._of[request]
                return True
        return False


_OPEN: Final = 0  # number of the only request that opens the recipe; reads have others
MAX_PREFETCH: Final = MAX_UNANSWERED // 2


class ReaderOptions(msgspec.Struct, frozen=True):
    """Options of a reader: timeout of a read in seconds (`timeout_s`), number of batches read ahead (`prefetch`)."""

    timeout_s: float = WAIT_TIMEOUT_S
    prefetch: int = 2

    def __post_init__(self) -> None:
        """Validate the options."""
        if not 0 <= self.prefetch <= MAX_PREFETCH:
            raise UsageError(f"prefetch is {self.prefetch}, expected 0 to {MAX_PREFETCH} batches")


@dataclass(slots=True)
class _ServerState:
    """The reader's state of one data server."""

    connection: PersistentConnection
    address: str = "an address that is not known yet"
    is_open: bool = False
    problem: str = "it has not opened the source yet"
    # Lent buffers of this connection that are no longer referenced: finalizers append them, in any thread.
    returned: deque[int] = field(default_factory=deque[int])


class RemoteReader:
    """Reads the batches of a recipe from data servers; a `Reader`.

    Every batch is requested from the least busy data server that is connected. When a data server is lost, its
    unanswered requests go to others, and it is tried again at its current address. Connections are made when a batch is
    first read or expected.

    Args:
        recipe: what is read; each data server opens it for itself.
        addresses: returns the addresses of the data servers, by rank; their number never changes.
        transport: that of the data servers.
        hello: identity of this worker.
        options: see `ReaderOptions`.
        waits: records the waits of this worker, and limits their length while it leaves.

    Raises:
        UsageError: the recipe is larger than data servers accept.
    """

    def __init__(
        self,
        recipe: BatchRecipe,
        addresses: Callable[[], Sequence[str]],
        transport: Transport,
        hello: Hello,
        options: ReaderOptions | None = None,
        waits: Waits | None = None,
    ) -> None:
        self._options = options or ReaderOptions()
        self._waits = waits
        self._addresses = addresses
        self._transport = transport
        self._hello = hello
        self._recipe = _encoded(recipe)
        self._changed = threading.Condition()
        # Everything below is guarded by that lock.
        self._pending = PendingBatches(self._options.prefetch)
        self._states: list[_ServerState] = []
        self._first: tuple[int, SourceOpened] | None = None  # the first answer to `OpenSource`, and its data server
        self._failure: PacelineError | None = None
        self._num_requested = hello.rank  # so that workers start with different data servers
        self._num_skipped = 0
        self._reasons: tuple[str, ...] = ()
        self._closed = False

    @property
    def num_samples(self) -> int:
        """Number of samples of the source; blocks until a data server has opened it.

        Raises:
            UsageError, DataError: the source cannot be opened, or differs between data servers.
            DeadlineExceeded: no data server has answered in time.
            PeerError: no data server can be reached.
        """
        with self._changed:
            self._begin()
            self._wait(lambda: self._first is not None, "the number of samples")
            assert self._first is not None
            return self._first[1].num_samples

    def expect(self, requests: Sequence[BatchRequest]) -> None:
        """Request the first of these batches ahead, in this order, in place of those expected before; does not block.

        The next read should be one of them. At most `prefetch` are requested besides the one being read.
        """
        with self._changed:
            self._begin()
            self._pending.expect(requests)
            self._assign()

    def read(self, request: BatchRequest) -> Batch:
        """Return this batch; blocks until it is there.

        Where data servers share memory with this process, the tensors are views of that memory until the last one of
        the batch is dropped; they may be written to.

        Raises:
            RecordError: a record could not be decoded, and the recipe skips none.
            UsageError, DataError: the source cannot be opened or read, or differs between data servers.
            DeadlineExceeded: the batch has not come in time.
            PeerError: no data server can be reached.
        """
        if len(request.indices) > MAX_SAMPLES:
            raise UsageError(
                f"a batch has {len(request.indices)} samples, data servers give at most {MAX_SAMPLES} at once"
            )
        with self._changed:
            self._begin()
            pending = self._pending.mark_urgent(request)
            self._assign()
            what = f"a batch of {len(request.indices)} samples of epoch {request.epoch}"
            try:
                self._wait(lambda: pending.outcome is not None, what)
            finally:
                pending.urgent = False  # after a failed wait, expected batches come first
            self._pending.remove(pending)
            self._assign()
        if isinstance(pending.outcome, PacelineError):
            raise pending.outcome
        assert pending.outcome is not None
        return pending.outcome

    def skipped(self) -> SkippedRecords:
        """Return the number of records skipped in the batches received, and the reasons for the first ones."""
        with self._changed:
            return SkippedRecords(self._num_skipped, self._reasons)

    def close(self) -> None:
        """End all connections and threads; batches that were read stay valid. May be repeated."""
        with self._changed:
            self._closed = True
            self._pending.clear()
            states, self._states = self._states, []
            self._changed.notify_all()
        for state in states:
            state.connection.close()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Make the connections, the first time."""
        self._check()
        if self._states:
            return
        addresses = self._addresses()
        if not addresses:
            raise UsageError("there are no data servers to read from: start the job with --data-servers")
        self._states = [_ServerState(self._connection_to(server), address) for server, address in enumerate(addresses)]
        for state in self._states:
            state.connection.open()

    def _connection_to(self, server: int) -> PersistentConnection:
        return PersistentConnection(
            "data",
            server,
            partial(self._address, server),
            self._hello,
            self._transport,
            (encode(OpenSource(_OPEN)), memoryview(self._recipe)),
            on_frame=partial(self._on_frame, server),
            on_lost=partial(self._on_lost, server),
        )

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise UsageError("a reader of training examples is closed and cannot be read")

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        if done():
            return
        about = About("data servers")
        with nullcontext() if self._waits is None else self._waits.during(f"{what} from the data servers", about):
            watch = Stopwatch()
            while not done():
                self._check()
                waited_s, limit_s = watch.elapsed_s(), self._limit_s
                if waited_s >= limit_s:
                    raise self._too_late(what, limit_s)
                self._changed.wait(min(limit_s - waited_s, 1.0))

    @property
    def _limit_s(self) -> float:
        return self._options.timeout_s if self._waits is None else self._waits.limit_s

    def _too_late(self, what: str, limit_s: float) -> PeerError:
        waited = f"worker {self._hello.rank} waited {limit_s:g} s for {what}"
        reached = [state for state in self._states if state.is_open]
        if reached:
            return DeadlineExceeded(f"{waited}; it is connected to {', '.join(map(_name, reached))}. {ADVICE}")
        problems = "; ".join(f"{_name(state)}: {state.problem}" for state in self._states)
        return PeerError(
            f"{waited}, and no data server can be reached ({problems}). Start the job with `--on-crash restart`, "
            "so that those that die come back, or with more data servers"
        )

    def _assign(self) -> None:
        """Send the requests that no data server has been asked for, to those that are connected."""
        for pending in self._pending.unassigned():
            ready = [state.connection.rank for state in self._states if state.is_open]
            if not ready:
                return
            pending.server = min(ready, key=self._how_busy)
            self._num_requested += 1
            self._send(self._states[pending.server], pending)

    def _how_busy(self, server: int) -> tuple[int, int]:
        return len(self._pending.under_way(server)), (server - self._num_requested) % len(self._states)

    def _send(self, state: _ServerState, pending: PendingBatch) -> None:
        returned = tuple(state.returned.popleft() for _ in range(len(state.returned)))
        num = len(pending.request.indices)
        header = encode(ReadBatches(pending.number, _OPEN, pending.request.epoch, num, pending.urgent, returned))
        state.connection.send(header, memoryview(np.array(pending.request.indices, dtype=np.int64).tobytes()))

    # -- on the threads of the connections ---------------------------------------------------------------------------

    def _address(self, server: int) -> str:
        addresses = self._addresses()
        if server >= len(addresses):
            raise PeerError(f"data server {server} has no address yet")
        with self._changed:
            if self._states:
                self._states[server].address = addresses[server]
        return addresses[server]

    def _on_frame(self, server: int, frame: Frame) -> None:
        message = decode(frame.header)
        with self._changed:
            if not self._states:
                return  # closed
            state = self._states[server]
        outcome = self._outcome(state, message, frame.body)
        with self._changed:
            if self._closed:  # since
                return
            if isinstance(message, SourceOpened):
                self._on_opened(server, message)
            elif isinstance(message, BatchFailed) and message.number == _OPEN:
                self._failure = message.error(_name(state))
            elif outcome is not None:
                self._pending.note_answer(server, message.number, outcome)
            self._assign()
            self._changed.notify_all()

    def _outcome(self, state: _ServerState, message: object, body: memoryview) -> Batch | PacelineError | None:
        if isinstance(message, BatchFailed):
            return message.error(_name(state))
        if not isinstance(message, BatchAnswer):
            return None
        if message.lent_buffer != NO_LENT_BUFFER and body.nbytes:
            forget_writes(body)
            body = borrowed(body, partial(state.returned.append, message.lent_buffer))
        batch = unpack(message.layout, body)
        if batch.num_skipped:
            with self._changed:
                self._num_skipped += batch.num_skipped
                self._reasons = self._reasons or message.reasons
        return batch

    def _on_opened(self, server: int, opened: SourceOpened) -> None:
        state = self._states[server]
        if self._first is None:
            self._first = server, opened
        other, found = self._first
        if (found.num_samples, found.fingerprint) != (opened.num_samples, opened.fingerprint):
            self._failure = UsageError(
                f"{_name(self._states[other])} has {found.num_samples} samples ({found.fingerprint}) where "
                f"{_name(state)} has {opened.num_samples} ({opened.fingerprint}): all data servers have to read the "
                "same files"
            )
        state.is_open, state.problem = True, ""

    def _on_lost(self, server: int, problem: str) -> None:
        with self._changed:
            if not self._states:
                return
            state = self._states[server]
            state.is_open, state.problem = False, problem
            state.returned = deque()  # the data server frees lent buffers with the connection
            self._pending.unassign(server)
            self._assign()
            self._changed.notify_all()


def _encoded(recipe: BatchRecipe) -> bytes:
    """Encode a recipe; raises UsageError for one that data servers would refuse."""
    try:
        encoded = encode_recipe(recipe)
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the source has {error.object!r}, which is not valid UTF-8 and cannot be sent to data servers: name such "
            "files by a pattern, in which ? stands for any character"
        ) from error
    if len(encoded) > MAX_RECIPE_BYTES:
        raise UsageError(
            f"the source takes {len(encoded)} bytes to describe, data servers take at most {MAX_RECIPE_BYTES}: "
            "where it names very many files, name them by patterns, 'folder/*.txt', or by shorter paths"
        )
    return encoded


def _name(state: _ServerState) -> str:
    return f"data server {state.connection.rank} at {state.address}"
