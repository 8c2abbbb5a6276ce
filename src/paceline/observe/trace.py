"""The trace: events of one process as JSON lines, one record a line, in `<run>/trace/<role>-<rank>.jsonl`.

Every `t` is `time.monotonic()` in seconds, comparable between processes on one host. Clocks start at 0, and a
*value clock* m means that all updates with a clock below m are included.
"""

from __future__ import annotations

import os
from io import FileIO
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Final, Literal, Self, final

import msgspec

from paceline.notices import tell

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

# Bound for a process of a run without a folder: at most twice as much is on the disk, see `TraceFile`.
UNNAMED_TRACE_BYTES: Final = 8 * 1024 * 1024
OLDER: Final = ".old"
ENDED: Final = "ended"  # a file beside the traces of a run, once one of them has ended by an error
_BLOCK_BYTES: Final = 64 * 1024


@final
class TraceFile:
    """Appends whole lines to a file. The first error ends the trace, not the training.

    It is told by the first process of the run that meets one, which makes a file for the others to see.

    At `max_bytes` the file is renamed to `NAME.old`, in place of an earlier one, and a new file is begun: the latest
    records are kept, in at most twice `max_bytes` on disk.
    """

    def __init__(self, path: Path, max_bytes: int = 0, tell: Callable[[str], None] = tell) -> None:
        self._path = path
        self._max_bytes = max_bytes  # 0: no bound
        self._tell = tell
        self._file: FileIO | None = None
        self._size = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self._give_up(error)

    @property
    def is_open(self) -> bool:
        """Whether lines are still written."""
        return self._file is not None

    def append(self, lines: bytes) -> None:
        """Write whole lines; report an error, which ends the trace."""
        if self._file is None:
            return
        try:
            if self._max_bytes and self._size and self._size + len(lines) > self._max_bytes:
                self.close()
                self._path.replace(self._path.with_name(self._path.name + OLDER))
                self._open()
            self._write(lines)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _open(self) -> None:
        """Open for appending, and drop an incomplete last line of a killed process."""
        self._file = FileIO(self._path, "a+")
        self._size = _end_of_lines(self._file.fileno())
        self._file.truncate(self._size)

    def _write(self, lines: bytes) -> None:
        assert self._file is not None
        rest = memoryview(lines)
        while rest:
            rest = rest[os.write(self._file.fileno(), rest) :]
        self._size += len(lines)

    def _give_up(self, error: OSError) -> None:
        try:
            self.close()
        except OSError as another:  # a file server reports a full disk only now
            error = another
        try:
            self._path.with_name(ENDED).touch(exist_ok=False)  # needs no space on most disks
        except FileExistsError:
            return
        except OSError:
            pass  # told by each process, as none can leave word for the others
        self._tell(
            f"the trace {self._path} ends here: {error.strerror}. Training goes on; the live display and reports lack "
            "what follows, also of other processes whose traces end, which is not told again. Free space, raise a "
            "limit (`ulimit -f`), or name another folder with --run-dir"
        )


def _end_of_lines(descriptor: int) -> int:
    """Return the end of the last whole line; reads backwards, and stops there."""
    end = os.fstat(descriptor).st_size
    while end:
        begin = max(0, end - _BLOCK_BYTES)
        newline = os.pread(descriptor, end - begin, begin).rfind(b"\n")
        if newline >= 0:
            return begin + newline + 1
        end = begin
    return 0


# Short, so that the live display compares workers at nearly the same moment.
FLUSH_INTERVAL_S = 0.02
NO_SERVER = -1  # in place of a server's rank, for records of the worker itself

# What is read back keeps to these, so that sums and differences are finite, and floats: a trace may come from anywhere.
MOST_SECONDS: Final = 1e12
BoundedSeconds = Annotated[float, msgspec.Meta(ge=-MOST_SECONDS, le=MOST_SECONDS)]
Whole = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class ReadRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="read"):
    """A worker at `clock` read the values of a table, complete up to `value_clock`."""

    t: BoundedSeconds
    worker: Whole
    table: str
    clock: Whole
    value_clock: Whole
    waited_s: BoundedSeconds
    source: Literal["fetch", "cache", "delivery"]

    @property
    def differential(self) -> int:
        """Return the clock differential: value clock of the values minus the reader's clock; -1 is the freshest."""
        return self.value_clock - 1 - self.clock

    @property
    def staleness(self) -> int:
        """Return the lag of the values behind the reader, in clocks: 0 is the freshest, s the bound of ssp(s)."""
        return self.clock - self.value_clock


