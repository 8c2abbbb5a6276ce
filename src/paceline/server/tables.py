"""All tables of a server by name; which kind a table is shows only when it is declared."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, final

import msgspec

from paceline.core.events import Declared
from paceline.errors import PeerError, UsageError
from paceline.server.cuts import OpenCuts
from paceline.server.dense_table import ServedDenseTable
from paceline.server.memory_check import require_few_tables
from paceline.server.row_table import ServedRowTable
from paceline.server.served_table import ServedTable, TableHost
from paceline.transport.base import EMPTY, Frame
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import TableSpec
from paceline.wire.messages import FactoredPush
from paceline.wire.requests import Request, SaveState

if TYPE_CHECKING:
    from paceline.core.server import ServerCore


@final
class ServedTables(dict[str, ServedTable]):
    """The tables of one server by name. Used by the server's thread; other threads only call `get`."""

    def __init__(self, host: TableHost) -> None:
        """Begin without tables; `host` is what they share."""
        super().__init__()
        self.host: Final = host
        self.cuts: Final = OpenCuts()

    def require(self, name: str) -> ServedTable:
        """Return the table of this name; raises UsageError if it is not declared."""
        table = self.get(name)
        if table is None:
            names = ", ".join(sorted(self)) or "none"
            raise UsageError(f"there is no table '{name}' on {self.host.name}; tables: {names}")
        return table

    def declare(self, spec: TableSpec | RowTableSpec) -> Declared:
        """Create a table, or check that the existing one has the same settings; return the event for the core.

        Raises:
            UsageError: the table exists with other settings, its rule is not available, or memory is short.
        """
        table = self.get(spec.name)
        if table is None:
            spec.validate()
            require_few_tables(spec.name, len(self), self.host.name)
            table = self[spec.name] = self._create(spec)
        else:
            table.require_equal(spec)
        return Declared(spec.name, table.consistency, table.keyed)

    def merges(self, request: Request) -> bool:
        """Return whether a request that looks at a table changes it, as it merges pushes that wait for a quorum."""
        table = self.get(request.table) if isinstance(request, SaveState) else None
        return table is not None and table.num_kept > 0

    def expand(self, push: FactoredPush, frame: Frame) -> Frame:
        """Return a push that came with factors as a frame with its whole gradient, and release the one it came in.

        One that is of no table, or waits already, is returned without a gradient: no one will look at it.

        Raises:
            PeerError: it breaks the protocol.
        """
        try:
            if push.checksum is not None and push.checksum != zlib.crc32(frame.body):
                raise PeerError(f"the {len(frame.body)} bytes of a push with factors are not those that were sent")
            table = self.get(push.push.push.table)
            if table is None or table.has(push.push.push.id):
                return Frame(b"", EMPTY)
            return table.expand(push, frame.body)
        finally:
            frame.release()

    def _create(self, spec: TableSpec | RowTableSpec) -> ServedTable:
        if isinstance(spec, RowTableSpec):
            return ServedRowTable(spec, self.host)
        return ServedDenseTable(spec, self.host, held_bytes=sum(table.value_bytes for table in self.values()))

    def close(self) -> None:
        """Release all tables, when the server closes."""
        self.host.saver.shutdown(cancel_futures=True)
        for table in self.values():
            table.close()
        self.clear()


class ServerState(msgspec.Struct, frozen=True):
    """The core and the tables of a server, for calls that run on its thread."""

    core: ServerCore
    tables: ServedTables
    # Have a process in the place of this one know what the call has changed; return whether one can go on.
    keep: Callable[[], bool]
    declare: Callable[[TableSpec | RowTableSpec], Declared]  # a table, as a worker would


class ServerCall(msgspec.Struct, frozen=True):
    """A call to run on the server's thread, between two messages."""

    call: Callable[[ServerState], None]
