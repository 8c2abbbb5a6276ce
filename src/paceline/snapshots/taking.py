"""Takes snapshots while a worker trains, and gives a job that resumes what it goes on with."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol, final, runtime_checkable

import msgspec
from safetensors.torch import save

from paceline.core.consistency import Consistency
from paceline.core.partition import Range
from paceline.errors import CheckpointError, DeadlineExceeded, PacelineError, UsageError
from paceline.snapshots.folder import (
    Snapshot,
    SnapshotManifest,
    SnapshotTable,
    now_s,
    snapshots_in,
    write_snapshot,
)
from paceline.snapshots.increments import Increments, marks_of
from paceline.snapshots.options import DEFAULT_KEEP, LEAST_AUTO_S, auto_interval_s
from paceline.snapshots.reading import row_pieces, saved_dense, saved_rows, spec_of
from paceline.snapshots.writing import CutOfTable, FolderWriter, NoBase
from paceline.update.named_rules import Add
from paceline.update.rows.layout import RowPiece
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import TableSpec
from paceline.wire.requests import ListedTable
from paceline.worker.cuts import CutReader, list_tables
from paceline.worker.node import WorkerNode

_LAST_TIMEOUT_S: Final = 600.0
_MOST_LATER: Final = 5  # later clocks that are asked for

Positions = Sequence[Mapping[str, int]]


class SnapshotPlan(msgspec.Struct, frozen=True):
    """Where a job keeps its snapshots, and how often it makes one.

    Args:
        folder: of the snapshots.
        every_s: seconds between two; None chooses by what one takes.
        keep: how many of the newest stay.
    """

    folder: Path
    every_s: float | None = None
    keep: int = DEFAULT_KEEP


@runtime_checkable
class Positioned(Protocol):
    """A source of samples that knows where it is."""

    def state_dict(self) -> dict[str, int]:
        """Return the position of all workers."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at a position."""
        ...


@final
class Sources:
    """The sources of samples that a script has made, in order.

    Args:
        saved: of a job that resumes: each source continues where the one of the same number was.
    """

    def __init__(self, saved: SavedJob | None = None) -> None:
        self._saved = saved
        self._known: list[weakref.ref[Positioned]] = []

    def note(self, source: object) -> None:
        """Note a new source; raises UsageError if the saved position is of another one."""
        if not isinstance(source, Positioned):
            return
        position = self._saved.position(len(self._known)) if self._saved is not None else {}
        self._known.append(weakref.ref(source))
        if position:
            source.load_state_dict(position)

    def positions(self) -> list[dict[str, int]]:
        """Return where each source is; empty for one that is gone."""
        found = [known() for known in self._known]
        return [{} if source is None else source.state_dict() for source in found]


