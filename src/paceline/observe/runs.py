"""Traces read back: a whole run at once, or a live one incrementally."""

from __future__ import annotations

import os
import stat
from operator import attrgetter
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar

import msgspec

from paceline.errors import UsageError
from paceline.notices import printable
from paceline.observe.trace import (
    OLDER,
    AppliedRecord,
    ArrivedRecord,
    BoundRecord,
    Carried,
    Epoch,
    Evaluated,
    Exit,
    Fed,
    Handled,
    Load,
    MembershipRecord,
    MinClock,
    ReadRecord,
    Refusal,
    Reported,
    ReportedValues,
    Resources,
    RowRead,
    Sampled,
    Serving,
    Step,
    TraceRecord,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

_decoder = msgspec.json.Decoder(TraceRecord)
_MOST_REASON: Final = 200  # characters of what is wrong with a trace, which quotes it
_R = TypeVar(
    "_R",
    ReadRecord,
    RowRead,
    Step,
    Evaluated,
    Reported,
    ReportedValues,
    Resources,
    Load,
    Fed,
    Epoch,
    MinClock,
    BoundRecord,
    AppliedRecord,
    ArrivedRecord,
    Serving,
    Carried,
    Sampled,
    Refusal,
    MembershipRecord,
    Exit,
    Handled,
)


class Run(msgspec.Struct, frozen=True):
    """The records of all processes of a run, by kind, each kind sorted by time."""

    reads: tuple[ReadRecord, ...] = ()
    row_reads: tuple[RowRead, ...] = ()
    steps: tuple[Step, ...] = ()
    evaluations: tuple[Evaluated, ...] = ()
    reported: tuple[Reported, ...] = ()
    resources: tuple[Resources, ...] = ()
    loads: tuple[Load, ...] = ()
    epochs: tuple[Epoch, ...] = ()
    min_clocks: tuple[MinClock, ...] = ()
    bounds: tuple[BoundRecord, ...] = ()
    applied: tuple[AppliedRecord, ...] = ()
    arrived: tuple[ArrivedRecord, ...] = ()
    serving: tuple[Serving, ...] = ()
    carried: tuple[Carried, ...] = ()
    sampled: tuple[Sampled, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    memberships: tuple[MembershipRecord, ...] = ()
    exits: tuple[Exit, ...] = ()
    handled: tuple[Handled, ...] = ()


def read_run(folder: Path) -> Run:
    """Read the traces of a run from `<folder>/trace/*.jsonl`, without the incomplete last line of a killed process.

    Raises UsageError without a trace, or for a complete line that is not a record.
    """
    return gather(record for path in trace_paths(folder) for record in read_records(path))


def trace_paths(folder: Path) -> list[Path]:
    """Return the trace files of a run, sorted; raises UsageError where there is none."""
    paths = sorted((folder / "trace").glob("*.jsonl"))
    if not paths:
        raise UsageError(
            f"No trace was found: expected files like worker-0.jsonl in {folder / 'trace'}. "
            "Give the folder of a run (the one that holds 'trace')."
        )
    return paths


def read_records(path: Path) -> list[TraceRecord]:
    """Return the records of a trace file; raises as `read_run`."""
    with open_trace(path) as file:
        return decode_lines(file.read(), path)


def open_trace(path: Path) -> BinaryIO:
    """Open a trace file to read it; does not block, be it a pipe that no process writes to.

    Raises:
        UsageError: it cannot be read, or is not a file.
        FileNotFoundError: it is not there.
    """
    try:
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    except FileNotFoundError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read the trace {path}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UsageError(f"cannot read the trace {path}: it is not a file. Remove it")
    return file


def gather(records: Iterable[TraceRecord]) -> Run:
    """Sort records into a run, by kind and time."""
    ordered = sorted(records, key=attrgetter("t"))
    return Run(
        reads=_of_kind(ordered, ReadRecord),
        row_reads=_of_kind(ordered, RowRead),
        steps=_of_kind(ordered, Step),
        evaluations=_of_kind(ordered, Evaluated),
        reported=_of_kind(ordered, Reported),
        resources=_of_kind(ordered, Resources),
        loads=_of_kind(ordered, Load),
        epochs=_of_kind(ordered, Epoch),
        min_clocks=_of_kind(ordered, MinClock),
        bounds=_of_kind(ordered, BoundRecord),
        applied=_of_kind(ordered, AppliedRecord),
        arrived=_of_kind(ordered, ArrivedRecord),
        serving=_of_kind(ordered, Serving),
        carried=_of_kind(ordered, Carried),
        sampled=_of_kind(ordered, Sampled),
        refusals=_of_kind(ordered, Refusal),
        memberships=_of_kind(ordered, MembershipRecord),
        exits=_of_kind(ordered, Exit),
        handled=_of_kind(ordered, Handled),
    )


def _of_kind(records: list[TraceRecord], kind: type[_R]) -> tuple[_R, ...]:
    return tuple(record for record in records if isinstance(record, kind))


def decode_lines(content: bytes, path: Path) -> list[TraceRecord]:
    """Decode the complete lines of a trace file; text after the last newline is ignored."""
    whole = content[: content.rfind(b"\n") + 1]
    try:
        return _decoder.decode_lines(whole)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not a trace of this version of paceline: {printable(str(error)[:_MOST_REASON])}. Remove the "
            "file, or read it with the version that wrote it."
        ) from error


ALL_TRACES: Final = ("worker-*.jsonl", "server-*.jsonl", "launcher-*.jsonl")


class TraceFollower:
    """Follows the traces of a live run: those of its workers, or what `patterns` name.

    With `last_bytes` it begins so far from the end of a file that is there at the first look. With `piece_bytes` no
    more of a file is read at once, and of a bounded trace the file before, too.

    tail = Tail(run_folder / "trace")
    for record in tail.poll(): ...
    """

    def __init__(
        self, folder: Path, patterns: Sequence[str] = ALL_TRACES[:1], last_bytes: int = 0, piece_bytes: int = 0
    ) -> None:
        self._folder = folder
        self._patterns = patterns
        self._last_bytes = last_bytes
        self._piece_bytes = piece_bytes
        # Invariant: every offset is just behind a newline of the file of this number; a bounded trace begins new
        # files.
        self._places: dict[Path, tuple[int, int]] = {}
        self._left_bytes = self._all_bytes = 0  # at the last look

    @property
    def is_behind(self) -> bool:
        """Whether the last look has left something to the next one."""
        return self._left_bytes > 0

    @property
    def read_share(self) -> float:
        """The share of the bytes that has been read, 0 to 1."""
        return 1.0 - self._left_bytes / (self._all_bytes or 1)

    def poll(self) -> list[TraceRecord]:
        """Return the records since the last call; never blocks; none for a missing folder."""
        self._left_bytes = self._all_bytes = 0
        paths = [path for pattern in self._patterns for path in sorted(self._folder.glob(pattern))]
        # First, and at nearly one moment: to decode takes time.
        contents = [(part, self._news(part, path)) for path in paths for part in self._parts(path)]
        return [record for path, content in contents for record in decode_lines(content, path)]

    def _parts(self, path: Path) -> list[Path]:
        return [path.with_name(path.name + OLDER), path] if self._piece_bytes else [path]

    def _news(self, path: Path, newest: Path) -> bytes:
        number, offset = self._places.get(path, (0, 0))
        try:
            with open_trace(path) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != number:
                    # What was the newest part at the last look is the one before it now.
                    number, offset = self._places.get(newest, (0, 0)) if path != newest else (0, 0)
                if found.st_ino != number:
                    offset = _newline_before(file, found.st_size - self._last_bytes) if self._last_bytes else 0
                file.seek(offset)
                content = file.read(self._piece_bytes or -1)
        except FileNotFoundError:  # between two files of a bounded trace
            return b""
        whole = content.rfind(b"\n") + 1
        if self._piece_bytes and len(content) == self._piece_bytes and not whole:
            raise UsageError(f"{path} is not a trace: a line has more than {self._piece_bytes} bytes. Remove the file")
        self._places[path] = found.st_ino, offset + whole
        self._all_bytes += found.st_size
        self._left_bytes += max(0, found.st_size - offset - len(content))
        return content


def _newline_before(file: BinaryIO, at: int) -> int:
    """Return where the first whole line behind this place begins; 0 for a place before the file."""
    if at <= 0:
        return 0
    file.seek(at)
    file.readline()
    return file.tell()
