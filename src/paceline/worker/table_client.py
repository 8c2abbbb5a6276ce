"""What a worker asks of each of its tables: the effects of its core, its clocks, and its end.

A kind of table is a class that implements `TableClient` and opens its tables itself (`DenseClient.open`,
`RowClient.open`); the worker knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import msgspec

from paceline.core.consistency import Consistency
from paceline.core.effects import Drop, Forget, Install, ReadDone, Release
from paceline.core.messages import Fetched, Pull, Push
from paceline.core.worker import WorkerCore, WorkerEvent
from paceline.errors import PacelineError
from paceline.transport.base import EMPTY, Transport
from paceline.update.placement import RowSharding
from paceline.wire.messages import EarlyValues, FetchedRest, KeysWanted, PullFrame, PushPart
from paceline.wire.send_queue import OrderedPiece
from paceline.worker.rows.throttle import Throttle
from paceline.worker.rpc import Rpc
from paceline.worker.waits import WorkerLock, WorkerOptions


class SendFrame(Protocol):
    """Sends a server a message with its body; an urgent one may overtake others. Called under the worker's lock."""

    def __call__(
        self,
        server: int,
        message: object,
        body: memoryview = EMPTY,
        *,
        urgent: bool = False,
        last_of: object | None = None,
        piece: OrderedPiece | None = None,
    ) -> None:
        """Send; does not block for long. `last_of`: the message whose last piece it is; see `SendQueue.send`."""
        ...


class ClientContext(msgspec.Struct, frozen=True):
    """What all tables of a worker share.

    Args:
        core: of the worker.
        lock: guards the core and all tables.
        send: sends a frame.
        handle: has the core process an event, and performs its effects.
        add: adds an open table to those of the worker; called under the lock.
        rpc: calls servers outside of the protocol of the core, to declare a table.
        transport: allocates memory that servers may map.
        row_sharding: which server has which rows, the same for all row tables.
        throttle: sends the rows of all tables with a budget.
        distant: returns the servers on other machines.
    """

    core: WorkerCore
    lock: WorkerLock
    send: SendFrame
    handle: Callable[[WorkerEvent], None]
    add: Callable[[str, TableClient, Consistency], None]
    rpc: Rpc
    transport: Transport
    options: WorkerOptions
    row_sharding: RowSharding
    throttle: Throttle
    distant: Callable[[], frozenset[int]] = frozenset


class TableClient(Protocol):
    """One table of a worker: its cache, its pushes and its reads in flight.

    Two implementations: `DenseClient` and `RowClient`. Unless it says otherwise, a method is called under the worker's
    lock and does not block. What a user does with a table differs between the two, and is not part of this.
    """

    # -- effects of the core -----------------------------------------------------------------------------------------

    def send_push(self, server: int, push: Push, *, bare: bool) -> None:
        """Send a server its part of a push, unless it has answered; `bare` without values, which the server has."""
        ...

    def push_part(self, server: int, push: Push) -> PushPart | None:
        """Return a server's part of a push that travels in a step, None if the server has answered it."""
        ...

    def pull_part(self, server: int, pull: Pull) -> PullFrame:
        """Return a pull that travels in a step."""
        ...

    def send_pull(self, server: int, pull: Pull) -> None:
        """Send a server the request of a read."""
        ...

    def install(self, effect: Install, body: memoryview) -> None:
        """Cache the values in `body`; raises if they are not what was requested."""
        ...

    def forget(self, effect: Forget) -> None:
        """Drop what is cached from a server."""
        ...

    def release(self, effect: Release) -> None:
        """Note the answer of a server to its part of a push; the last one frees its memory and ends its future."""
        ...

    def drop(self, effect: Drop) -> None:
        """Forget a server's part of a push that is applied, and was kept for the case that the server is lost."""
        ...

    def finish_read(self, done: ReadDone) -> None:
        """End the future of a read."""
        ...

    # -- connections and memory --------------------------------------------------------------------------------------

    def receive_buffer(self, server: int, message: Fetched, size_bytes: int) -> memoryview | None:
        """Return memory for the values of a message, None for any. Called without the lock, by the server's reader."""
        ...

    def place_early(self, server: int, message: EarlyValues | FetchedRest, size_bytes: int) -> memoryview | None:
        """Return memory for values that come before their clock is complete; called as `receive_buffer` is."""
        ...

    def early_body(self, server: int, message: FetchedRest) -> memoryview | None:
        """Return the values of which only the rest came with a message; None if it does not count."""
        ...

    def note_received(self, server: int, message: Fetched) -> None:
        """Note that the values of a message were processed: the server may reuse their memory."""
        ...

    def on_keys_wanted(self, server: int, message: KeysWanted) -> None:
        """Send a push or a pull again with its ids, which the server does not keep."""
        ...

    def on_reconnected(self, server: int) -> None:
        """Process a new connection to a server, before anything is repeated on it: frames may be lost."""
        ...

    # -- pushes under way, and the end -------------------------------------------------------------------------------

    def flush_pushes(self, clock: int) -> None:
        """Send all pushes made up to this clock that are kept back; blocks until they are sent."""
        ...

    def num_under_way(self) -> int:
        """Count the pushes that some server has not answered."""
        ...

    def num_held(self, clock: int) -> int:
        """Count the pushes that are applied when this worker finishes this clock."""
        ...

    def abandon(self, error: PacelineError) -> None:
        """End all futures with an error: whether pushes were applied is unknown."""
        ...

    def close(self) -> None:
        """Release all memory; called after `abandon`."""
        ...


@runtime_checkable
class ClockedTable(TableClient, Protocol):
    """A table that keeps accounts of clocks, as row tables do: of the rows read from a cache, and of a budget."""

    def prepare_tick(self, clock: int) -> None:
        """Send what may not wait any longer; blocks for a budget, and while many reports are unconfirmed."""
        ...

    def end_clock(self, clock: int) -> None:
        """Make the report of a finished clock."""
        ...

    def send_before_tick(self, server: int, clock: int) -> None:
        """Send a server the reports of the clocks that the tick ends."""
        ...

    def note_ticked(self, server: int, clock: int) -> None:
        """Drop the reports that the server has confirmed."""
        ...

    def holds_ticks(self) -> bool:
        """Return whether a tick may not overtake what is on its way."""
        ...

    def num_kept_back(self) -> int:
        """Count the rows that filters keep back, without those of which only a rounding error is left."""
        ...
