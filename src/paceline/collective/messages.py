"""Tensors from one worker to another: `send` and `receive`, over connections that each pair of workers has."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Final, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from paceline.collective.call_queue import CALL_ERRORS
from paceline.collective.failures import LEFT, FailureReports
from paceline.collective.group import NEVER, WorkerSet, connect_members, group_of
from paceline.collective.operations import values_of
from paceline.collective.process_group import OwnGroup
from paceline.collective.signature import NUM_WORDS, CallSignature
from paceline.errors import PeerError, UsageError
from paceline.torch_private import Store
from paceline.update.dtypes import dtype_name
from paceline.worker.validation import brief
from paceline.worker.waits import About

T = TypeVar("T")

_TAG: Final = 3
_ABORT_TAG: Final = 4
_MAX_BYTES: Final = 1 << 34
_POLL_INTERVAL_S: Final = 0.005


@dataclass(slots=True)
class Messages:
    """The messages of one worker. Those from one worker to another arrive in the order in which they were sent."""

    worker_set: WorkerSet
    _pairs: dict[int, _Pair] = field(default_factory=dict[int, "_Pair"])

    @property
    def is_used(self) -> bool:
        """Whether this worker has sent or received a message."""
        return bool(self._pairs)

    def send(self, tensor: Tensor, to: int, timeout_s: float | None) -> Future[None]:
        """Send a tensor to a worker; the future ends once it has left."""
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"send got {brief(tensor)}, expected a tensor: torch.as_tensor makes one of numbers.")
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            raise UsageError(f"send got {brief(tensor)}, expected a dense tensor with values.")
        given = values_of(tensor)
        call = CallSignature.over(given, "send", root=self._checked(to, "send", timeout_s))
        pair = self._pair(to)
        return pair.sending.submit(lambda: pair.send(call, given.cpu().contiguous(), timeout_s))

    def receive(self, source: int, like: Tensor | None, timeout_s: float | None) -> Future[Tensor]:
        """Receive the next tensor that a worker has sent to this one."""
        pair = self._pair(self._checked(source, "receive", timeout_s))
        return pair.receiving.submit(lambda: pair.receive(like, timeout_s))

    def close(self, *, politely: bool) -> None:
        """End all connections; if `politely`, after what is to be sent. May be repeated."""
        while self._pairs:
            self._pairs.popitem()[1].close(politely=politely)

    def _pair(self, other: int) -> _Pair:
        if other not in self._pairs:
            self._pairs[other] = _Pair.of(self.worker_set, other)
        return self._pairs[other]

    def _checked(self, other: int, what: str, timeout_s: float | None) -> int:
        if not (isinstance(other, int) and other in self.worker_set.others):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"{what}: the other end is worker {brief(other)}, expected another one of the {self.worker_set.size} "
                f"workers; this is worker {self.worker_set.rank}."
            )
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{what}: timeout_s is {brief(timeout_s)}, expected more than 0 seconds.")
        return other


@dataclass(slots=True)
class _Pair:
    """The connection of this worker to another one, made when both have sent or received for the first time."""

    worker_set: WorkerSet
    other: int
    store: Store
    failure_reports: FailureReports
    sending: _Turns
    receiving: _Turns
    _connecting: threading.Lock = field(default_factory=threading.Lock)
    _group: ProcessGroup | None = None
    _failure: str = ""

    @staticmethod
    def of(worker_set: WorkerSet, other: int) -> _Pair:
        """Return the pair of this worker and another one, not connected yet."""
        first, second = sorted((worker_set.rank, other))
        store = worker_set.store(f"messages {first} {second}")
        reports = FailureReports(store, worker_set.rank, worker_set.liveness)
        name = f"paceline-messages-{other}"
        return _Pair(worker_set, other, store, reports, _Turns(name), _Turns(name))

    def send(self, call: CallSignature, tensor: Tensor, timeout_s: float | None) -> None:
        """Send the description of a tensor and its values."""
        with self._explained(f"send to worker {self.other}", timeout_s) as group:
            group.send([call.words()], self._place, _TAG).wait(NEVER)
            if tensor.numel():
                group.send([tensor.view(-1).view(torch.uint8)], self._place, _TAG).wait(NEVER)

    def receive(self, like: Tensor | None, timeout_s: float | None) -> Tensor:
        """Receive the description of a tensor, and its values; raises UsageError if it is not like the expected one."""
        what, words = f"receive from worker {self.other}", torch.zeros(NUM_WORDS, dtype=torch.int64)
        with self._explained(what, timeout_s) as group:
            group.recv([words], self._place, _TAG).wait(NEVER)
            call = self._read(words)
            found = torch.empty(call.shape, dtype=call.dtype)
            if found.numel():
                group.recv([found.view(-1).view(torch.uint8)], self._place, _TAG).wait(NEVER)
        if like is None:
            return found
        if (like.dtype, like.shape) != (found.dtype, found.shape):
            raise UsageError(
                f"worker {self.worker_set.rank}, {what}: expected {dtype_name(like.dtype)} {tuple(like.shape)}, got "
                f"{dtype_name(found.dtype)} {call.shape}."
            )
        return found.to(like.device)

    def abort(self) -> None:
        """Close the connection, so that calls of both workers that wait for each other fail at once."""
        group = self._group
        if isinstance(group, OwnGroup):
            group.abort()
        elif group is not None:
            try:  # torch closes every connection of a group when a wait times out
                group.recv([torch.zeros(1)], self._place, _ABORT_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError:
                return

    def close(self, *, politely: bool) -> None:
        """End the pair."""
        if politely:
            self.sending.close()
        self._failure = self._failure or "it is leaving the job"
        self.failure_reports.write(LEFT if politely else "has ended with an error")
        self.abort()
        self.sending.close()
        self.receiving.close()
        if isinstance(self._group, OwnGroup):
            self._group.shutdown()
        self._group = None

    @property
    def _place(self) -> int:
        """Where the other worker is in the group of the two."""
        return int(self.other > self.worker_set.rank)

    @contextmanager
    def _explained(self, what: str, timeout_s: float | None) -> Generator[ProcessGroup]:
        """Connect, then wait in a block; explain connections that fail meanwhile."""
        rank, waits = self.worker_set.rank, self.worker_set.node.waits
        if self._failure:
            raise PeerError(f"worker {rank}, {what}: an earlier message has failed: {self._failure}")
        limit_s = waits.limit_s if timeout_s is None else timeout_s
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.abort()

        try:
            with waits.during(what, About(what, workers=(self.other,)), limit_s, give_up):
                yield self._connected(late)
        except (RuntimeError, PeerError) as error:
            waited_s = limit_s if late.is_set() else None
            told = self.failure_reports.explain(what, [self.other], waited_s, str(error))
            self._failure = self._failure or str(told)
            self.abort()
            raise told from error

    def _connected(self, late: threading.Event) -> ProcessGroup:
        """Connect to the other worker, unless that is done; blocks until that has called this."""
        while not self._connecting.acquire(timeout=_POLL_INTERVAL_S):  # which the other direction may hold for longer
            self._require_hope(late)
        try:
            if self._group is None:
                self.worker_set.liveness.start()
                timeout, own = timedelta(seconds=self.worker_set.timeout_s), 1 - self._place
                connected = connect_members(
                    self.worker_set, self.store, own, 2, timeout, lambda: self._meet(late), at_once=True
                )
                self._group = group_of(connected, self.store, own, 2)
            return self._group
        finally:
            self._connecting.release()

    def _meet(self, late: threading.Event) -> None:
        """Wait until the other worker has come."""
        while not self.store.check([f"offer/{self._place}"]):
            self._require_hope(late)
            late.wait(_POLL_INTERVAL_S)

    def _require_hope(self, late: threading.Event) -> None:
        """Raise PeerError if there is nothing to wait for any more."""
        if late.is_set() or self._failure or self.worker_set.liveness.has_ended(self.other):
            raise PeerError(self._failure or f"worker {self.other} has not come")

    def _read(self, words: Tensor) -> CallSignature:
        """Decode the description of a tensor, and check it before memory is taken."""
        try:
            call = CallSignature.read(words)
        except (IndexError, ValueError) as error:
            raise PeerError(f"worker {self.other} has sent something else than a tensor") from error
        if min(call.shape, default=0) < 0 or math.prod(call.shape) * call.dtype.itemsize > _MAX_BYTES:
            raise PeerError(f"worker {self.other} has sent a tensor of the shape {call.shape}")
        return call


@dataclass(slots=True)
class _Turns:
    """A thread that makes calls in the order in which they were submitted."""

    name: str
    _queue: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue[Callable[[], None] | None])
    _thread: threading.Thread | None = None

    def submit(self, act: Callable[[], T]) -> Future[T]:
        """Queue a call. Does not block."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()

        def make() -> None:
            try:
                future.set_result(act())
            except CALL_ERRORS as error:
                future.set_exception(error)

        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            self._thread.start()
        self._queue.put(make)
        return future

    def close(self) -> None:
        """End the thread, after what is queued."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while (make := self._queue.get()) is not None:
            make()
            del make  # it holds the tensor of its call
