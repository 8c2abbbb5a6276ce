"""Requests of a worker to a server outside the clock protocol (tables, their state, barriers, work), and their limits.

A request carries a number that the worker chooses; the reply repeats it. Repeating a request is harmless. What one may
make a server compute or keep is checked before any allocation or long computation. The page about attacks lists all
limits, by message. Paceline's own workers split their requests to stay within them.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from paceline.core.work_queue import WorkAnswer
from paceline.errors import UsageError
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Hyper
from paceline.update.table import MAX_NAME, ShardLayout, TableSpec

COUNT_BYTES = 8  # the number of changed values or rows, before the tensors that a function returns
NEXT_SLOT = "next_slot"  # the key, beside the rows of a piece, of the slot where the next piece begins


class Declare(msgspec.Struct, frozen=True):
    """Here is the declaration of a table: create it if it does not exist, else reply how yours differs.

    `live`: send me its values as the memory in which you keep them, instead of copies, where the transport can.
    """

    number: int
    spec: TableSpec
    live: bool = False


class DeclareRows(msgspec.Struct, frozen=True):
    """Here is the declaration of a row table: create it if it does not exist, else reply how yours differs."""

    number: int
    spec: RowTableSpec


NAMED: Final = "named tensor "  # before the names of tensors, so that these are apart from the names of tables


class Describe(msgspec.Struct, frozen=True):
    """Send me the settings of this table as soon as it is declared."""

    number: int
    table: str


class Initialise(msgspec.Struct, frozen=True):
    """Use the values beside this (raw) as the first values of your part, if it has none yet.

    Of a row table: I have loaded all rows of the snapshot from which the job goes on.
    """

    number: int
    table: str


class AwaitValues(msgspec.Struct, frozen=True):
    """Reply as soon as your part of the table has values; a row table, as soon as the rows of a snapshot are loaded."""

    number: int
    table: str


class SaveState(msgspec.Struct, frozen=True):
    """Send me your part of the table: values and the state of the update rule."""

    number: int
    table: str


class LoadState(msgspec.Struct, frozen=True):
    """Replace your part of the table by what travels beside this; with `only_first`, if it has no values yet."""

    number: int
    table: str
    only_first: bool = False


class Barrier(msgspec.Struct, frozen=True):
    """Reply when all workers that take part have reached this barrier.

    `place`: its name. `problem`: a failure of this worker, which fails the barrier for all. `needs`: the rank of a
    worker without which the barrier fails; -1 for none.
    """

    number: int
    place: str
    problem: str = ""
    needs: int = -1


class ClaimWork(msgspec.Struct, frozen=True):
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


class WorkQueueEntry(msgspec.Struct, frozen=True):
    """The answer to a claim, and the number of batches before the first round of its epoch."""

    answer: WorkAnswer
    start: int


def read_work_answer(body: memoryview) -> WorkQueueEntry:
    """Decode the answer of server 0 to a claim."""
    return msgspec.msgpack.decode(body, type=WorkQueueEntry)


class ReportWait(msgspec.Struct, frozen=True):
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


class TableCall(msgspec.Struct, frozen=True):
    """A call to run exactly once over your part of a table, when it has every update below the clock `needs`.

    I have the answers to all my calls below `settled`, so you need not keep them for repetitions.
    """

    number: int
    table: str
    needs: int
    settled: int


class CallFunction(msgspec.Struct, frozen=True):
    """Run the function of this name over your part, and send me what it returns."""

    table_call: TableCall
    name: str
    numbers: Hyper


class CountRows(msgspec.Struct, frozen=True):
    """Send me the statistics of your rows."""

    table_call: TableCall


class ReadRows(msgspec.Struct, frozen=True):
    """Send me one piece of rows from this slot on, with all their columns or only their values."""

    table_call: TableCall
    start_slot: int
    values_only: bool


class WriteRows(msgspec.Struct, frozen=True):
    """Overwrite your rows with those beside this."""

    table_call: TableCall


class ListTables(msgspec.Struct, frozen=True):
    """Send me the name, kind and declaration of every table that you have a part of."""

    number: int


class BeginCut(msgspec.Struct, frozen=True):
    """Have your part ready to be read as it is when it has every update below the clock `needs`, and go on meanwhile.

    Where updates show on clocks, it has no other update. It ends the cut of this table that I had. With `since`, mark
    the rows that change from then on, and give only those that have changed since the marks of this name began, if you
    have these.
    """

    table_call: TableCall
    values_only: bool = False
    since: str | None = None


def passed(table: str, clock: int, needs: int) -> str:
    """Return why a table is not cut: a quorum of workers has completed the clock that was asked for.

    >>> clock_passed(passed("w", 12, 7)), clock_passed("there is no table 'w'")
    (12, None)
    """
    return f"table '{table}' is at clock {clock}, and cannot be cut at clock {needs} any more"


def clock_passed(reason: str) -> int | None:
    """Return the clock that a table is at which was not cut; None if it was not cut for another reason."""
    found = _PASSED.search(reason)
    return None if found is None else int(found[1])


_PASSED: Final = re.compile(r" is at clock (\d+), and cannot be cut at clock -?\d+ any more$")


class ReadCut(msgspec.Struct, frozen=True):
    """Send me one piece of your part as it was at my cut: each once, in any order; the last ones also again."""

    number: int
    table: str
    index: int


class EndCut(msgspec.Struct, frozen=True):
    """I need no more of my cut."""

    number: int
    table: str


class PublishTable(msgspec.Struct, frozen=True):
    """Publish your part of the table, with its updates below `table_call.needs`, as a part of a version of `name`.

    The version is there once you have been asked for each of `tables`. `number`: of the version, the clock that I have
    reached; `series`: mine, the same for all versions that I publish. `keep`: how many versions of this name to keep.
    `layout`: which tensors lie where, for readers.
    """

    table_call: TableCall
    name: str
    series: str
    number: int
    keep: int
    tables: tuple[str, ...]
    layout: bytes


class RequestDone(msgspec.Struct, frozen=True):
    """Your request is done; its result travels beside this."""

    number: int


class RequestFailed(msgspec.Struct, frozen=True):
    """Your request has failed, for this reason."""

    number: int
    reason: str


class CutHead(msgspec.Struct, frozen=True):
    """What a server says of its part of a cut.

    Args:
        clock: every update of the clocks below is in it.
        version: number of updates in it.
        num_pieces: to be read; -1 if there were no values.
        hyper: hyperparameters of each group, as of the last update.
        layout: how to read the pieces of a dense table; those of rows are safetensors.
        fixed: as safetensors, the state that is in no piece, named as in `Shard.state`; of rows the ids that are gone.
        base: the marks since which its rows have changed; empty if it has all.
        marks: those that begin with it; empty if rows are not marked.
    """

    clock: int
    version: int
    num_pieces: int = -1
    hyper: tuple[Hyper, ...] = ()
    layout: ShardLayout | None = None
    fixed: bytes = b""
    base: str = ""
    marks: str = ""


class ListedTable(msgspec.Struct, frozen=True):
    """A table of a server, in the answer to `ListTables`, and its declaration as msgpack."""

    name: str
    kind: str
    spec: bytes


Request = (
    Declare
    | DeclareRows
    | Describe
    | Initialise
    | AwaitValues
    | SaveState
    | LoadState
    | Barrier
    | ClaimWork
    | ListTables
    | ReadCut
    | EndCut
)
TableOperation = CallFunction | CountRows | ReadRows | WriteRows
WholeTable = TableOperation | BeginCut | PublishTable  # requests about all of a table


SMALL_BYTES: Final = 64 << 10  # a body that is accepted unchecked; an invalid one is refused later, with a reason
MAX_IDS: Final = 1 << 20  # in one read of rows, or in one `Unsubscribe`
MAX_READ_NUMBERS: Final = 1 << 21  # in the answer to one read; a million first values take a tenth of a second
MAX_WAITING_READ_BYTES: Final = 1 << 30  # in all answers about one table that one worker waits for
MAX_PUSH_BYTES: Final = 1 << 30  # of rows in one push
MAX_JOINED_BYTES: Final = 128 << 10  # of several pushes in one frame, which are copied into one body
MAX_HEARD_BYTES: Final = 1 << 29  # of one worker's kept answers, and of its waiting requests


def most_rows(width: int) -> int:
    """Return how many rows one read may request when a row and its echo have `width` numbers together.

    >>> most_rows(16), most_rows(1 << 21)
    (131072, 1)
    """
    return max(1, min(MAX_IDS, MAX_READ_NUMBERS // width))


def require_short(what: str, name: str) -> None:
    """Raise UsageError for a name longer than MAX_NAME."""
    if len(name) > MAX_NAME:
        raise UsageError(f"the name of {what} has {len(name)} characters, expected at most {MAX_NAME}")
