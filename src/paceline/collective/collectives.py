"""The collective operations of a session: broadcast, reduce, all_reduce, all_gather, each over a queue of calls."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Final, TypeVar
from weakref import WeakMethod

import torch
from torch import Tensor

from paceline.collective import operations as patterns
from paceline.collective.call_queue import CallQueue, QueuedCall
from paceline.collective.group import Group, WorkerSet
from paceline.collective.messages import Messages
from paceline.collective.signature import CallSignature, Op, Pattern
from paceline.errors import UsageError
from paceline.worker.validation import brief

T = TypeVar("T")

Closer = Callable[[bool], None]

CALL_QUEUE_NAME: Final = "collective calls"


@dataclass(slots=True)
class Collectives:
    """The collective calls of one worker. Every worker makes the same calls in the same order.

    Each returns a future, which holds errors too, except for UsageErrors that this worker can find alone.
    """

    worker_set: WorkerSet
    messages: Messages = field(init=False)
    _call_queues: dict[str, CallQueue] = field(default_factory=dict[str, CallQueue])
    # Kept alive, so that none is destroyed by an object of torch: ~ProcessGroupGloo waits for threads that may want the
    # interpreter's lock, which the Python object of a group releases first, but a Reducer does not.
    _groups: list[Group] = field(default_factory=list[Group])
    _closers: list[WeakMethod[Closer]] = field(default_factory=list[WeakMethod[Closer]])

    def __post_init__(self) -> None:
        """Prepare for messages, which are no collective calls: two workers make them."""
        self.messages = Messages(self.worker_set)

    @property
    def is_used(self) -> bool:
        """Whether this worker has made a call that needs another one, or prepared to."""
        return bool(self._call_queues or self._groups or self.messages.is_used)

    def open_call_queue(self, name: str) -> CallQueue:
        """Return a new queue, whose calls are independent of those of other queues.

        Raises:
            UsageError: there is one of this name.
        """
        if name in self._call_queues:
            raise UsageError(
                f"worker {self.worker_set.rank} has distributed '{name}' already: give each optimizer its own name "
                "(name=...)."
            )
        self._call_queues[name] = CallQueue(self.worker_set, name)
        return self._call_queues[name]

    def connect_group(self, name: str) -> Group:
        """Connect to all other workers for calls that torch makes itself; see `Group.connect`."""
        self._groups.append(Group.connect(self.worker_set, name))
        return self._groups[-1]

    def when_closed(self, call: WeakMethod[Closer]) -> None:
        """Call a method with `politely` when this worker leaves, if its object still exists."""
        self._closers.append(call)

    def broadcast(self, tensor: Tensor, root: int, timeout_s: float | None) -> Future[Tensor]:
        """Give every worker the root's tensor."""
        return self._ask(tensor, "broadcast", "", self._checked(root, "broadcast"), patterns.broadcast, timeout_s)

    def reduce(self, tensor: Tensor, root: int, op: Op, timeout_s: float | None) -> Future[Tensor | None]:
        """Give the root the reduction of all tensors."""
        _require_tensor(tensor, "reduce")
        patterns.require_reducible(tensor, op, "reduce")
        return self._ask(tensor, "reduce", op, self._checked(root, "reduce"), patterns.reduce, timeout_s)

    def all_reduce(self, tensor: Tensor, op: Op, timeout_s: float | None) -> Future[Tensor]:
        """Give every worker the reduction of all tensors."""
        _require_tensor(tensor, "all_reduce")
        patterns.require_reducible(tensor, op, "all_reduce")
        return self._ask(tensor, "all_reduce", op, -1, patterns.all_reduce, timeout_s)

    def all_gather(self, tensor: Tensor, timeout_s: float | None) -> Future[list[Tensor]]:
        """Give every worker all tensors."""
        return self._ask(tensor, "all_gather", "", -1, patterns.all_gather, timeout_s)

    def finish(self, future: Future[T], what: str, timeout_s: float | None) -> T:
        """Return the result of a call; blocks for it."""
        return self._calls.wait(future, what, timeout_s)

    def close(self, *, politely: bool) -> None:
        """End all queues and groups; if `politely`, after all queued calls. May be repeated."""
        while self._closers:
            close = self._closers.pop()()
            if close is not None:
                close(politely)
        while self._call_queues:
            self._call_queues.popitem()[1].close(politely=politely)
        self.messages.close(politely=politely)
        while self._groups:
            self._groups.pop().leave(politely=politely)
        self.worker_set.liveness.stop()

    def _ask(
        self,
        tensor: Tensor,
        pattern: Pattern,
        op: Op,
        root: int,
        act: Callable[[QueuedCall, Tensor], T],
        timeout_s: float | None,
    ) -> Future[T]:
        _require_tensor(tensor, pattern)
        if timeout_s is not None and not (isinstance(timeout_s, int | float) and timeout_s > 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{pattern}: timeout_s is {brief(timeout_s)}, expected more than 0 seconds.")
        if tensor.layout not in (torch.strided, torch.sparse_coo):
            raise UsageError(
                f"{pattern} got a tensor with layout {tensor.layout}: use .to_dense() or .to_sparse_coo()."
            )
        given = patterns.values_of(tensor)
        given = given.coalesce() if given.layout == torch.sparse_coo else given
        call = CallSignature.over(given, pattern, op, root)
        return self._calls.submit(call, lambda queued: act(queued, given), timeout_s)

    @property
    def _calls(self) -> CallQueue:
        return self._call_queues.get(CALL_QUEUE_NAME) or self.open_call_queue(CALL_QUEUE_NAME)

    def _checked(self, root: int, pattern: str) -> int:
        if not (isinstance(root, int) and 0 <= root < self.worker_set.size):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{pattern}: root is worker {brief(root)}, expected 0 to {self.worker_set.size - 1}.")
        return root


def _require_tensor(tensor: object, pattern: str) -> None:
    """Refuse what is not a tensor, or one without values."""
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{pattern} got {brief(tensor)}, expected a tensor: torch.as_tensor makes one of numbers.")
    if tensor.is_nested:
        raise UsageError(f"{pattern} got {brief(tensor)}, expected a dense or a sparse one.")
    if tensor.device.type == "meta":
        raise UsageError(f"{pattern} got {brief(tensor)} on device meta, which has no values.")
