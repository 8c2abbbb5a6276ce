"""Batches requested for a loop or ready for it, limited by the credit of the loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from paceline.data.sources.batches import Batch, BatchRequest
from paceline.errors import PacelineError, PeerError


@dataclass(slots=True, eq=False)
class BatchOrder:
    """A batch that has been requested, or is about to be.

    Args:
        server: the data server it was requested from; None where there is none, or it is lost.
        urgent: the loop waits for it.
        outcome: the batch or the error.
    """

    ask: BatchRequest
    number: int
    urgent: bool = False
    server: int | None = None
    outcome: Batch | PacelineError | None = None


@dataclass(slots=True)
class BatchOrders:
    """Batch requests of one loop, which reads one batch at a time.

    There are at most `prefetch + 1`, including the one that is read, and one more where that one was not expected.
    Batches that have arrived and are no longer expected are dropped when the credit is needed.
    """

    prefetch: int
    _of: dict[BatchRequest, BatchOrder] = field(
        default_factory=dict[BatchRequest, BatchOrder]
    )  # in the order of their creation
    _expected: list[BatchRequest] = field(default_factory=list[BatchRequest])
    _numbers: Iterator[int] = field(default_factory=lambda: count(1))

    def expect(self, asks: Sequence[BatchRequest]) -> None:
        """Order the batches that will be read next, as far as there is credit, in place of those expected before."""
        self._expected = list(asks)
        self._use_credit(self.prefetch + 1)

    def want(self, ask: BatchRequest) -> BatchOrder:
        """Return the order of the batch that the loop waits for now."""
        order = self._of.get(ask)
        if order is None:
            order = self._of[ask] = BatchOrder(ask, next(self._numbers))
        order.urgent = True
        if ask in self._expected:
            self._expected.remove(ask)
        self._use_credit(self.prefetch + 1)
        return order

    def remove(self, order: BatchOrder) -> None:
        """Remove an order whose outcome the loop has taken."""
        self._of.pop(order.ask, None)
        self._use_credit(self.prefetch)

    def settle(self, server: int, number: int, outcome: Batch | PacelineError) -> None:
        """Record the answer of a data server.

        Raises:
            PeerError: there is no such request to it.
        """
        order = next((order for order in self.under_way(server) if order.number == number), None)
        if order is None:
            raise PeerError(f"data server {server} answers what it was not asked")
        order.outcome = outcome
        self._use_credit(self.prefetch)

    def unassign(self, server: int) -> None:
        """Mark the unanswered requests of a lost data server as not requested."""
        for order in self.under_way(server):
            order.server = None

    def under_way(self, server: int) -> list[BatchOrder]:
        """Return the number of unanswered requests of this data server."""
        return [order for order in self._of.values() if order.server == server and order.outcome is None]

    def unplaced(self) -> list[BatchOrder]:
        """Return the orders that are not requested yet: urgent ones first, then those that are needed soonest."""
        waiting = [order for order in self._of.values() if order.server is None and order.outcome is None]
        return sorted(waiting, key=lambda order: not order.urgent)

    def clear(self) -> None:
        """Drop all orders."""
        self._of.clear()
        self._expected.clear()

    def _use_credit(self, credit: int) -> None:
        for ask in self._expected:
            if ask in self._of:
                continue
            if len(self._of) >= credit and not self._drop_one():
                return
            self._of[ask] = BatchOrder(ask, next(self._numbers))

    def _drop_one(self) -> bool:
        """Drop a batch that has arrived and is not expected any more; return False when there is none."""
        expected = set(self._expected)
        for ask, order in self._of.items():
            if order.outcome is not None and not order.urgent and ask not in expected:
                del self._of[ask]
                return True
        return False