class RowRead(msgspec.Struct, frozen=True, tag_field="kind", tag="row_read"):
    """A worker at `clock` read rows of a table: the number of rows by value clock.

    Rows may also contain later pushes of the reader, which do not count.
    """

    t: BoundedSeconds
    worker: Whole
    table: str
    clock: Whole
    num_rows: dict[Whole, Whole]
    waited_s: BoundedSeconds

    @property
    def differentials(self) -> dict[int, int]:
        """Return the number of rows read at each clock differential; see `ReadRecord.differential`."""
        return {value_clock - 1 - self.clock: num for value_clock, num in self.num_rows.items()}


class Step(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """A worker finished `clock`.

    `t` is taken before the clock message is sent, so that no other worker can be recorded as acting on it earlier.
    `step_s` is the time since the previous clock was finished, `comm_s` the part of it in push, clock and pull of the
    training loop, and `wait_s` the part of that in waiting for values; `load_s` is the part in which the loop waited
    for batches of a sharded loader. `comm_s` and `load_s` are 0 in traces of older versions.
    """

    t: BoundedSeconds
    worker: Whole
    clock: Whole
    samples: Whole
    loss: float | None
    wait_s: BoundedSeconds
    step_s: BoundedSeconds
    comm_s: BoundedSeconds = 0.0
    load_s: BoundedSeconds = 0.0

    @property
    def own_s(self) -> float:
        """Return the time in which the script computed."""
        return max(0.0, self.step_s - self.comm_s - self.load_s)


class Evaluated(msgspec.Struct, frozen=True, tag_field="kind", tag="evaluated"):
    """A worker evaluated the model on held-out data; `accuracy` is between 0 and 1. None: not a finite number."""

    t: BoundedSeconds
    worker: Whole
    clock: Whole
    loss: float | None
    accuracy: float | None


class Reported(msgspec.Struct, frozen=True, tag_field="kind", tag="reported"):
    """A worker reported a loss outside of a step: one of several in a clock, one after the last, or one not finite.

    In the last case `loss` is None, which JSON supports, and `text` is the number.
    """

    t: BoundedSeconds
    worker: Whole
    clock: Whole
    loss: float | None
    text: Literal["", "nan", "inf", "-inf"] = ""


NonFiniteText = Literal["nan", "inf", "-inf"]  # how JSON has a number that is not finite


class ReportedValues(msgspec.Struct, frozen=True, tag_field="kind", tag="values"):
    """A worker at `clock` reported values under names of its script's."""

    t: BoundedSeconds
    worker: Whole
    clock: Whole
    values: dict[str, float | NonFiniteText]


class Resources(msgspec.Struct, frozen=True, tag_field="kind", tag="resources"):
    """A worker leaves: the peak memory of its process, and the traffic of its TCP connections."""

    t: BoundedSeconds
    worker: Whole
    peak_bytes: Whole
    sent_bytes: Whole
    received_bytes: Whole


class Load(msgspec.Struct, frozen=True, tag_field="kind", tag="load"):
    """A server has ended: its traffic, and its load.

    `in_use_s` is the time from the first message to the last. In this time its thread worked for `busy_s`, and the
    busiest of its TCP connections had unacknowledged data for `sending_s`, by the counters of the kernel.
    """

    t: BoundedSeconds
    server: Whole
    in_use_s: BoundedSeconds
    busy_s: BoundedSeconds
    sending_s: BoundedSeconds
    received_bytes: Whole
    sent_bytes: Whole


class Fed(msgspec.Struct, frozen=True, tag_field="kind", tag="fed"):
    """A data server has ended: the batches that it has made, and its load.

    `samples` are those in the batches; `skipped` could not be decoded.
    """

    t: BoundedSeconds
    data_server: Whole
    batches: Whole
    samples: Whole
    skipped: Whole
    bytes: Whole
    busy_s: BoundedSeconds


class Epoch(msgspec.Struct, frozen=True, tag_field="kind", tag="epoch"):
    """A worker has reached the end of an epoch, or left it: the samples that it read.

    `skipped` could not be decoded; `again` were read again, after workers died with them.
    """

    t: BoundedSeconds
    worker: Whole
    epoch: Whole
    samples: Whole
    skipped: Whole
    again: Whole


class MinClock(msgspec.Struct, frozen=True, tag_field="kind", tag="min_clock"):
    """On this server all workers have now finished every clock below `clock` for this table."""

    t: BoundedSeconds
    server: Whole
    table: str
    clock: Whole


class BoundRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="bound"):
    """This server has moved the adaptive bound of a table, as `BoundMoved` of its core says."""

    t: BoundedSeconds
    server: Whole
    table: str
    before: Whole
    bound: Whole
    waiting: float
    staleness: float


class AppliedRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="applied"):
    """A server applied the updates of these workers, in this order; `took_s` is how long it took until `t`."""

    t: BoundedSeconds
    server: Whole
    table: str
    workers: tuple[Whole, ...]
    clock: Whole
    took_s: BoundedSeconds = 0.0


class ArrivedRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="arrived"):
    """The end of a worker's `clock` has come to a server, and with it, or before it, what that worker pushed."""

    t: BoundedSeconds
    server: Whole
    worker: Whole
    clock: Whole


class Serving(msgspec.Struct, frozen=True, tag_field="kind", tag="serving"):
    """A server works: its totals so far, as in `Load`, and the number of frames that wait for its thread.

    `hot_rows` are the rows that its sample of pushes has most often, as (table, id, share of the pushes). `num_behind`
    is by how many clocks of a worker, or pushes to a table that shows them on arrival, its replica lags; None without a
    replica.
    """

    t: BoundedSeconds
    server: Whole
    in_use_s: BoundedSeconds
    busy_s: BoundedSeconds
    received_bytes: Whole
    sent_bytes: Whole
    num_waiting: Whole
    hot_rows: tuple[tuple[str, Whole, float], ...] = ()
    num_behind: Whole | None = None


class Carried(msgspec.Struct, frozen=True, tag_field="kind", tag="carried"):
    """A server works: its bytes so far, in bodies, by worker (the link to it) and by table, as received and sent.

    Tables beyond the first ones are counted together, under an empty name. What belongs to no table, as requests and
    first values, counts for links only.
    """

    t: BoundedSeconds
    server: Whole
    links: tuple[tuple[Whole, Whole, Whole], ...]
    tables: tuple[tuple[str, Whole, Whole], ...]


class Sampled(msgspec.Struct, frozen=True, tag_field="kind", tag="sampled"):
    """A process runs: its totals so far.

    Args:
        t: time.
        role: what it is, worker or server.
        rank: its rank.
        pid: its number on its machine.
        cpu_s: processor time of all of its threads.
        delayed_s: time in which its training or serving thread could have run, and had no core.
        gc_s: time in which the garbage collector of Python stopped that thread.
        num_faults: pages that had to be read from a disk.
        num_resent: segments that its TCP connections have sent again.
        host: name of its machine.
    """

    t: BoundedSeconds
    role: Literal["worker", "server"]
    rank: Whole
    pid: Whole
    cpu_s: BoundedSeconds
    delayed_s: BoundedSeconds
    gc_s: BoundedSeconds
    num_faults: Whole
    num_resent: Whole = 0
    host: str = ""


class Refusal(msgspec.Struct, frozen=True, tag_field="kind", tag="refusal"):
    """A server refused a request for good. With server -1, the worker reports a push or step that was not applied."""

    t: BoundedSeconds
    server: Whole
    worker: Whole
    table: str
    reason: str


