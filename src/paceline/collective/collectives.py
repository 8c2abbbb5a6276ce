"""What a session offers beside tables: the patterns by name, and tensors by name on the servers."""

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
from paceline.collective.signature import CallSignature, Op, Pattern
from paceline.errors import UsageError
from paceline.worker.given import brief

T = TypeVar("T")

Closer = Callable[[bool], None]

CALL_QUEUE_NAME: Final = "collective calls"


@dataclass(slots=True)
class Collectives:
    """The calls of one worker among all workers. Every worker makes the same calls in the same order.

    Each returns a future; what it raises is told there, except for a mistake that this worker alone can see.
    """

    worker_set: WorkerSet
    _lanes: dict[str, CallQueue] = field(default_factory=dict[str, CallQueue])
    # Kept so that none ends with what torch made of it: ~ProcessGroupGloo waits for threads that may want the
    # interpreter's lock, which only the Python object of a group gives up first, not a Reducer.
    _groups: list[Group] = field(default_factory=list[Group])
    _closers: list[WeakMethod[Closer]] = field(default_factory=list[WeakMethod[Closer]])

    def open_call_queue(self, name: str) -> CallQueue:
        """Return a new lane, over which calls go independently of those of other lanes.

        Raises:
            UsageError: there is one of this name.
        """
        if name in self._lanes:
            raise UsageError(
                f"worker {self.worker_set.rank} has distributed '{name}' already: give each optimizer its own name "
                "(name=...)."
            )
        self._lanes[name] = CallQueue(self.worker_set, name)
        return self._lanes[name]

    def meet(self, name: str) -> Group:
        """Connect to all other workers for calls of torch's own, until this worker leaves; see `Group.meet`."""
        self._groups.append(Group.meet(self.worker_set, name))
        return self._groups[-1]

    def when_closed(self, call: WeakMethod[Closer]) -> None:
        """Have a method called when this worker leaves, if its owner still lives, with whether that is polite."""
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
        """Return the result of a call; blocks until it is there."""
        return self._calls.wait(future, what, timeout_s)

    def close(self, *, politely: bool) -> None:
        """End all lanes. Politely: after all calls that were asked for are over. May be repeated."""
        while self._closers:
            close = self._closers.pop()()
            if close is not None:
                close(politely)
        while self._lanes:
            self._lanes.popitem()[1].close(politely=politely)
        while self._groups:
            self._groups.pop().leave(politely=politely)
        self.worker_set.liveness.end()

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
        given = tensor.detach()
        given = given.coalesce() if given.layout == torch.sparse_coo else given
        call = CallSignature.over(given, pattern, op, root)
        return self._calls.ask(call, lambda turn: act(turn, given), timeout_s)

    @property
    def _calls(self) -> CallQueue:
        return self._lanes.get(CALL_QUEUE_NAME) or self.open_call_queue(CALL_QUEUE_NAME)

    def _checked(self, root: int, pattern: str) -> int:
        if not (isinstance(root, int) and 0 <= root < self.worker_set.size):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"{pattern}: root is worker {brief(root)}, expected 0 to {self.worker_set.size - 1}.")
        return root


def _require_tensor(tensor: object, pattern: str) -> None:
    """Refuse what is no tensor, or one without values."""
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{pattern} got {brief(tensor)}, expected a tensor: torch.as_tensor makes one of numbers.")
    if tensor.device.type == "meta":
        raise UsageError(f"{pattern} got {brief(tensor)} on device meta, which has no values.")
