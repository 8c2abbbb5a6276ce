"""What a server is told by its own process: to do something between two messages, to turn somebody away, or to end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.server import ServerCore
from paceline.server.dense_tables import DenseTables
from paceline.server.row_tables import RowTables


@dataclass(frozen=True, slots=True)
class Holdings:
    """All that a server has, to be looked at and changed by its own thread alone."""

    core: ServerCore
    dense_tables: DenseTables
    rows: RowTables


@dataclass(frozen=True, slots=True)
class ServerCall:
    """Something to be done with what a server has, in its turn."""

    call: Callable[[Holdings], None]


@dataclass(frozen=True, slots=True)
class Expel:
    """An end to the connections of those whose certificate has one of these holders or serial numbers."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Stop:
    """Put into the inbox to end the server's loop."""
