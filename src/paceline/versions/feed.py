"""The change feed of a row table: all rows at one moment, then each change of each server, in order, from a cursor on.

1. A cursor says how far a reader has come on each server. With it another process goes on from there.
2. Where a server does not have all changes behind a cursor any more, the feed begins anew: with all rows.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Final, final

import msgspec
import torch
from torch import Tensor

from paceline.errors import Refused, UsageError
from paceline.transport.deadline import Deadline
from paceline.update.dtypes import torch_dtype
from paceline.update.rows.spec import RowTableSpec
from paceline.versions.link import Gone, ReaderLink
from paceline.versions.links import ServerLinks
from paceline.wire.versions import RowChoice

_CURSOR: Final = re.compile(r"[0-9a-f]{16}:[0-9]{1,18}(,[0-9a-f]{16}:[0-9]{1,18})*")
_MANY_WAIT_S: Final = 0.05  # for a change on each of several servers, as the first that has one waits for the others
_NO_IDS: Final = torch.empty(0, dtype=torch.int64)


class RowChanges(msgspec.Struct, frozen=True):
    """What one update has changed on one server, or some of the rows with which a feed begins.

    Attributes:
        ids: (n,) int64, distinct: rows that are new or have other values.
        values: (n, width), theirs, in the dtype of the table.
        removed: (m,) int64: rows that are gone, as they expired.
        clock: every clock below was complete before.
        cursor: to go on behind this; empty while all rows are coming, which cannot be gone on with.
        resets: forget all rows that came before this.
        is_snapshot: these are rows with which the feed begins, and no update.
    """

    ids: Tensor
    values: Tensor
    removed: Tensor
    clock: int
    cursor: str
    resets: bool = False
    is_snapshot: bool = False


@dataclass(slots=True)
class _Position:
    """How far a reader has come on one server."""

    log: str
    sequence: int
    clock: int = 0  # every clock below was complete there


@dataclass(slots=True)
class _Shown:
    """How far the rows are with which a feed begins, over one life of its connections."""

    life: int
    positions: list[_Position] = field(default_factory=list[_Position])  # of the servers that have begun
    piece: int = 0  # of the last of them, that is fetched next
    num_pieces: int = 0


@final
class RowFeed:
    """The feed of one table. For one thread at a time.

    Args:
        links: connections to the servers, for this feed alone.
        table: its name.
        cursor: to go on from; empty: begin with all rows.
        only: the rows that are wanted; None for all.

    Raises:
        UsageError: the cursor is not one that a feed has given.
    """

    def __init__(self, links: ServerLinks, table: str, cursor: str = "", only: RowChoice | None = None) -> None:
        self.confirmed_s = 0.0  # all changes until then, of the monotonic clock, were returned
        self.clock = 0  # every clock below is complete behind what was returned, on every server
        self._links = links
        self._table = table
        self._only = only
        self._has_skipped = False  # changes without wanted rows, behind the last ones that were returned
        self._spec: RowTableSpec | None = None
        self._positions = _positions(cursor)
        self._shown: _Shown | None = None
        self._resets = False  # the next changes are the first ones after all rows were lost

    def describe(self, deadline: Deadline) -> RowTableSpec:
        """Return the declaration of the table; blocks until it is there.

        Raises:
            UsageError: the table has no rows.
            Refused: there is no such table in time.
            DeadlineExceeded: there is no server in time.
        """

        def once(deadline: Deadline) -> RowTableSpec:
            return self._links.connected(deadline)[0].describe_rows(self._table)

        try:
            self._spec = self._links.repeat(once, deadline, "the declaration")
        except Gone as error:
            raise UsageError(str(error)) from error
        return self._spec

    def poll(self, wait_s: float, deadline: Deadline) -> list[RowChanges]:
        """Return what comes next, in order; nothing if there is nothing new for `wait_s`. Blocks.

        Raises:
            DeadlineExceeded: no server has answered in time.
        """
        spec = self._spec or self.describe(deadline)

        def once(deadline: Deadline) -> list[RowChanges]:
            links = self._links.connected(deadline)
            if self._positions is None or len(self._positions) != len(links):
                return self._begin(links, spec)
            try:
                return self._go_on(links, self._positions, spec, wait_s)
            except Gone:  # other answers may be under way
                self._links.drop()
                self._positions = None
                return []

        return self._links.repeat(once, deadline, "changes")

    def _begin(self, links: list[ReaderLink], spec: RowTableSpec) -> list[RowChanges]:
        """Return one piece more of all rows, server by server; after Refused for a piece all rows come anew."""
        shown = self._shown
        if shown is None or shown.life != self._links.life:
            shown, self._resets = _Shown(self._links.life), True
            self._shown, self._positions = shown, None
        if shown.piece < shown.num_pieces:
            try:
                ids, values = links[len(shown.positions) - 1].fetch_rows(shown.piece, spec, self._only)
            except Refused:  # as memory was short there: the rest of these rows cannot be fetched any more
                self._shown = None
                raise
            shown.piece += 1
            return [self._made(ids, values, _NO_IDS, shown.positions[-1].clock, "", is_snapshot=True)]
        if len(shown.positions) < len(links):
            answer = links[len(shown.positions)].show_rows(self._table)
            shown.positions.append(_Position(answer.log, answer.sequence, answer.clock))
            shown.piece, shown.num_pieces = 0, answer.num_pieces
            return []
        self._positions, self._shown = shown.positions, None
        self.clock = min(each.clock for each in shown.positions)
        newest = max(each.clock for each in shown.positions)
        return [self._made(_NO_IDS, _no_values(spec), _NO_IDS, newest, _cursor(shown.positions))]

    def _go_on(
        self, links: list[ReaderLink], positions: list[_Position], spec: RowTableSpec, wait_s: float
    ) -> list[RowChanges]:
        """Return the changes of all servers since the last call."""
        wait_s = wait_s if len(links) == 1 else min(wait_s, _MANY_WAIT_S)
        asked = list[tuple[ReaderLink, _Position, int, float]]()
        for link, position in zip(links, positions, strict=True):
            asked_s = time.monotonic()
            number = link.ask_changes(self._table, position.log, position.sequence, wait_s, self._only)
            asked.append((link, position, number, asked_s))
        answers = [(position, asked_s, *link.changes(number, spec)) for link, position, number, asked_s in asked]
        found, until_s, is_all = list[RowChanges](), list[float](), True
        for position, asked_s, fetched, entries in answers:
            self._has_skipped = self._has_skipped or fetched.sequence > position.sequence
            for sequence, entry in enumerate(entries, fetched.sequence - len(entries) + 1):
                position.sequence = sequence
                if self._only is None or len(entry.ids) + len(entry.removed):
                    found.append(self._made(entry.ids, entry.values, entry.removed, entry.clock, _cursor(positions)))
            position.sequence, position.clock = fetched.sequence, fetched.clock
            until_s.append(asked_s + fetched.waited_s)
            is_all = is_all and fetched.is_all
        if is_all:
            self.confirmed_s = min(until_s)
        self.clock = min(each.clock for each in positions)
        self._has_skipped = self._has_skipped and not found
        return found

    def skipped(self) -> RowChanges | None:
        """Return where to go on behind changes that had no wanted rows, without rows; None if there were none."""
        if not self._has_skipped or self._positions is None or self._spec is None:
            return None
        self._has_skipped = False
        return self._made(_NO_IDS, _no_values(self._spec), _NO_IDS, self.clock, _cursor(self._positions))

    def _made(
        self, ids: Tensor, values: Tensor, removed: Tensor, clock: int, cursor: str, *, is_snapshot: bool = False
    ) -> RowChanges:
        resets, self._resets = self._resets, False
        return RowChanges(ids, values, removed, clock, cursor, resets, is_snapshot)


def _no_values(spec: RowTableSpec) -> Tensor:
    return torch.empty((0, spec.width), dtype=torch_dtype(spec.dtype))


def _cursor(positions: list[_Position]) -> str:
    return ",".join(f"{each.log}:{each.sequence}" for each in positions)


def _positions(cursor: str) -> list[_Position] | None:
    if not cursor:
        return None
    if not _CURSOR.fullmatch(cursor):
        raise UsageError(f"{cursor[:80]!r} is no cursor of changes: give the one of the last that was handled, or none")
    parts = [part.split(":") for part in cursor.split(",")]
    return [_Position(log, int(sequence)) for log, sequence in parts]