@final
class SnapshotTaker:
    """Takes the snapshots of one worker, one at a time, and writes them in a thread of its own.

    Args:
        node: the worker.
        num_workers: of the job.
        tell: writes a line for the user.
        plan: for snapshots at intervals; None makes none.
        resumed: the snapshot that the job goes on from, which stays as long as it.
    """

    def __init__(
        self,
        node: WorkerNode,
        num_workers: int,
        tell: Callable[[str], None],
        plan: SnapshotPlan | None = None,
        resumed: Path | None = None,
    ) -> None:
        self._node, self._num_workers, self._tell = node, num_workers, tell
        self.plan: Final = plan
        self._resumed = resumed
        self._every_s = LEAST_AUTO_S if plan is None or plan.every_s is None else plan.every_s
        self._due_s = math.inf if plan is None else time.monotonic() + self._every_s
        self._writer: ThreadPoolExecutor | None = None
        self._increments = Increments()
        self._last: Future[Path] | None = None

    @property
    def is_due(self) -> bool:
        """Whether it is time for a snapshot."""
        return self._due_s < math.inf and time.monotonic() >= self._due_s

    def take_planned(self, positions: Positions) -> None:
        """Begin the snapshot that is due, between two clocks; blocks for one round trip."""
        if self.plan is None or (self._last is not None and not self._last.done()):
            return  # the disk is slower than the interval
        self._due_s = time.monotonic() + self._every_s
        try:
            taken = self._take(self.plan.folder, self.plan.keep, positions, None, self._increments)
            taken.add_done_callback(self._note_planned)
        except PacelineError as error:
            self._tell_failure(error)

    def take(self, folder: Path, keep: int, positions: Positions, state: object) -> Future[Path]:
        """Begin a snapshot of this worker's clock; blocks for one round trip, and for the snapshot before.

        Raises:
            UsageError: `state` cannot be written.
            PeerError: a server is gone.
        """
        return self._take(folder, keep, positions, state, None)

    def _take(
        self, folder: Path, keep: int, positions: Positions, state: object, increments: Increments | None
    ) -> Future[Path]:
        """Begin a snapshot; see `take`. With `increments`, it may have only the rows that have changed."""
        self._wait_last()
        content, clock, began_s = _packed(state), self._node.clock, time.monotonic()
        cuts = [(each, self._begin(each, clock, increments)) for each in list_tables(self._node)]
        base = None if increments is None else increments.begin()

        def fill(path: Path) -> SnapshotManifest:
            reached = self._ask_later(cuts, clock, marks=increments is not None)
            writer = self._write(cuts, path)
            base_name, base_sha256 = writer.based_on(base)
            return SnapshotManifest(
                reached,
                self._node.settings.sender.generation,
                self._num_workers,
                self._node.num_servers,
                tuple(writer.tables),
                tuple(writer.files),
                tuple(dict(each) for each in positions),
                written_at_s=now_s(),
                took_s=time.monotonic() - began_s,
                base=base_name,
                base_sha256=base_sha256,
                packed_state=content,
            )

        def write() -> Path:
            try:
                written = write_snapshot(folder, fill, keep, self._resumed)
                if increments is not None:
                    increments.note(written, marks_of({each.name: reader.heads() for each, reader in cuts}))
                return written.folder
            except OSError as error:
                raise CheckpointError(
                    f"the snapshot of clock {clock} was not written to {error.filename or folder}: {error.strerror}. "
                    "Those before it are whole; free space there, or name another folder."
                ) from error
            finally:
                _end(cuts)

        try:
            self._last = self._submitted(write)
        except RuntimeError as error:
            _end(cuts)
            raise CheckpointError(
                f"the snapshot of clock {clock} was not written, as the system has no thread left for it: {error}. "
                "Those before it are whole."
            ) from error
        return self._last

    def _submitted(self, write: Callable[[], Path]) -> Future[Path]:
        """Have the thread of snapshots make this call; raises RuntimeError where the system has none left."""
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, "paceline-snapshot")
        try:
            return self._writer.submit(write)
        except RuntimeError:
            self._writer.shutdown(wait=False, cancel_futures=True)  # it would make this call with the next one
            self._writer = None
            raise

    def close(self, *, politely: bool) -> None:
        """End; politely: once the snapshot at hand is on disk."""
        self._due_s = math.inf
        if politely:
            self._wait_last()
        if self._writer is not None:
            self._writer.shutdown(wait=politely, cancel_futures=True)

    def _wait_last(self) -> None:
        """Wait for the snapshot before; raises DeadlineExceeded if it does not come to its end."""
        if self._last is not None and not wait([self._last], _LAST_TIMEOUT_S).done:
            raise DeadlineExceeded(f"the snapshot before was not on disk after {_LAST_TIMEOUT_S:g} s")

    def _begin(self, table: ListedTable, clock: int, increments: Increments | None) -> CutReader:
        # Where neither reads nor updates wait for other workers, none has to come to this clock.
        since = None if increments is None else increments.since(table.name, self._node.num_servers)
        return CutReader.begin(self._node, table.name, clock if _waits(_policy(table)) else 0, since=since)

    def _ask_later(self, cuts: list[tuple[ListedTable, CutReader]], clock: int, *, marks: bool) -> int:
        """Ask for later cuts where a quorum has completed this clock without this worker; return the clock of the cuts.

        A later clock is one that a server has reached, so that the others reach it without this worker. Other tables
        that are cut at a clock would wait for it: beside these there is no later one.
        """
        policies = [_policy(each) for each, _ in cuts]
        if not any(policy.backups for policy in policies):
            return clock
        since = ("",) * self._node.num_servers if marks else None  # the first cut has begun other marks: have all rows
        for _ in range(_MOST_LATER):
            later = max((reader.passed() or clock for _, reader in cuts), default=clock)
            if later <= clock or not all(policy.backups or not _waits(policy) for policy in policies):
                break
            clock = later
            for number, (each, _) in enumerate(cuts):
                if policies[number].backups:
                    cuts[number] = each, CutReader.begin(self._node, each.name, clock, since=since)
        return clock

    def _write(self, cuts: Sequence[tuple[ListedTable, CutReader]], path: Path) -> FolderWriter:
        found = [CutOfTable(_decoded(each), each.spec, reader.heads(), reader) for each, reader in cuts]
        found = [each for each in found if each.has_values]
        if not found:
            raise UsageError(
                "there is nothing to snapshot: no table on the servers has values. Where workers keep the model, as "
                "under all-reduce, save it as torch does."
            )
        writer = FolderWriter(path, self._node.settings, sum(isinstance(each.spec, TableSpec) for each in found))
        for each in found:
            writer.add(each)
        writer.finish()
        return writer

    def _note_planned(self, done: Future[Path]) -> None:
        """Have the interval follow what a snapshot takes, and tell of one that failed; in the thread that writes."""
        error = None if done.cancelled() else done.exception()
        if isinstance(error, NoBase) and self._due_s < math.inf:
            self._due_s = time.monotonic()
        if error is not None:
            self._tell_failure(error)
        elif self.plan is not None and self.plan.every_s is None and not done.cancelled():
            took_s = Snapshot.read(done.result()).manifest.took_s
            every_s = auto_interval_s(took_s)
            if every_s > 2 * self._every_s or self._every_s == LEAST_AUTO_S < every_s:
                self._tell(f"a snapshot takes {took_s:.1f} s, so one is made every {every_s:.0f} s")
            self._every_s = every_s

    def _tell_failure(self, error: BaseException) -> None:
        due = "at the next clock" if isinstance(error, NoBase) else f"in {round(self._every_s, 2):g} s"
        is_there = self._resumed is not None or (self.plan is not None and snapshots_in(self.plan.folder))
        before = "the one before counts" if is_there else "there is none yet"
        self._tell(f"no snapshot was made, {before}, the next is due {due}: {error}")


