"""Rows of a server for its readers: all rows at one moment, and then what changes.

What changes is read from logs by the readers' own threads. Only the rows at one moment need the server's thread, which
reads one piece between two updates; a reader waits longer than that took before it asks for the next one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, TypeVar, final

import msgspec
import torch
from torch import Tensor

from paceline.errors import ConnectionLost, PeerError, UsageError
from paceline.server.served_table import ServedTable
from paceline.server.tables import ServedTables, ServerState
from paceline.transport.base import EMPTY
from paceline.update.rows.changes import ChangeLog, CursorExpired, LogEntry
from paceline.update.rows.cuts import RowsCut
from paceline.update.rows.layout import IDS, VALUES
from paceline.update.rows.torch_ops import hash_of
from paceline.wire.malformed import REQUEST_ERRORS, describe_error
from paceline.wire.row_codec import changes_body, ids_of
from paceline.wire.versions import (
    MAX_CHANGES_WAIT_S,
    ChangesFetched,
    ChangesHead,
    DescribeRows,
    FetchChanges,
    FetchRows,
    FollowRows,
    RowChoice,
    RowsDescribed,
    RowsFetched,
    RowsShown,
)

MAX_SHOWN: Final = 2  # readers of one server that are shown all rows at once; others ask again later
_LOOK_S: Final = 0.5  # between two looks at whether the reader is closed
_BUSY_S: Final = 30.0  # after which a server that has not answered is too busy
SILENT_S: Final = 60.0  # without a piece, after which another reader may take the place of one
_PAUSES: Final = 3.0  # in times of what a piece took on the server's thread, which has three quarters of its time left
_LONGEST_PAUSE_S: Final = 0.1
_BETWEEN_SHOWS_S: Final = 0.25  # of all readers together: after each, updates copy what they change
_T = TypeVar("_T")

RowsRequest = DescribeRows | FollowRows | FetchRows | FetchChanges
RowsAnswer = RowsDescribed | RowsShown | RowsFetched | ChangesFetched


class HasNoRows(UsageError):
    """Rows are asked for of a table that has a shape, or where there are no tables."""


class _Server(msgspec.Struct, frozen=True):
    """What serves the tables at present: `do` has its thread make a call, between two messages."""

    do: Callable[[Callable[[ServerState], None]], None]
    tables: ServedTables
    followed: set[str] = msgspec.field(default_factory=set[str])  # tables that may have logs; for the server's thread


@dataclass(slots=True)
class _Place:
    """A reader is shown all rows: when it has had a piece last, or has come, and what is kept for it."""

    had_s: float
    cut: RowsCut | None = None


@final
class RowFeeds:
    """The row tables of one server, as its readers see them, whatever node serves them. Thread-safe.

    Args:
        absence: why there never are any tables here; empty where there may be.

    Attributes:
        is_followed: whether a table may have a log; for the server's thread.
    """

    def __init__(self, absence: str = "") -> None:
        self.is_followed = False
        self._absence = absence
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self._places: dict[RowReading, _Place] = {}  # of the readers that are shown all rows
        self._next_show_s = 0.0

    def attach(self, do: Callable[[Callable[[ServerState], None]], None], tables: ServedTables) -> None:
        """Serve these tables from now on."""
        self._server = _Server(do, tables)

    def detach(self, tables: ServedTables) -> None:
        """Serve these tables no more."""
        if self._server is not None and self._server.tables is tables:
            self._server = None

    def wake(self) -> None:
        """Have readers that wait for changes look again at whether it is over."""
        server = self._server
        for table in [] if server is None else list(server.tables.values()):
            log = table.log
            if log is not None:
                log.wake()

    def table(self, name: str) -> ServedTable:
        """Return a table; raises UsageError if it is not served here now."""
        table = self._required().tables.get(name)
        if table is None:
            raise UsageError(f"there is no table '{name}' here yet")
        return table

    def ask(self, call: Callable[[ServerState], _T], is_over: Callable[[], bool]) -> _T:
        """Return what a call returns that the server's thread makes; blocks.

        Raises:
            UsageError: it failed, `is_over`, or the server is too busy.
        """
        future, until, server = Future[_T](), time.monotonic() + _BUSY_S, self._required()
        server.do(lambda held: _settle(future, call, held))
        while True:
            try:
                return future.result(_LOOK_S)
            except TimeoutError as error:
                is_late = is_over() or self._server is not server or time.monotonic() > until
                if is_late and future.cancel():
                    raise UsageError(f"the server has ended, or did not come to it in {_BUSY_S:g} s") from error

    def follow(self, held: ServerState, table: str) -> tuple[ChangeLog, int, RowsCut, int]:
        """Return what `ServedTable.follow` returns, and the clock; for the server's thread."""
        found, clock = held.tables.require(table), held.core.clock_of(table)
        followed = found.follow(clock)
        self._required().followed.add(table)
        self.is_followed = True
        return *followed, clock

    def note_clocks(self, tables: ServedTables, clock_of: Callable[[str], int]) -> None:
        """Note the clocks of tables that pass them without an update; for the server's thread, between two events."""
        server = self._server
        if server is None or server.tables is not tables:
            return
        for name in [*server.followed]:
            log = tables[name].log
            if log is None:
                server.followed.discard(name)
            else:
                log.note_clock(clock_of(name))
        self.is_followed = bool(server.followed)

    def begin(self, reading: RowReading) -> bool:
        """Return whether one reader more may be shown all rows; `end` is due then.

        It may take the place of one that has had no piece for `SILENT_S`, which begins anew when it goes on.
        """
        silent: _Place | None = None
        with self._lock:
            if len(self._places) >= MAX_SHOWN:
                longest = min(self._places, key=lambda each: self._places[each].had_s)
                if time.monotonic() - self._places[longest].had_s < SILENT_S:
                    return False
                silent = self._places.pop(longest)
            self._places[reading] = _Place(time.monotonic())
        if silent is not None:
            self._close(silent.cut)
        return True

    def turn_s(self) -> float:
        """Return in how many seconds the rows may be kept for a reader that has a place: it has that turn."""
        with self._lock:
            now_s = time.monotonic()
            turn_s = max(now_s, self._next_show_s)
            self._next_show_s = turn_s + _BETWEEN_SHOWS_S
            return turn_s - now_s

    def keep(self, reading: RowReading, cut: RowsCut) -> None:
        """Note what a reader is shown."""
        with self._lock:
            if reading in self._places:
                self._places[reading].cut = cut

    def has_place(self, reading: RowReading) -> bool:
        """Return whether a reader still has its place."""
        with self._lock:
            return reading in self._places

    def note_had(self, reading: RowReading) -> None:
        """Note that a reader has had a piece; to ask for one that there is not keeps no place."""
        with self._lock:
            if reading in self._places:
                self._places[reading].had_s = time.monotonic()

    def end(self, reading: RowReading, cut: RowsCut | None) -> None:
        """Note that a reader has all rows, or needs no more of them."""
        with self._lock:
            self._places.pop(reading, None)
        self._close(cut)

    def _close(self, cut: RowsCut | None) -> None:
        server = self._server
        if server is not None and cut is not None:
            server.do(lambda _: cut.close())  # on the thread that may be keeping rows for it

    def _required(self) -> _Server:
        server = self._server
        if self._absence:
            raise HasNoRows(self._absence)
        if server is None:
            raise UsageError("no tables are served here now: no worker takes part, or another server serves them")
        return server


