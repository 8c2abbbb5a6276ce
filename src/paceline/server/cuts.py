"""Cuts that workers read: each has one of a table at a time, which ends with it.

A version is a cut of all tables on all servers at one clock. No server passes a clock before every worker has finished
it; so a worker that asks all servers at its own clock, before it finishes that, gets one version. Where a quorum
completes clocks, a server may have passed it: then it says so, and the worker asks for a later one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
from safetensors.torch import save

from paceline.core.work_queue import Life
from paceline.errors import UsageError
from paceline.update.cuts import TableCut
from paceline.wire.requests import BeginCut, CutHead, ListedTable, passed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paceline.server.served_table import ServedTable


MAX_ASKED: Final = 4  # pieces that a worker may ask a server for before it has the first of them


@dataclass(slots=True)
class _OpenCut:
    """A cut that a worker reads, and the pieces that it may ask for again, as an answer may be lost."""

    cut: TableCut
    sent: deque[tuple[int, memoryview]] = field(default_factory=lambda: deque(maxlen=MAX_ASKED))

    def read(self, index: int) -> memoryview:
        for number, piece in self.sent:
            if number == index:
                return piece
        piece = self.cut.read(index)
        self.sent.append((index, piece))
        return piece


@dataclass(slots=True)
class OpenCuts:
    """The cuts that workers are reading. For the thread of the server."""

    _cuts: dict[tuple[Life, str], _OpenCut] = field(default_factory=dict[tuple[Life, str], _OpenCut])

    def begin(self, life: Life, request: BeginCut, table: ServedTable, clock: int) -> memoryview:
        """Cut a table, between two updates, at a clock that is the one asked for or later; return the head as msgpack.

        Raises:
            UsageError: the table closes clocks and has passed that one, or an update of it has failed.
        """
        name, needs = request.table_call.table, request.table_call.needs
        if table.consistency.visible == "on_clock" and clock != needs:
            raise UsageError(passed(name, clock, needs))
        self.end(life, name)
        if table.has_values:
            made = table.cut(values_only=request.values_only, since=request.since)
            self._cuts[life, name] = _OpenCut(made)
            head = head_of(table, made, clock)
        else:
            head = CutHead(clock, table.version)
        return memoryview(msgspec.msgpack.encode(head))

    def read(self, life: Life, name: str, index: int) -> memoryview:
        """Return a piece of a worker's cut; raises UsageError if there is none, or the cut was given up."""
        found = self._cuts.get((life, name))
        if found is None:
            raise UsageError(f"worker {life[0]} has no cut of table '{name}' here: it was ended, or its server was")
        return found.read(index)

    def end(self, life: Life, name: str) -> None:
        """End the cut of a table that a worker has, if it has one."""
        found = self._cuts.pop((life, name), None)
        if found is not None:
            found.cut.close()

    def forget(self, life: Life) -> None:
        """End the cuts of a worker that has left."""
        for other, name in list(self._cuts):
            if other == life:
                self.end(other, name)


def head_of(table: ServedTable, made: TableCut, clock: int) -> CutHead:
    """Return what is to be known of a cut of a table that was just made."""
    fixed = save(dict(made.fixed))
    return CutHead(clock, table.version, made.num_pieces, table.hyper, made.layout, fixed, made.base, made.marks)


def encode_tables(tables: Mapping[str, ServedTable]) -> bytes:
    """Return the tables of a server as msgpack, in the order of their declarations."""
    return msgspec.msgpack.encode(
        [ListedTable(name, table.kind, table.encoded_spec()) for name, table in tables.items()]
    )