class MembershipRecord(msgspec.Struct, frozen=True, tag_field="kind", tag="membership"):
    """A server saw a worker join or leave."""

    t: BoundedSeconds
    server: Whole
    worker: Whole
    incarnation: Whole
    event: Literal["joined", "left", "died"]


class Exit(msgspec.Struct, frozen=True, tag_field="kind", tag="exit"):
    """The launcher saw a process end unexpectedly.

    `exit_code` is minus the number of the signal that killed it, `unix_s` the time in seconds since 1970; `happened`
    and `then` are texts on its end and on the reaction of the run.
    """

    t: BoundedSeconds
    name: str
    role: str
    rank: Whole
    incarnation: Whole
    pid: Whole | None
    exit_code: Whole
    unix_s: BoundedSeconds
    happened: str
    then: str


BARRIER: Final = "barrier()"  # as `State.call`


class State(msgspec.Struct, frozen=True, tag_field="kind", tag="state"):
    """State of a worker that has finished no clock for a while, and its duration: its process runs."""

    t: BoundedSeconds
    worker: Whole
    clock: Whole
    doing: Literal["computing", "communicating"]
    for_s: BoundedSeconds
    call: str = ""  # that it is in, where that waits for other workers whatever their clocks are


class Handled(msgspec.Struct, frozen=True, tag_field="kind", tag="handled"):
    """A core handled one event with these effects: the full protocol log, written only on request."""

    t: BoundedSeconds
    server_or_worker: str
    event: dict[str, object]
    effects: list[dict[str, object]]


TraceRecord = (
    ReadRecord
    | RowRead
    | Step
    | Evaluated
    | Reported
    | ReportedValues
    | Resources
    | Load
    | Fed
    | Epoch
    | MinClock
    | BoundRecord
    | AppliedRecord
    | ArrivedRecord
    | Serving
    | Carried
    | Sampled
    | Refusal
    | MembershipRecord
    | Exit
    | State
    | Handled
)


def trace_path(run_folder: Path, role: Literal["worker", "server", "data", "launcher"], rank: int) -> Path:
    """Return the path of the trace of a process."""
    return run_folder / "trace" / f"{role}-{rank}.jsonl"


class Trace:
    """Writes the records of one process; with path None it writes nothing. `each` is called with every record, too.

    Records are buffered, and written at the latest by the first `record` that is 20 ms younger than the last write, and
    by `flush` and `close`. Appends to an existing file (of a worker that returns), and drops its torn last line. May be
    used from several threads. A file that cannot be written, on a full disk for example, ends the trace with one
    notice; `max_bytes` bounds it, see `TraceFile`.

        with Trace(trace_path(run_folder, "worker", 0)) as trace:
            trace.record(Step(time.monotonic(), 0, clock, samples=32, loss=0.7, wait_s=0.0, step_s=0.01, comm_s=0.002))
    """

    def __init__(
        self,
        path: Path | None,
        max_bytes: int = 0,
        tell: Callable[[str], None] = tell,
        each: Callable[[TraceRecord], None] | None = None,
    ) -> None:
        self._each = each
        self._lock = Lock()
        self._encoder = msgspec.json.Encoder()
        # Invariant: in the order of record(); empty without a file.
        self._buffer: list[TraceRecord] = []
        self._flushed_t = 0.0
        self._file = None if path is None else TraceFile(path, max_bytes, tell)
        self.is_kept = path is not None or each is not None  # else it is in vain to make records

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def record(self, record: TraceRecord) -> None:
        """Add one record; writes to the file when the last write is 20 ms older than the record."""
        if not self.is_kept:
            return
        if self._each is not None:
            self._each(record)
        with self._lock:
            if self._file is None or not self._file.is_open:
                return
            self._buffer.append(record)
            if record.t - self._flushed_t >= FLUSH_INTERVAL_S:
                self._flushed_t = record.t
                self._write()

    def flush(self) -> None:
        """Write buffered records; call it before a long wait."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write buffered records and close the file; later records are dropped."""
        with self._lock:
            self._write()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self) -> None:
        if self._file is not None and self._buffer:
            self._file.append(self._encoder.encode_lines(self._buffer))
            self._buffer.clear()