def _end(cuts: Sequence[tuple[ListedTable, CutReader]]) -> None:
    with suppress(PacelineError):  # a server is gone, and its cuts with it
        for _, reader in cuts:
            reader.end()


def _policy(listed: ListedTable) -> Consistency:
    return Consistency.parse(_decoded(listed).consistency)


def _waits(policy: Consistency) -> bool:
    return policy.bound is not None or policy.visible == "on_clock"


def _decoded(listed: ListedTable) -> TableSpec | RowTableSpec:
    kind = "shape" if listed.kind == "shape" else "rows"
    return spec_of(SnapshotTable(listed.name, kind, listed.spec, 0, (), b""))


def _packed(state: object) -> bytes:
    try:
        return b"" if state is None else msgspec.msgpack.encode(state)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"the state for a snapshot cannot be written ({error}): give numbers, texts, lists and dicts"
        ) from error


class ResumedFrom(msgspec.Struct, frozen=True):
    """The snapshot that this job goes on from.

    Args:
        clock: every clock below was finished before.
        folder: of the snapshot.
        state: what was given to `paceline.snapshot`, or None.
    """

    clock: int
    folder: Path
    state: Any


@final
class SavedJob:
    """What a job that resumes takes from a snapshot; see `SavedTables`."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        manifest = snapshot.manifest
        self.resumed: Final = ResumedFrom(manifest.clock, snapshot.folder, manifest.script_state)

    @property
    def names(self) -> list[str]:
        """See `SavedTables.names`."""
        return [table.name for table in self._snapshot.manifest.tables]

    @property
    def folder(self) -> Path:
        """See `SavedTables.folder`."""
        return self._snapshot.folder

    def trained_by(self, optimizer: str) -> list[str]:
        """See `SavedTables.trained_by`: its table, and those of its parts, but for counters and buffers beside them."""
        own = [
            table
            for table in self._snapshot.manifest.tables
            if table.kind == "shape" and f"{table.name}.".startswith(f"{optimizer}.")
        ]
        return [table.name for table in own if spec_of(table).rule.name != Add().name]

    def parts_of(self, spec: TableSpec, spans: Sequence[Range]) -> Iterator[bytes] | None:
        """See `SavedTables.parts_of`."""
        found = saved_dense(self._snapshot, spec)
        return None if found is None else (save(found.part(span)) for span in spans)

    def rows_of(self, spec: RowTableSpec) -> Iterator[RowPiece] | None:
        """See `SavedTables.rows_of`."""
        found = saved_rows(self._snapshot, spec)
        return None if found is None else row_pieces(self._snapshot, found)

    def position(self, number: int) -> dict[str, int]:
        """Return where a source was, by the order in which sources were made; empty if it is not known."""
        sources = self._snapshot.manifest.sources
        return dict(sources[number]) if number < len(sources) else {}
