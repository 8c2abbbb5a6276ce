"""All tables of a server by name; which kind a table is shows only when it is declared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from paceline.core.events import Declared
from paceline.errors import UsageError
from paceline.server.dense_table import ServedDenseTable
from paceline.server.memory_check import require_few_tables
from paceline.server.row_table import ServedRowTable
from paceline.server.served_table import ServedTable, TableHost
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import TableSpec


@dataclass(slots=True)
class ServedTables:
    """The tables of one server. Used by the server's thread; other threads only call `get`."""

    host: TableHost
    _tables: dict[str, ServedTable] = field(default_factory=dict[str, ServedTable])

    def __iter__(self) -> Iterator[ServedTable]:
        """Iterate over the tables in the order of their declaration."""
        return iter(self._tables.values())

    def __contains__(self, name: str) -> bool:
        """Return whether there is a table of this name."""
        return name in self._tables

    def __getitem__(self, name: str) -> ServedTable:
        """Return the table of this name, which exists."""
        return self._tables[name]

    def get(self, name: str) -> ServedTable | None:
        """Return the table of this name, None if it is not declared."""
        return self._tables.get(name)

    def names(self) -> list[str]:
        """Return the names of all tables in the order of their declaration."""
        return list(self._tables)

    def require(self, name: str) -> ServedTable:
        """Return the table of this name; raises UsageError if it is not declared."""
        table = self._tables.get(name)
        if table is None:
            names = ", ".join(sorted(self._tables)) or "none"
            raise UsageError(f"there is no table '{name}' on {self.host.name}; tables: {names}")
        return table

    def declare(self, spec: TableSpec | RowTableSpec) -> Declared:
        """Create a table, or check that the existing one has the same settings; return the event for the core.

        Raises:
            UsageError: the table exists with other settings, its rule is not available, or memory is short.
        """
        table = self._tables.get(spec.name)
        if table is None:
            spec.validate()
            require_few_tables(spec.name, len(self._tables), self.host.name)
            table = self._tables[spec.name] = self._create(spec)
        else:
            table.require_equal(spec)
        return Declared(spec.name, table.consistency, table.keyed)

    def _create(self, spec: TableSpec | RowTableSpec) -> ServedTable:
        if isinstance(spec, RowTableSpec):
            return ServedRowTable(spec, self.host)
        return ServedDenseTable(spec, self.host, held_bytes=sum(table.value_bytes for table in self))

    def close(self) -> None:
        """Release all tables, when the server closes."""
        for table in self:
            table.close()
        self._tables.clear()