def _settle(future: Future[_T], call: Callable[[ServerState], _T], held: ServerState) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call(held))
    except REQUEST_ERRORS as error:
        future.set_exception(error if isinstance(error, UsageError) else UsageError(describe_error(error)))


@final
class RowReading:
    """What one reader has asked for. For the thread of this reader.

    Args:
        feeds: the tables.
        closing: set when the server's readers are to end.
    """

    def __init__(self, feeds: RowFeeds, closing: threading.Event) -> None:
        self._feeds = feeds
        self._closing = closing
        self._cut: RowsCut | None = None
        self._log: ChangeLog | None = None  # of the table whose rows are shown

    def answer(self, request: RowsRequest) -> tuple[RowsAnswer, memoryview]:
        """Answer a request; raises UsageError for what is not there, CursorExpired for changes that are not."""
        match request:
            case DescribeRows():
                return RowsDescribed(request.number), self._describe(request.table)
            case FollowRows():
                return self._show(request), EMPTY
            case FetchRows():
                return self._fetch(request)
            case FetchChanges():
                return self._changes(request)

    def close(self) -> None:
        """Let go of the rows that the reader was shown. Idempotent."""
        cut, self._cut = self._cut, None
        if cut is not None:
            self._feeds.end(self, cut)

    def _describe(self, name: str) -> memoryview:
        table = self._feeds.table(name)
        if table.kind != "rows":
            raise HasNoRows(f"table '{name}' has a shape, and no rows: publish it, and pull versions")
        return memoryview(table.encoded_spec())

    def _show(self, request: FollowRows) -> RowsShown:
        """Have the rows of now kept for this reader."""
        self.close()
        if not self._feeds.begin(self):
            raise UsageError(f"{MAX_SHOWN} readers are being shown all rows of a table already: ask again")
        self._closing.wait(self._feeds.turn_s())
        try:
            self._log, sequence, cut, clock = self._feeds.ask(
                lambda held: self._feeds.follow(held, request.table), self._closing.is_set
            )
        except UsageError:
            self._feeds.end(self, None)
            raise
        self._cut = cut
        self._feeds.keep(self, cut)
        if cut.is_over:  # there is no row
            self.close()
        return RowsShown(request.number, self._log.name, sequence, clock, cut.num_pieces)

    def _fetch(self, request: FetchRows) -> tuple[RowsFetched, memoryview]:
        """Have the server's thread read a piece; where that fails the rows are let go of, for they are not whole.

        A piece that there is not leaves them as they are.
        """
        cut = self._cut
        if cut is None or self._log is None:
            raise UsageError("no rows were asked for, or all were had")
        if not self._feeds.has_place(self):
            raise ConnectionLost(f"it asked for no rows for {SILENT_S:g} s, and others did")

        def read(_: ServerState) -> tuple[dict[str, Tensor], float]:
            began_s = time.monotonic()
            return cut.read_columns(request.piece), time.monotonic() - began_s

        self._log.note_read()
        wanted = _Wanted(request.only)
        try:
            columns, took_s = self._feeds.ask(read, self._closing.is_set)
        except UsageError:
            if cut.problem or request.piece < cut.num_pieces:
                self.close()  # the reader asks for all rows again, or makes room for others
            raise
        self._feeds.note_had(self)
        if cut.is_over:
            self.close()
        else:
            self._closing.wait(min(_PAUSES * took_s, _LONGEST_PAUSE_S))
        ids, values = wanted.rows(columns[IDS], columns[VALUES])
        return RowsFetched(request.number, len(ids)), changes_body([(ids, values, ids[:0])])

    def _changes(self, request: FetchChanges) -> tuple[ChangesFetched, memoryview]:
        log = self._feeds.table(request.table).log
        if log is None or log.name != request.log:
            raise CursorExpired(f"the log of changes of table '{request.table}' is another one, or has ended")
        began_s, wanted, since = time.monotonic(), _Wanted(request.only), request.since
        until_s = began_s + max(0.0, min(request.wait_s, MAX_CHANGES_WAIT_S))
        while True:
            found = log.read(since, max(0.0, until_s - time.monotonic()), self._closing.is_set)
            entries = [wanted.entry(each) for each in found.entries]
            has_some = any(len(each.ids) + len(each.removed) for each in entries)
            if has_some or time.monotonic() >= until_s or self._closing.is_set():
                break
            since = found.sequence
        heads = tuple(ChangesHead(each.clock, len(each.ids), len(each.removed)) for each in entries)
        body = changes_body([(each.ids, each.values, each.removed) for each in entries])
        waited_s = found.read_s - began_s
        return ChangesFetched(request.number, heads, found.sequence, found.clock, found.is_all, waited_s), body


@final
class _Wanted:
    """Leaves out the rows that a reader does not want.

    Raises:
        PeerError: what it wants makes no sense.
    """

    def __init__(self, only: RowChoice | None) -> None:
        self._only = only
        self._ids = None if only is None or not only.ids else ids_of(memoryview(bytearray(only.ids))).unique()
        if only is not None and only.part >= only.num_parts:
            raise PeerError(f"part {only.part} of {only.num_parts} parts of rows")

    def rows(self, ids: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is wanted of rows."""
        mask = self._mask(ids)
        return (ids, values) if mask is None else (ids[mask], values[mask])

    def entry(self, entry: LogEntry) -> LogEntry:
        """Return what is wanted of an entry; it may have no rows then."""
        gone = self._mask(entry.removed)
        removed = entry.removed if gone is None else entry.removed[gone]
        return LogEntry(entry.clock, *self.rows(entry.ids, entry.values), removed)

    def _mask(self, ids: Tensor) -> Tensor | None:
        if self._ids is not None:
            return torch.isin(ids, self._ids)
        if self._only is None or self._only.num_parts == 1:
            return None
        return hash_of(ids).remainder(self._only.num_parts) == self._only.part
