"""Requests of a worker to a server outside the clock protocol: tables, their state, barriers, dynamic work.

A request carries a number that the worker chooses; the reply repeats it. Repeating a request is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Hyper
from paceline.update.table import TableSpec

COUNT_BYTES = 8  # the number of changed values or rows, before the tensors that a function returns
NEXT_SLOT = "next_slot"  # the key, beside the rows of a piece, of the slot where the next piece begins


@dataclass(frozen=True, slots=True)
class Declare:
    """Here is the declaration of a table: create it if it does not exist, else reply how yours differs.

    `live`: send me its values as the memory in which you keep them, instead of copies, where the transport can.
    """

    number: int
    spec: TableSpec
    live: bool = False


@dataclass(frozen=True, slots=True)
class DeclareRows:
    """Here is the declaration of a row table: create it if it does not exist, else reply how yours differs."""

    number: int
    spec: RowTableSpec


NAMED: Final = "named tensor "  # before the names of tensors, so that these are apart from the names of tables


@dataclass(frozen=True, slots=True)
class Describe:
    """Send me the settings of this table as soon as it is declared."""

    number: int
    table: str


@dataclass(frozen=True, slots=True)
class Initialise:
    """Use the values beside this (raw) as the first values of your part, if it has none yet."""

    number: int
    table: str


@dataclass(frozen=True, slots=True)
class AwaitValues:
    """Reply as soon as your part of the table has values."""

    number: int
    table: str


@dataclass(frozen=True, slots=True)
class SaveState:
    """Send me your part of the table: values and the state of the update rule."""

    number: int
    table: str


@dataclass(frozen=True, slots=True)
class LoadState:
    """Replace your part of the table by what travels beside this."""

    number: int
    table: str


@dataclass(frozen=True, slots=True)
class Barrier:
    """Reply when all workers that take part have reached this barrier.

    `place`: its name. `problem`: a failure of this worker, which fails the barrier for all. `needs`: the rank of a
    worker without which the barrier fails; -1 for none.
    """

    number: int
    place: str
    problem: str = ""
    needs: int = -1


@dataclass(frozen=True, slots=True)
class ClaimWork:
    """Lease me a piece of this work in the round that I have reached, or reply that none is left.

    `sizes`: the number of pieces in the share of each home; empty after the last round of an epoch, where the answer
    comes once all pieces are settled or one is free again. `terms`: numbers that must be equal for all workers of the
    epoch. `start`: what precedes the first round of the epoch; a restarted worker learns where the others begin.
    `clock`: the clock that the worker has begun.
    """

    number: int
    work: str
    epoch: int
    round: int
    sizes: tuple[int, ...]
    terms: tuple[int, ...]
    start: int = 0
    clock: int = 0


@dataclass(frozen=True, slots=True)
class ReportWait:
    """I have waited for `what` for `waited_s` seconds, or not for unusually long (0): reply what you know about it.

    Empty `what`: the wait is over.

    The wait ends when every worker has finished the clocks below `needs`, unless that is 0, or when each of `workers`
    has done its part. `table`: the table whose values or pushes I wait for. The reply is "1" or "0", for whether I
    should print it, in a deadlock "3" or "2", and a sentence.
    """

    number: int
    waited_s: float
    what: str
    table: str = ""
    needs: int = 0
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TableCall:
    """A call to run exactly once over your part of a table, when it has every update below the clock `needs`.

    I have the answers to all my calls below `settled`, so you need not keep them for repetitions.
    """

    number: int
    table: str
    needs: int
    settled: int


@dataclass(frozen=True, slots=True)
class CallFunction:
    """Run the function of this name over your part, and send me what it returns."""

    table_call: TableCall
    name: str
    numbers: Hyper


@dataclass(frozen=True, slots=True)
class CountRows:
    """Send me the statistics of your rows."""

    table_call: TableCall


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Send me one piece of rows from this slot on, with all their columns or only their values."""

    table_call: TableCall
    start_slot: int
    values_only: bool


@dataclass(frozen=True, slots=True)
class WriteRows:
    """Overwrite your rows with those beside this."""

    table_call: TableCall


@dataclass(frozen=True, slots=True)
class RequestDone:
    """Your request is done; its result travels beside this."""

    number: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Your request has failed, for this reason."""

    number: int
    reason: str


Request = Declare | DeclareRows | Describe | Initialise | AwaitValues | SaveState | LoadState | Barrier | ClaimWork
WholeTable = CallFunction | CountRows | ReadRows | WriteRows  # requests about all of a table
