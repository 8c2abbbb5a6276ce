"""Events of a core other than messages: calls of the user, connections, timeouts, deaths."""

from __future__ import annotations

from paceline.core.consistency import Consistency
from paceline.core.messages import Push, PushId, value_class

# -- to a server -----------------------------------------------------------------------------------------------------


@value_class
class Declared:
    """A table exists from now on; declaring it again with the same consistency changes nothing.

    `keyed`: it is a table of rows, and a pull asks for some of them.
    """

    table: str
    consistency: Consistency
    keyed: bool = False


@value_class
class InvalidPush:
    """This push arrived with a tensor that must not be applied (a value that is not finite, for example)."""

    push: Push
    reason: str


@value_class
class ClippedPush:
    """This push arrived, and its update is to be clipped by its norm over all servers."""

    push: Push


@value_class
class Measured:
    """The gradients that a `Measure` names have this norm, combined as for their update."""

    table: str
    clock: int
    norm: float


@value_class
class Unapplied:
    """An `Apply` of these pushes failed: the update was not made, and never will be."""

    table: str
    ids: tuple[PushId, ...]
    reason: str


@value_class
class NotFinite:
    """A push of an `Apply` has values that are not finite: the update is made without it."""

    table: str
    id: PushId
    reason: str


@value_class
class Disconnected:
    """The connection to that life of that worker ended; it may come back within its lease."""

    worker: int
    incarnation: int


@value_class
class Died:
    """A reliable source (the worker's parent process) reports that this life of the worker has ended."""

    worker: int
    incarnation: int
    reason: str


@value_class
class Changed:
    """The values of this table have changed by other means than a push."""

    table: str


@value_class
class Timeout:
    """`next_deadline()` has passed."""


@value_class
class Woke:
    """The server process was suspended and could hear no worker: leases that ended meanwhile start again."""


@value_class
class Resumed:
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


@value_class
class Arrived:
    """A server's message."""

    server: int
    message: object


@value_class
class Connected:
    """The connection to this server was made again; its unanswered messages are repeated at once."""

    server: int


@value_class
class Opened:
    """The user has opened a table; `servers` hold parts of it. `keyed`: it is a row table."""

    table: str
    consistency: Consistency
    servers: tuple[int, ...]
    keyed: bool = False


@value_class
class WantJoin:
    """The user wants to take part."""


@value_class
class WantPush:
    """The user pushes an update of this table, to all servers that hold a part or only to `servers`.

    `may_wait`: until the clock ends, to travel with its tick. `ends_clock`: the user will finish the clock at once, and
    then read, so it may wait for that as well.
    """

    table: str
    servers: tuple[int, ...] | None = None
    may_wait: bool = False
    ends_clock: bool = False


@value_class
class WantClock:
    """The user has finished the current clock."""


@value_class
class WantRead:
    """The user wants values.

    `refresh` pulls from the servers even when the cached copy is fresh enough. `exact` requires all updates of all
    clocks below the worker's own, whatever the bound of the table. `more`: another read follows at once, and the pulls
    of both may travel together.
    """

    table: str
    refresh: bool = True
    exact: bool = False
    more: bool = False


@value_class
class WantRows:
    """The user wants rows that contain every update below `needs`.

    `fetch` are the servers to pull from, `deliver` those whose deliveries bring the rows. No server is in both.
    """

    table: str
    needs: int
    fetch: tuple[int, ...]
    deliver: tuple[int, ...] = ()


@value_class
class WantLeave:
    """The user has finished."""
