"""Where a server answers requests outside the protocol of clocks: tables, their state, meeting points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from safetensors import SafetensorError
from safetensors.torch import load, save

from paceline.errors import PacelineError
from paceline.node.requests import (
    AwaitValues,
    Declare,
    Done,
    Failed,
    Initialise,
    LoadState,
    Meet,
    Request,
    SaveState,
)
from paceline.node.shelf import Shelf
from paceline.tensors.table import TableSpec
from paceline.transport.base import EMPTY, Connection

Send = Callable[[Connection, object, memoryview], None]


@dataclass(slots=True)
class Desk:
    """Carries out requests at once where it can, and keeps those that wait for somebody else."""

    shelf: Shelf
    send: Send
    _awaiting: list[tuple[Connection, AwaitValues]] = field(default_factory=list[tuple[Connection, AwaitValues]])
    # Meeting point -> who has come, by connection. Invariant: empty points are removed.
    _meetings: dict[str, dict[int, tuple[Connection, Meet]]] = field(
        default_factory=dict[str, dict[int, tuple[Connection, Meet]]]
    )

    def handle(self, connection: Connection, request: Request, body: memoryview) -> TableSpec | None:
        """Answer a request; return the table that it declares, if it does."""
        try:
            return self._carry_out(connection, request, body)
        except (PacelineError, SafetensorError) as error:
            self.send(connection, Failed(request.number, str(error)), EMPTY)
            return None

    def release_meetings(self, num_members: int) -> None:
        """Answer those whose meeting is complete: as many have come as take part."""
        complete = [place for place, present in self._meetings.items() if len(present) >= num_members]
        for place in complete:
            for connection, meet in self._meetings.pop(place).values():
                self.send(connection, Done(meet.number), EMPTY)

    def forget(self, connection: Connection) -> None:
        """Drop what a connection that has ended was waiting for."""
        self._awaiting = [entry for entry in self._awaiting if entry[0] is not connection]
        for present in self._meetings.values():
            present.pop(id(connection), None)
        self._meetings = {place: present for place, present in self._meetings.items() if present}

    def _carry_out(self, connection: Connection, request: Request, body: memoryview) -> TableSpec | None:
        match request:
            case Declare():
                self.shelf.declare(request.spec)
                self.send(connection, Done(request.number), EMPTY)
                return request.spec
            case Meet():
                self._meetings.setdefault(request.place, {})[id(connection)] = (connection, request)
            case AwaitValues():
                self._awaiting.append((connection, request))
                self._release_awaiting()
            case Initialise():
                self.shelf.initialise(self._known(request.table), body)
                self.send(connection, Done(request.number), EMPTY)
                self._release_awaiting()
            case SaveState():
                content = save(self.shelf.state(self._known(request.table)))
                self.send(connection, Done(request.number), memoryview(content))
            case LoadState():
                self.shelf.shards[self._known(request.table)].load_state(load(bytes(body)))
                self.send(connection, Done(request.number), EMPTY)
        return None

    def _release_awaiting(self) -> None:
        ready = [entry for entry in self._awaiting if self._has_values(entry[1].table)]
        self._awaiting = [entry for entry in self._awaiting if entry not in ready]
        for connection, request in ready:
            self.send(connection, Done(request.number), EMPTY)

    def _has_values(self, table: str) -> bool:
        shard = self.shelf.shards.get(table)
        return shard is not None and shard.initialised

    def _known(self, table: str) -> str:
        if table not in self.shelf.shards:
            names = ", ".join(sorted(self.shelf.shards)) or "none"
            raise PacelineError(f"there is no table '{table}' on server {self.shelf.server}; tables: {names}")
        return table
