"""Events of a core other than messages: calls of the user, connections, timeouts, deaths."""

from __future__ import annotations

import msgspec

from paceline.core.consistency import Consistency
from paceline.core.messages import Push, PushId

# -- to a server -----------------------------------------------------------------------------------------------------


class Declared(msgspec.Struct, frozen=True):
    """A table exists from now on; declaring it again with the same consistency changes nothing.

    `keyed`: it is a table of rows, and a pull asks for some of them.
    """

    table: str
    consistency: Consistency
    keyed: bool = False


class InvalidPush(msgspec.Struct, frozen=True):
    """This push arrived with a tensor that must not be applied (a value that is not finite, for example)."""

    push: Push
    reason: str


class ClippedPush(msgspec.Struct, frozen=True):
    """This push arrived, and its update is to be clipped by its norm over all servers."""

    push: Push


class Measured(msgspec.Struct, frozen=True):
    """The gradients that a `Measure` names have this norm, combined as for their update."""

    table: str
    clock: int
    norm: float


class Unapplied(msgspec.Struct, frozen=True):
    """An `Apply` of these pushes failed: the update was not made, and never will be."""

    table: str
    ids: tuple[PushId, ...]
    reason: str


class NotFinite(msgspec.Struct, frozen=True):
    """A push of an `Apply` has values that are not finite: the update is made without it."""

    table: str
    id: PushId
    reason: str


class Disconnected(msgspec.Struct, frozen=True):
    """The connection to that life of that worker ended; it may come back within its lease."""

    worker: int
    incarnation: int


class Died(msgspec.Struct, frozen=True):
    """A reliable source (the worker's parent process) reports that this life of the worker has ended."""

    worker: int
    incarnation: int
    reason: str


class Changed(msgspec.Struct, frozen=True):
    """The values of this table have changed by other means than a push."""

    table: str


class Timeout(msgspec.Struct, frozen=True):
    """`next_deadline()` has passed."""


class Woke(msgspec.Struct, frozen=True):
    """The server process was suspended and could hear no worker: leases that ended meanwhile start again."""


class Resumed(msgspec.Struct, frozen=True):
    """Another process goes on in this server's place: all connections are gone, and messages on them may be lost."""


ServerHappening = (
    Declared
    | Changed
    | InvalidPush
    | ClippedPush
    | Measured
    | Unapplied
    | NotFinite
    | Disconnected
    | Died
    | Timeout
    | Woke
    | Resumed
)


# -- to a worker -----------------------------------------------------------------------------------------------------


class Arrived(msgspec.Struct, frozen=True):
    """A server's message."""

    server: int
    message: object


class Connected(msgspec.Struct, frozen=True):
    """The connection to this server was made again; its unanswered messages are repeated at once."""

    server: int


class Opened(msgspec.Struct, frozen=True):
    """The user has opened a table; `servers` hold parts of it. `keyed`: it is a row table."""

    table: str
    consistency: Consistency
    servers: tuple[int, ...]
    keyed: bool = False


class WantJoin(msgspec.Struct, frozen=True):
    """The user wants to take part."""


class WantPush(msgspec.Struct, frozen=True):
    """The user pushes an update of this table, to all servers that hold a part or only to `servers`.

    `may_wait`: until the clock ends, to travel with its tick. `ends_clock`: the user will finish the clock at once, and
    then read, so it may wait for that as well.
    """

    table: str
    servers: tuple[int, ...] | None = None
    may_wait: bool = False
    ends_clock: bool = False


class WantClock(msgspec.Struct, frozen=True):
    """The user has finished the current clock."""


class WantRead(msgspec.Struct, frozen=True):
    """The user wants values.

    `refresh` pulls from the servers even when the cached copy is fresh enough. `exact` requires all updates of all
    clocks below the worker's own, whatever the bound of the table. `more`: another read follows at once, and the pulls
    of both may travel together.
    """

    table: str
    refresh: bool = True
    exact: bool = False
    more: bool = False


class WantRows(msgspec.Struct, frozen=True):
    """The user wants rows that contain every update below `needs`.

    `fetch` are the servers to pull from, `deliver` those whose deliveries bring the rows. No server is in both.
    """

    table: str
    needs: int
    fetch: tuple[int, ...]
    deliver: tuple[int, ...] = ()


class WantLeave(msgspec.Struct, frozen=True):
    """The user has finished."""
