"""Batches from the data servers: requested ahead, from any connected server, each of which makes the same."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from paceline.core.settings import WAIT_TIMEOUT_S
from paceline.data.service.buffer_pool import borrowed, forget_writes
from paceline.data.service.connection import ServiceConnection
from paceline.data.service.credit import BatchOrder, BatchOrders
from paceline.data.service.messages import (
    MAX_RECIPE_BYTES,
    MAX_SAMPLES,
    MAX_UNANSWERED,
    NO_LENT_BUFFER,
    BatchFailed,
    BatchParcel,
    OpenSource,
    ReadBatches,
    SourceOpened,
    decode,
    encode,
)
from paceline.data.sources.batch_layout import unpack
from paceline.data.sources.batches import Batch, BatchRequest
from paceline.data.sources.recipe import BatchRecipe, encode_recipe
from paceline.data.sources.records import Faults
from paceline.errors import DeadlineExceeded, PacelineError, PeerError, UsageError
from paceline.stopwatch import Stopwatch
from paceline.transport.base import Frame, Transport
from paceline.wire.messages import Hello
from paceline.worker.waits import ADVICE, About, Waits

_OPEN: Final = 0  # number of the only request that opens the recipe; reads have others
MAX_PREFETCH: Final = MAX_UNANSWERED // 2


@dataclass(frozen=True, slots=True)
class ReaderOptions:
    """Options of a reader: timeout of a read in seconds (`timeout_s`), number of batches read ahead (`prefetch`)."""

    timeout_s: float = WAIT_TIMEOUT_S
    prefetch: int = 2

    def __post_init__(self) -> None:
        """Validate the options."""
        if not 0 <= self.prefetch <= MAX_PREFETCH:
            raise UsageError(f"prefetch is {self.prefetch}, expected 0 to {MAX_PREFETCH} batches")


@dataclass(slots=True)
class _Source:
    """The reader's state of one data server."""

    line: ServiceConnection
    address: str = "an address that is not known yet"
    is_open: bool = False
    problem: str = "it has not said yet that the source is open"
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
        self._orders = BatchOrders(self._options.prefetch)
        self._sources: list[_Source] = []
        self._first: tuple[int, SourceOpened] | None = None  # the first answer to `OpenSource`, and its data server
        self._failure: PacelineError | None = None
        self._num_asked = hello.rank  # so that workers start with different data servers
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

    def expect(self, asks: Sequence[BatchRequest]) -> None:
        """Request the first of these batches ahead, in this order, in place of those expected before; does not block.

        The next read should be one of them. At most `prefetch` are requested besides the one being read.
        """
        with self._changed:
            self._begin()
            self._orders.expect(asks)
            self._place_orders()

    def read(self, ask: BatchRequest) -> Batch:
        """Return this batch; blocks until it is there.

        Where data servers share memory with this process, the tensors are views of that memory until the last one of
        the batch is dropped; they may be written to.

        Raises:
            RecordError: a record could not be decoded, and the recipe skips none.
            UsageError, DataError: the source cannot be opened or read, or differs between data servers.
            DeadlineExceeded: the batch has not come in time.
            PeerError: no data server can be reached.
        """
        if len(ask.indices) > MAX_SAMPLES:
            raise UsageError(f"a batch has {len(ask.indices)} samples, data servers give at most {MAX_SAMPLES} at once")
        with self._changed:
            self._begin()
            order = self._orders.want(ask)
            self._place_orders()
            what = f"a batch of {len(ask.indices)} samples of epoch {ask.epoch}"
            try:
                self._wait(lambda: order.outcome is not None, what)
            finally:
                order.urgent = False  # after a failed wait, expected batches come first
            self._orders.remove(order)
            self._place_orders()
        if isinstance(order.outcome, PacelineError):
            raise order.outcome
        assert order.outcome is not None
        return order.outcome

    def faults(self) -> Faults:
        """Return the number of records skipped in the batches received, and the reasons for the first ones."""
        with self._changed:
            return Faults(self._num_skipped, self._reasons)

    def close(self) -> None:
        """End all connections and threads; batches that were read stay valid. May be repeated."""
        with self._changed:
            self._closed = True
            self._orders.clear()
            sources, self._sources = self._sources, []
            self._changed.notify_all()
        for source in sources:
            source.line.close()

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Make the connections, the first time."""
        self._check()
        if self._sources:
            return
        addresses = self._addresses()
        if not addresses:
            raise UsageError("there are no data servers to read from: start the job with --data-servers")
        self._sources = [_Source(self._line(server), address) for server, address in enumerate(addresses)]
        for source in self._sources:
            source.line.open()

    def _line(self, server: int) -> ServiceConnection:
        return ServiceConnection(
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
            raise UsageError("a reader of training examples is closed: nothing can be read from it any more")

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
        reached = [source for source in self._sources if source.is_open]
        if reached:
            return DeadlineExceeded(f"{waited}; it is connected to {', '.join(map(_name, reached))}. {ADVICE}")
        problems = "; ".join(f"{_name(source)}: {source.problem}" for source in self._sources)
        return PeerError(
            f"{waited}, and no data server can be reached ({problems}). Start the job with `--on-crash restart`, "
            "so that those that die come back, or with more data servers"
        )

    def _place_orders(self) -> None:
        """Send the requests that no data server has been asked for, to those that are connected."""
        for order in self._orders.unplaced():
            ready = [source.line.server for source in self._sources if source.is_open]
            if not ready:
                return
            order.server = min(ready, key=self._how_busy)
            self._num_asked += 1
            self._send(self._sources[order.server], order)

    def _how_busy(self, server: int) -> tuple[int, int]:
        return len(self._orders.under_way(server)), (server - self._num_asked) % len(self._sources)

    def _send(self, source: _Source, order: BatchOrder) -> None:
        returned = tuple(source.returned.popleft() for _ in range(len(source.returned)))
        num = len(order.ask.indices)
        header = encode(ReadBatches(order.number, _OPEN, order.ask.epoch, num, order.urgent, returned))
        source.line.send(header, memoryview(np.array(order.ask.indices, dtype=np.int64).tobytes()))

    # -- on the threads of the lines ---------------------------------------------------------------------------------

    def _address(self, server: int) -> str:
        addresses = self._addresses()
        if server >= len(addresses):
            raise PeerError(f"data server {server} has no address yet")
        with self._changed:
            if self._sources:
                self._sources[server].address = addresses[server]
        return addresses[server]

    def _on_frame(self, server: int, frame: Frame) -> None:
        message = decode(frame.header)
        with self._changed:
            if not self._sources:
                return  # closed
            source = self._sources[server]
        outcome = self._outcome(source, message, frame.body)
        with self._changed:
            if isinstance(message, SourceOpened):
                self._on_opened(server, message)
            elif isinstance(message, BatchFailed) and message.number == _OPEN:
                self._failure = message.error(_name(source))
            elif outcome is not None and not self._closed:
                self._orders.settle(server, message.number, outcome)
            self._place_orders()
            self._changed.notify_all()

    def _outcome(self, source: _Source, message: object, body: memoryview) -> Batch | PacelineError | None:
        if isinstance(message, BatchFailed):
            return message.error(_name(source))
        if not isinstance(message, BatchParcel):
            return None
        if message.lent_buffer != NO_LENT_BUFFER and body.nbytes:
            forget_writes(body)
            body = borrowed(body, partial(source.returned.append, message.lent_buffer))
        batch = unpack(message.layout, body)
        if batch.num_skipped:
            with self._changed:
                self._num_skipped += batch.num_skipped
                self._reasons = self._reasons or message.reasons
        return batch

    def _on_opened(self, server: int, opened: SourceOpened) -> None:
        source = self._sources[server]
        if self._first is None:
            self._first = server, opened
        other, found = self._first
        if (found.num_samples, found.fingerprint) != (opened.num_samples, opened.fingerprint):
            self._failure = UsageError(
                f"{_name(self._sources[other])} has {found.num_samples} samples ({found.fingerprint}) where "
                f"{_name(source)} has {opened.num_samples} ({opened.fingerprint}): all data servers have to read the "
                "same files"
            )
        source.is_open, source.problem = True, ""

    def _on_lost(self, server: int, problem: str) -> None:
        with self._changed:
            if not self._sources:
                return
            source = self._sources[server]
            source.is_open, source.problem = False, problem
            source.returned = deque()  # the data server frees lent buffers with the connection
            self._orders.unassign(server)
            self._place_orders()
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


def _name(source: _Source) -> str:
    return f"data server {source.line.server} at {source.address}"
