"""A dense table of a worker: its pushes in flight, its reads, and values that come while their clock is open."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Final, Self

import msgspec
from torch import Tensor

from paceline.core.consistency import Consistency
from paceline.core.effects import Drop, Forget, Install, ReadDone, Release
from paceline.core.events import Opened, Timeout, WantPush, WantRead
from paceline.core.messages import Fetched, Pull, Push
from paceline.core.table_reads import TableReads
from paceline.errors import PacelineError, PeerError, UsageError
from paceline.transport.base import EMPTY
from paceline.transport.buffers import fresh_buffer
from paceline.update.clipping import without_clip
from paceline.update.factors import Factors
from paceline.update.hyper_checks import pushed_problem
from paceline.update.placement import spans
from paceline.update.summing import num_nonfinite
from paceline.update.table import Hyper, TableSpec
from paceline.wire.messages import EarlyValues, FetchedRest, KeysWanted, PullFrame, PushFrame, PushPiece
from paceline.wire.requests import Declare
from paceline.worker.cache import TableCache, can_replay
from paceline.worker.factored import FactoredPart, FactoredPushes
from paceline.worker.kept_pushes import KeptPushes
from paceline.worker.pushes import (
    Outgoing,
    PendingPush,
    PushBuffer,
    Pushes,
    PushOutcome,
    allocate,
    finished_push,
    may_push,
    objection,
    pending_future,
    piece_ends,
    require_fit,
)
from paceline.worker.table_client import ClientContext
from paceline.worker.waits import About


@dataclass(slots=True)
class EarlyPart:
    """What has come ahead of one server's part of a table. It lies beside the cache, as it may have to be dropped.

    Frames may be lost, or come twice: only what continues what is here is taken. `place` is called by the thread that
    reads the connection, `forget` and `whole` by the same one under the worker's lock, between two frames.
    """

    memory: memoryview
    clock: int = -1  # the values are those after this one
    num_bytes: int = 0  # from the start of the part

    def place(self, clock: int, at: int, size_bytes: int) -> memoryview | None:
        """Return memory for the next bytes of the part, which are those from `at` on; None for others.

        >>> part = EarlyPart(memoryview(bytearray(8)))
        >>> part.place(3, 0, 6).nbytes, part.place(3, 0, 6), part.whole(3)
        (6, None, None)
        >>> part.place(3, 6, 2).nbytes, part.whole(3).nbytes, part.whole(4)
        (2, 8, None)
        >>> part.forget()
        >>> part.place(3, -1, 4) is None  # no server says so that keeps to the protocol
        True
        """
        continues = at >= 0 and (clock, at) == (self.clock, self.num_bytes)
        begins = at == 0 and clock > self.clock
        if not (continues or begins) or at + size_bytes > self.memory.nbytes:
            return None
        self.clock, self.num_bytes = clock, at + size_bytes
        return self.memory[at : at + size_bytes]

    def forget(self) -> None:
        """Take no more values of this clock: what was on its way over a connection that has ended is lost."""
        self.num_bytes = -1

    def whole(self, clock: int) -> memoryview | None:
        """Return the values after this clock if all have come, else None."""
        return self.memory if (self.clock, self.num_bytes) == (clock, self.memory.nbytes) else None


# A larger push leaves at once: it takes long on its way, and one in a step is repeated until values answer it.
_MOST_STEP_BYTES: Final = 4 << 20
# A larger one does not wait for the end of a clock that may be long: its way takes time that the script computes in.
_MOST_WAITING_BYTES: Final = 16 << 10
# Of a server's part on another machine: it is sent in pieces, whose values come while others leave.
_LEAST_IN_PIECES_BYTES: Final = 256 << 10
_NO_SERVERS: Final = frozenset[int]()
_SLOTS: Final = 2  # pushes of one table in flight


@dataclass(slots=True, eq=False)
class PendingRead:
    """A read in flight, and the clock of the worker when it was started. Used under the lock, apart from `future`."""

    clock: int
    lock: threading.Condition
    done: ReadDone | None = None
    error: PacelineError | None = None
    _future: Future[ReadDone] | None = None

    def is_over(self) -> bool:
        """Return whether it has ended, well or with an error."""
        return self.done is not None or self.error is not None

    def end(self, done: ReadDone | None, error: PacelineError | None = None) -> None:
        """Note how it has ended."""
        self.done, self.error = done, error
        if self._future is not None:
            self._settle(self._future)

    @property
    def future(self) -> Future[ReadDone]:
        """How it ends, as a future; made on demand, as most reads are waited for by `wait_read`."""
        with self.lock:
            if self._future is None:
                self._future = pending_future(ReadDone)
                self._settle(self._future)
            return self._future

    def _settle(self, future: Future[ReadDone]) -> None:
        if self.done is not None:
            future.set_result(self.done)
        elif self.error is not None:
            future.set_exception(self.error)


class ReadOutcome(msgspec.Struct, frozen=True):
    """How a read ended: the clocks of reader and values, their source, and how long it waited."""

    clock: int
    value_clock: int
    source: str
    waited_s: float


@dataclass(slots=True)
class Reads:
    """The reads of a table in flight, by request. A newer read replaces an older one, so both end together."""

    _under_way: dict[int, PendingRead] = field(default_factory=dict[int, PendingRead])

    def add(self, request: int, read: PendingRead) -> None:
        """Add a read, which ends when that request or a later one is answered."""
        self._under_way[request] = read

    def finish(self, done: ReadDone) -> None:
        """End a read, and earlier ones."""
        for request in list(self._under_way):
            if request <= done.request:
                self._under_way.pop(request).end(done)

    def abandon(self, error: PacelineError) -> None:
        """End all reads with an error."""
        while self._under_way:
            _, read = self._under_way.popitem()
            read.end(None, error)


@dataclass(slots=True)
class DenseClient:
    """One dense table of a worker; see `TableClient`. The user's calls take the worker's lock.

    Every call that blocks raises as `WorkerNode` says. `distant` are the servers on other machines.
    """

    cache: TableCache
    pushes: Pushes
    context: ClientContext
    checks_memory: bool = False
    distant: frozenset[int] = frozenset()
    name: str = field(init=False)
    factored: FactoredPushes | None = None  # where factors are sent
    _reads: Reads = field(default_factory=Reads)
    _core_reads: TableReads = field(init=False)
    _screens: bool = field(init=False)  # gradients that are not finite are not sent
    _received: dict[int, int] = field(default_factory=dict[int, int])  # by server: the last request that it answered
    _early: dict[int, EarlyPart] = field(default_factory=dict[int, EarlyPart])  # by server
    _kept: KeptPushes | None = None  # what replicas may lack, where these lag
    _hyper: tuple[Hyper, ...] = ()  # the last that this worker has given
    _resends_hyper: bool = False  # the push that brought some was refused

    def __post_init__(self) -> None:
        """Open the table in the core."""
        spec = self.cache.spec
        self.name = spec.name
        self._screens = spec.nonfinite not in ("zero", "ignore")
        self.context.handle(Opened(spec.name, self.cache.consistency, self.cache.servers))
        self._core_reads = self.context.core.reads(spec.name)
        if self.context.core.settings.keeps_pushes:
            self._kept = KeptPushes()

    @classmethod
    def open(
        cls, context: ClientContext, spec: TableSpec, *, reads_own_writes: bool = True, live: bool = False
    ) -> Self:
        """Declare a dense table to all servers and open it; blocks until all have agreed.

        Args:
            context: of the worker.
            spec: the declaration, the same on all workers.
            reads_own_writes: reads contain own pushes that servers have not applied yet, where the rule allows that.
            live: over a transport that maps memory, reads see the servers' own memory instead of a copy.

        Raises:
            Refused: the table exists with other settings; the message lists the first differences.
        """
        layout = spans(spec, context.core.settings)
        live = live and context.transport.maps_memory
        context.rpc.call_all(lambda number: Declare(number, spec, live), f"servers to agree on table '{spec.name}'")
        consistency = Consistency.parse(spec.consistency)
        with context.lock.changed:
            cache = TableCache(spec, layout, not live and reads_own_writes and can_replay(spec, consistency), live)
            held, checks = consistency.visible == "on_clock", context.options.checks_memory
            pushes = Pushes(_SLOTS, held, lambda: allocate(context.transport, spec), checks)
            client = cls(cache, pushes, context, checks, context.distant())
            context.add(spec.name, client, consistency)
        return client

    # -- the user's calls --------------------------------------------------------------------------------------------

    def reserve(self, *, shown: bool = True) -> PushBuffer:
        """Return memory for the next push, for `push_reserved` or `return_buffer`.

        Blocks while two earlier pushes are in flight. Returned memory is reused first, so a caller that waits for each
        push gets the same buffer every time. `shown`: see `Pushes.lend`.

        Raises:
            UsageError: servers hold no more pushes of this table before this worker has finished its clock.
        """
        core, lock = self.context.core, self.context.lock
        with lock.changed:
            if lock.failure:
                lock.check()
            clock = core.clock
            if not (core.may_push(self.name) and self.pushes.has_slot(clock)):
                lock.wait(
                    lambda: may_push(core, self.name) and self.pushes.has_slot(clock),
                    f"servers to apply earlier pushes of table '{self.name}'",
                    About(f"push {self.name}", self.name, core.oldest_push(self.name) + 1),
                )
            return self.pushes.lend(shown=shown)

    def return_buffer(self, buffer: PushBuffer) -> None:
        """Return reserved memory without a push."""
        with self.context.lock.changed:
            self.pushes.reclaim(buffer)

    def parts(self, buffer: PushBuffer) -> list[memoryview]:
        """Return each server's part of reserved memory, by rank."""
        item = buffer.gradient.itemsize
        return [buffer.memory[span.start * item : span.stop * item] for span in self.cache.spans]

    def push(
        self,
        gradient: Tensor,
        *,
        count: float,
        absent: tuple[int, ...] = (),
        hyper: tuple[Hyper, ...] = (),
    ) -> Future[PushOutcome]:
        """Send an update; the future ends when every server has applied or refused its part.

        Blocks only while two earlier pushes of this table are in flight. `gradient` is (elements of the table,), and
        may be overwritten as soon as this returns. The future ends with `PeerError` if this worker fails first: then
        it is unknown whether the push was applied.
        """
        self.context.lock.check()
        require_fit(self.cache.spec, gradient)
        problem = self._objection(gradient) or pushed_problem(self.cache.spec, without_clip(hyper)[0])
        if problem:
            return finished_push(PushOutcome(applied=False, reason=problem))
        buffer = self.reserve(shown=False)
        buffer.gradient.copy_(gradient)
        return self._push(buffer, count, absent, hyper).future

    def push_reserved(
        self,
        buffer: PushBuffer,
        *,
        count: float,
        absent: tuple[int, ...] = (),
        hyper: tuple[Hyper, ...] = (),
        expected: float = 0.0,
        ends_clock: bool = False,
        factors: Mapping[int, Factors] | None = None,
    ) -> PendingPush:
        """Send an update as `push` does, from memory that `reserve` returned, which servers read from now on.

        Other machines send values ahead of the end of the clock, as those who push so read the table in the next one.
        `ends_clock`: the caller finishes the clock at once, and then reads the table. So one frame can do for all.
        `factors`: of gradients of matrices, by the index of their parameter; see `send_factors`.
        """
        screened = not (ends_clock and self._is_checked_in_updates(buffer))
        if screened and self._screens and num_nonfinite(buffer.gradient):
            return self._not_sent(buffer)
        return self._push(
            buffer,
            count,
            absent,
            hyper,
            expected,
            screened=screened,
            ends_clock=ends_clock,
            reads_next=True,
            factors=factors,
        )

    def send_factors(self) -> bool:
        """Send factors, from now on, in the place of gradients with more bytes; return whether a server gets any.

        One with which memory is shared reads gradients where they are. And replicas that lag are sent what is kept.
        """
        transport = self.context.transport
        copies = not transport.maps_memory and transport.name != "memory"
        servers = set(self.cache.servers) if copies else self.distant.intersection(self.cache.servers)
        if servers and self._kept is None:
            self.factored = FactoredPushes(self.cache.spec, self.cache.spans, servers, self.checks_memory)
        return self.factored is not None

    def _not_sent(self, buffer: PushBuffer) -> PendingPush:
        """Refuse reserved memory with values that are not finite."""
        try:
            problem = self._objection(buffer.gradient)
        finally:  # the script may go on with other gradients
            self.return_buffer(buffer)
        return PendingPush(self.context.lock.changed, PushOutcome(applied=False, reason=problem))

    def _is_checked_in_updates(self, buffer: PushBuffer) -> bool:
        """Return whether the server of a large push looks for NaN in it as it adds it, instead of this worker before.

        One server alone: several must refuse the same pushes. And while all workers wait for the values: what the
        server has added by then it takes out again.
        """
        cache, num_servers = self.cache, self.context.core.settings.num_servers
        is_large = buffer.memory.nbytes > _MOST_STEP_BYTES
        return (
            is_large
            and num_servers == 1
            and cache.live
            and cache.consistency.lockstep
            and (cache.spec.nonfinite == "reject")
        )

    def start_read(self, *, refresh: bool = True, exact: bool = False, more: bool = False) -> PendingRead:
        """Request values; the future ends when the cache is fresh enough. Does not block.

        `more`: the caller starts another read at once, with which the request may travel.
        """
        context = self.context
        core, lock = context.core, context.lock
        with lock.changed:
            if lock.failure:
                lock.check()
            started = PendingRead(core.clock, lock.changed)
            self._reads.add(core.next_request, started)
            context.handle(WantRead(self.name, refresh, exact, more))
        return started

    def read(self, use: Callable[[TableCache], None], *, refresh: bool = True, exact: bool = False) -> ReadOutcome:
        """Call `use` with the cache, under the lock, once it is fresh enough; blocks until then."""
        return self.wait_read(self.start_read(refresh=refresh, exact=exact), use)

    def wait_read(self, started: PendingRead, use: Callable[[TableCache], None]) -> ReadOutcome:
        """Finish a read that `start_read` started; blocks as `read` does."""
        began, lock = time.monotonic(), self.context.lock
        with lock.changed:
            if lock.failure:
                lock.check()
            if started.done is None:
                lock.wait(
                    started.is_over,
                    f"values of table '{self.name}' at clock {started.clock} ({self.cache.spec.consistency})",
                    About(f"pull {self.name}", self.name, self._core_reads.needs()),
                )
                if lock.failure:  # since the last answer the table may have been closed
                    lock.check()
            waited_s = time.monotonic() - began
            done = started.done
            if done is None:
                raise started.error or lock.error()
            use(self.cache)
        return ReadOutcome(started.clock, done.clock, done.source, waited_s)

    def use_cache(self, use: Callable[[TableCache], None]) -> None:
        """Call `use` with the cache as it is, under the lock. Does not wait for fresh values."""
        with self.context.lock.changed:
            self.context.lock.check()
            use(self.cache)

    def _objection(self, gradient: Tensor) -> str:
        """Return why a gradient is not sent, "" if it is; raises UsageError under nonfinite="halt"."""
        self.context.lock.check()
        spec, core = self.cache.spec, self.context.core
        problem = objection(spec, gradient)
        if problem and spec.nonfinite == "halt":
            raise UsageError(f"worker {core.settings.sender.worker}, clock {core.clock}: {problem}")
        return problem

    def _push(
        self,
        buffer: PushBuffer,
        count: float,
        absent: tuple[int, ...],
        hyper: tuple[Hyper, ...],
        expected: float = 0.0,
        *,
        screened: bool = True,
        ends_clock: bool = False,
        reads_next: bool = False,
        factors: Mapping[int, Factors] | None = None,
    ) -> PendingPush:
        parts, context = buffer.parts or self._split(buffer), self.context
        lock = context.lock
        with lock.changed:
            if lock.failure:
                lock.check()
            checksums = tuple(map(zlib.crc32, self.parts(buffer))) if self.checks_memory else ()
            push = context.core.next_push(self.name)
            if hyper is not self._hyper or self._resends_hyper:
                hyper = self._hyper_to_send(hyper)
            frame = PushFrame(push, count, absent, hyper, screened=screened, checksums=checksums, expected=expected)
            in_pieces = self._in_pieces(parts) if reads_next and self.distant else _NO_SERVERS
            factored: dict[int, FactoredPart] = {}
            if factors and self.factored is not None:
                factored = self.factored.parts(frame, buffer.gradient, factors)
                in_pieces -= factored.keys()
            pending = PendingPush(lock.changed)
            self.pushes.prepare(buffer, parts.copy(), frame, pending, in_pieces, factored)
            if self.cache.reads_own_writes:
                self.cache.note_own(push.id.seq, buffer.gradient, absent, self._hyper)
            size_bytes = buffer.memory.nbytes
            is_plain = not (in_pieces or factored)
            may_wait = self.pushes.held and size_bytes <= _MOST_WAITING_BYTES and is_plain
            ends_clock = ends_clock and size_bytes <= _MOST_STEP_BYTES and is_plain
            context.handle(WantPush(self.name, may_wait=may_wait, ends_clock=ends_clock))
            if self._kept is not None:  # while it is on its way
                self._keep(self._kept, frame, buffer)
        return pending

    def _hyper_to_send(self, given: tuple[Hyper, ...]) -> tuple[Hyper, ...]:
        """Return the hyperparameters for the next push: those given with it, or those of one that was refused."""
        self._hyper = given or self._hyper
        sent = self._hyper if self._resends_hyper else given
        self._resends_hyper = False
        return sent

    def _keep(self, kept: KeptPushes, frame: PushFrame, buffer: PushBuffer) -> None:
        item, spans = buffer.gradient.itemsize, self.cache.spans
        parts = {server: slice(spans[server].start * item, spans[server].stop * item) for server in buffer.parts}
        kept.keep(frame, buffer.memory, parts)

    def _split(self, buffer: PushBuffer) -> dict[int, memoryview]:
        """Note, beside a buffer that is used for the first time, the part of each server that holds one."""
        parts = self.parts(buffer)
        buffer.parts.update({server: parts[server] for server in self.cache.servers})
        return buffer.parts

    def _in_pieces(self, parts: dict[int, memoryview]) -> frozenset[int]:
        """Return the servers that get the next push in pieces, as values of it may come in pieces as well."""
        if not self.cache.consistency.lockstep or self._core_reads.awaited():
            return frozenset()
        large = {server for server, part in parts.items() if part.nbytes >= _LEAST_IN_PIECES_BYTES}
        return self.distant & large

    # -- effects of the core -----------------------------------------------------------------------------------------

    def send_push(self, server: int, push: Push, *, bare: bool) -> None:
        """Send a server its part of a push, unless it has answered; in pieces only once, as repetitions mix."""
        outgoing = self.pushes.outgoing(push)
        if outgoing is None or server not in outgoing.bodies:
            part = None if self._kept is None else self._kept.part(server, push.id)
            if part is not None:
                self.context.send(server, *part)
            return
        if server in outgoing.in_pieces:
            outgoing.in_pieces.discard(server)
            self._send_pieces(server, outgoing)
        elif server in outgoing.factored and not bare:
            part = outgoing.factored[server]
            self.context.send(server, part.message, part.body)
        else:
            self.context.send(server, outgoing.frame, EMPTY if bare else outgoing.bodies[server])

    def _send_pieces(self, server: int, outgoing: Outgoing) -> None:
        frame, body = outgoing.frame, outgoing.bodies[server]
        whole, ends = body.nbytes, piece_ends(body.nbytes)
        for at, end in pairwise([0, *ends]):
            piece = outgoing.order.piece(server, at / whole, end / whole)
            last_of = frame if end == whole else None
            self.context.send(server, PushPiece(frame, at), body[at:end], last_of=last_of, piece=piece)

    def push_part(self, server: int, push: Push) -> tuple[PushFrame, memoryview] | None:
        """Return a server's part of a push, None if the server has answered it."""
        outgoing = self.pushes.outgoing(push)
        return None if outgoing is None else (outgoing.frame, outgoing.bodies[server])

    def pull_part(self, server: int, pull: Pull) -> PullFrame:
        """Return the request of a read, and which of the server's values have been received."""
        return PullFrame(pull, self._received.get(server, -1))

    def send_pull(self, server: int, pull: Pull) -> None:
        """Send a server the request of a read."""
        self.context.send(server, self.pull_part(server, pull))

    def install(self, effect: Install, body: memoryview) -> None:
        """Cache a server's part of the values."""
        self.cache.install(effect.server, body, effect.settled, effect.includes)

    def forget(self, effect: Forget) -> None:
        """Change nothing: every message has all values of its part."""

    def release(self, effect: Release) -> None:
        """Note the answer to one part of a push; end the push when all parts are answered."""
        if self._kept is not None and effect.refused:
            self._kept.drop(effect.server, effect.id)
        outgoing = self.pushes.release(effect, partial(objection, self.cache.spec, is_sent=True))
        if outgoing is None:
            return
        if outgoing.answers.refused:
            self.cache.forget_own(effect.id.seq)
            self._resends_hyper = self._resends_hyper or bool(outgoing.frame.hyper)
        outgoing.pending.end(outgoing.answers.outcome())

    def drop(self, effect: Drop) -> None:
        """Forget the copy of one part of a push."""
        if self._kept is not None:
            self._kept.drop(effect.server, effect.id)

    def finish_read(self, done: ReadDone) -> None:
        """End the futures of a read and of earlier ones."""
        self._reads.finish(done)

    # -- connections and memory --------------------------------------------------------------------------------------

    def receive_buffer(self, server: int, message: Fetched, size_bytes: int) -> memoryview | None:
        """Return memory of the cache for values that a read waits for.

        Without the lock: its holder may be waiting for this thread to leave the connection. The state that is read
        here changes only on this thread, except when a read starts, which then waits as well.
        """
        if self._core_reads.awaits(server, message):
            return self.cache.receive_buffer(server, size_bytes)
        return None

    def place_early(self, server: int, message: EarlyValues | FetchedRest, size_bytes: int) -> memoryview | None:
        """Return memory beside the cache for values that come early; see `TableClient`."""
        part = self._early.get(server)
        if part is None:
            part = self._early[server] = EarlyPart(fresh_buffer(self.cache.part_bytes(server)))
        if isinstance(message, EarlyValues):
            return part.place(message.clock, message.at, size_bytes)
        return part.place(message.fetched.clock - 1, message.num_early, size_bytes)

    def early_body(self, server: int, message: FetchedRest) -> memoryview | None:
        """Return all values of a server's part; None, and ask for them again, if some have not come."""
        fetched, part = message.fetched, self._early.get(server)
        body = None if part is None else part.whole(fetched.clock - 1)
        pull = self._core_reads.unanswered_pull(server, fetched.request)
        if body is None and pull is not None:
            self.send_pull(server, pull)
        return body

    def note_received(self, server: int, message: Fetched) -> None:
        """Note that values were stored or dropped: the server may reuse their memory."""
        if message.request > self._received.get(server, -1):
            self._received[server] = message.request

    def on_keys_wanted(self, server: int, message: KeysWanted) -> None:
        """Raise PeerError: frames of dense tables have no ids."""
        raise PeerError(f"table '{self.name}' is dense, and has no ids")

    def on_reconnected(self, server: int) -> None:
        """Drop the values that have come early; other frames do not depend on earlier ones."""
        if server in self._early:
            self._early[server].forget()

    # -- pushes under way, and the end -------------------------------------------------------------------------------

    def flush_pushes(self, clock: int) -> None:
        """Send a push that waits for the end of its clock."""
        self.context.handle(Timeout())

    def num_under_way(self) -> int:
        """Count the pushes that some server has not answered."""
        return len(self.pushes)

    def num_held(self, clock: int) -> int:
        """Count the pushes that are applied when this worker finishes this clock."""
        return self.pushes.num_held(clock)

    def abandon(self, error: PacelineError) -> None:
        """End all futures with an error."""
        self.pushes.abandon(error)
        self._reads.abandon(error)
        if self._kept is not None:
            self._kept.clear()

    def close(self) -> None:
        """Release the memory of cache and pushes, except what the user still uses, which no longer changes."""
        if self.cache.lent:
            self.cache.keep()
        self.cache = TableCache(self.cache.spec, self.cache.spans, reads_own_writes=False, live=True)
        self._early.clear()
        self.pushes.close()
