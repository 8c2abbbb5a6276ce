"""Commands that a server gets from its own process: run a call between two messages, expel peers, or stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.core.server import ServerCore
from paceline.server.tables import ServedTables


@dataclass(frozen=True, slots=True)
class Holdings:
    """The core and the tables of a server, for calls that run on its thread."""

    core: ServerCore
    tables: ServedTables


@dataclass(frozen=True, slots=True)
class ServerCall:
    """A call to run on the server's thread."""

    call: Callable[[Holdings], None]


@dataclass(frozen=True, slots=True)
class Expel:
    """Close connections whose certificate has one of these holders or serial numbers."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the server's loop."""
