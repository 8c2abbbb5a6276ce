"""What may happen to a core besides a message arriving."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.core.consistency import Consistency
from paceline.core.messages import Push, PushId

# -- to a server -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Declared:
    """A table exists from now on; declaring it again with the same consistency changes nothing.

    `keyed`: it is a table of rows, and a pull asks for some of them.
    """

    table: str
    consistency: Consistency
    keyed: bool = False


@dataclass(frozen=True, slots=True)
class InvalidPush:
    """This push arrived, but its tensor may not be applied (a value that is not finite, for example)."""

    push: Push
    reason: str


@dataclass(frozen=True, slots=True)
class Unapplied:
    """An `Apply` of these pushes could not be carried out: its update was not made, and never will be."""

    table: str
    ids: tuple[PushId, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection to that life of that worker ended; it may come back within its lease."""

    worker: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Died:
    """Somebody who knows (its parent process) says that this life of this worker is over."""

    worker: int
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class Changed:
    """The values of this table have changed otherwise than by a push."""

    table: str


@dataclass(frozen=True, slots=True)
class Timeout:
    """`next_deadline()` has passed."""


@dataclass(frozen=True, slots=True)
class Woke:
    """This server has not run for a while and heard no worker: leases that ended meanwhile begin anew."""


ServerHappening = Declared | Changed | InvalidPush | Unapplied | Disconnected | Died | Timeout | Woke


# -- to a worker -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A server's message."""

    server: int
    message: object


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection to this server was made again; what it has not answered is repeated at once."""

    server: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The user works with a table; `servers` hold a part of it. `keyed`: it is a table of rows."""

    table: str
    consistency: Consistency
    servers: tuple[int, ...]
    keyed: bool = False


@dataclass(frozen=True, slots=True)
class WantJoin:
    """The user wants to take part."""


@dataclass(frozen=True, slots=True)
class WantPush:
    """The user pushes an update of this table, to all servers that hold a part or to those named."""

    table: str
    servers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class WantClock:
    """The user has finished the current clock."""


@dataclass(frozen=True, slots=True)
class WantRead:
    """The user wants values.

    `refresh` asks the servers even when the cached copy is fresh enough; `exact` asks for all updates of all clocks
    below the worker's own, whatever the bound of the table.
    """

    table: str
    refresh: bool = True
    exact: bool = False


@dataclass(frozen=True, slots=True)
class WantRows:
    """The user wants rows that contain every update below `needs`.

    `fetch` are the servers that have to be asked, `deliver` those whose deliveries bring the rows: none is in both.
    """

    table: str
    needs: int
    fetch: tuple[int, ...]
    deliver: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WantLeave:
    """The user has finished."""
