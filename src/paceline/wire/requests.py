"""What a worker asks of a server outside the protocol of clocks: tables, their state, meeting points.

A request carries a number of the worker's choosing; the reply repeats it. Repeating a request is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Hyper
from paceline.update.table import TableSpec

COUNT_BYTES = 8  # before the tensors that a function returns: how many values or rows it changed
NEXT_SLOT = "next_slot"  # beside the rows of a piece: where the next piece begins


@dataclass(frozen=True, slots=True)
class Declare:
    """This is a table as I see it; make it if there is none, or tell me how yours differs.

    `live`: send me its values as the memory in which you keep them, instead of copies, where the carrier can.
    """

    number: int
    spec: TableSpec
    live: bool = False


@dataclass(frozen=True, slots=True)
class DeclareRows:
    """This is a row table as I see it; make it if there is none, or tell me how yours differs."""

    number: int
    spec: RowTableSpec


@dataclass(frozen=True, slots=True)
class Describe:
    """Send me the settings of this table, as soon as somebody has declared it."""

    number: int
    table: str


@dataclass(frozen=True, slots=True)
class Initialise:
    """These are the first values of your part (beside this, raw); they count only if there are none yet."""

    number: int
    table: str


@dataclass(frozen=True, slots=True)
class AwaitValues:
    """Tell me when your part of the table has values."""

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
    """Tell me when all workers that take part have come to this meeting point.

    `problem`: what has failed here; then none of them is to go on as if it had not. `needs`: the rank of a worker
    without which the meeting is of no use; -1 where any will do.
    """

    number: int
    place: str
    problem: str = ""
    needs: int = -1


@dataclass(frozen=True, slots=True)
class ClaimWork:
    """Give me a piece of this work, in the round to which I have come; or tell me that there is none.

    `sizes`: how many pieces the share of each home has; none behind the last round of an epoch, where the answer comes
    when all pieces are settled or one is free again. `terms`: what all have to agree on that take pieces of the epoch.
    `start`: what is before the first round of the epoch; who was started again is told where the others begin.
    `clock`: the one that the worker has begun.
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
    """I have been waiting for `what` for so many seconds: tell me what you know of that. Without `what`: no longer.

    The wait ends when every worker has finished the clocks below `needs`, unless that is 0, or when each of `workers`
    has done its part. `table`: whose values or pushes I wait for. What is sent back is "1" or "0", for whether I am to
    print it, and a sentence.
    """

    number: int
    waited_s: float
    what: str
    table: str = ""
    needs: int = 0
    workers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TableCall:
    """Something to be done once with your part of a table, when it has every update below the clock `needs`.

    The worker has the answers to all its requests below `settled`: they need not be kept for copies.
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
    """Send me the rows from this slot on, as many as make a piece, with all their columns or their values alone."""

    table_call: TableCall
    start_slot: int
    values_only: bool


@dataclass(frozen=True, slots=True)
class WriteRows:
    """Write the rows that travel beside this over yours."""

    table_call: TableCall


@dataclass(frozen=True, slots=True)
class RequestDone:
    """Your request is carried out; what you asked for is beside this."""

    number: int


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """Your request cannot be carried out, for this reason."""

    number: int
    reason: str


Request = Declare | DeclareRows | Describe | Initialise | AwaitValues | SaveState | LoadState | Barrier | ClaimWork
WholeTable = CallFunction | CountRows | ReadRows | WriteRows  # what is asked of all of a table
