"""Repeats what a server has done, from what it has told its replica (`replica.py`) or a record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast, final

from paceline.core.events import Changed, ClippedPush, Declared, Measured, NotFinite, Unapplied
from paceline.core.messages import Push, PushId, WholeStep
from paceline.core.server import ServerEvent
from paceline.core.work_queue import Life
from paceline.errors import PacelineError, PeerError
from paceline.server.buffers import BodyLimits, ReceiveBuffers
from paceline.server.journal import Asked, Began, Written, decode_written
from paceline.server.memory_check import require_memory
from paceline.server.recovery import ServerParts
from paceline.server.replica_messages import (
    CODEC,
    FOLDER,
    Attached,
    Checked,
    Ended,
    Happened,
    HeadMessage,
    Idled,
    Leaving,
    Looked,
    Noted,
    Proved,
    Pushed,
    Restored,
)
from paceline.server.served_table import SavedFile
from paceline.server.tables import ServedTables
from paceline.transport.base import Frame
from paceline.transport.buffer_pool import Buffer
from paceline.wire.malformed import REQUEST_ERRORS, describe_error
from paceline.wire.messages import PushFrame, RowPullFrame, RowPushFrame, RowsUsed, decode
from paceline.wire.requests import MAX_HEARD_BYTES, Declare, DeclareRows, Request, WholeTable


class Diverged(PacelineError):
    """A replica has found something else than its head."""


@final
@dataclass(slots=True)
class Replay:
    """Does in a replica what its head has done. Used by the server's thread.

    Args:
        parts: of the server, that change with what it is told.
        tables: of the server.
        buffers: for what arrives.
        handle: passes an event to the core, performs the effects, and returns the pushes that the core holds.
        carry_out: carries out a request with its body.
    """

    parts: ServerParts
    tables: ServedTables
    buffers: ReceiveBuffers
    handle: Callable[[ServerEvent, float], set[PushId]]
    carry_out: Callable[[Life, Request, memoryview], None]
    _broken: set[str] = field(default_factory=set[str])  # tables of which an update has failed on the head
    _fresh: dict[PushId, str] = field(default_factory=dict[PushId, str])  # came before their event; with their tables
    _asked: bytes = b""  # the last request that was repeated

    @property
    def _limits(self) -> BodyLimits:
        return BodyLimits(self.tables.get, self.buffers)

    def place(self, header: bytes, size_bytes: int) -> Buffer | memoryview | None:
        """Return memory for a body; raises PeerError for an impossible size."""
        said = CODEC.decode(header)
        match said:
            case Pushed(push):
                return self._limits.place(push, size_bytes)
            case Happened(_, written) if isinstance(asked := decode_written(written), Asked):
                return self._limits.place(asked.request, size_bytes)
            case Attached() if size_bytes <= MAX_HEARD_BYTES:
                return None
            case Restored(table) if table in self.tables:
                require_memory(f"table '{table}' of the head", size_bytes)
                return None
            case _:
                raise PeerError(f"a {type(said).__name__} came with {size_bytes} bytes")

    def take(self, message: HeadMessage, frame: Frame) -> None:
        """Do what a frame says; raises PeerError for what no head says, Diverged."""
        try:
            self._take(message, frame)
        except (PeerError, Diverged, OSError, MemoryError):
            raise
        except REQUEST_ERRORS as error:
            what = type(message).__name__
            raise PeerError(f"the head sent a {what} that makes no sense here: {describe_error(error)}") from error

    def _take(self, message: HeadMessage, frame: Frame) -> None:
        match message:
            case Attached():
                if self.tables:
                    raise PeerError("the head says that it begins when it has begun")
                self._begin(frame.body)
            case Restored(table, clock, version, hyper):
                with TemporaryDirectory(prefix=FOLDER) as folder:
                    path = Path(folder) / "table"
                    path.write_bytes(frame.body)
                    self.tables[table].restore(SavedFile(path), clock, version, hyper)
            case Pushed(push):
                self._keep(push, frame)
            case Looked(look):
                self._look(look, frame.body)
            case Happened(now, written):
                self._repeat(decode_written(written), now, frame.body)
            case Idled():
                self.parts.calls.advance_idle()
            case Checked() | Ended() | Leaving() | Proved() | Noted():
                pass

    def _compare_broken(self) -> None:
        """Raise Diverged if an update has failed here that has not on the head."""
        for name, table in self.tables.items():
            if table.broken and name not in self._broken:
                raise Diverged(f"an update of table '{name}' has failed on the replica alone: {table.broken}")

    def _begin(self, state: memoryview) -> None:
        """Take over the state of the head, and declare its tables."""
        self.parts.load(bytes(state))
        declarations = self.parts.declarations
        for header in declarations.messages.values():
            self.tables.declare(cast("Declare | DeclareRows", decode(header)).spec)
        for name, reason in declarations.broken.items():
            self.tables[name].broken = reason
            self._broken.add(name)

    def drop_fresh(self) -> None:
        """Let go of pushes whose event has not come: their workers repeat them."""
        for push_id, table in self._fresh.items():
            self.tables[table].discard(push_id)
        self._fresh.clear()

    def _keep(self, header: bytes, frame: Frame) -> None:
        push = decode(header)
        if not isinstance(push, PushFrame | RowPushFrame) or push.push.table not in self.tables:
            raise PeerError(f"the head sent a {type(push).__name__} that makes no sense here")
        name, push_id = push.push.table, push.push.id
        if self.tables[name].has(push_id):  # repeated to a process that had lost its tensor, as one in its place has
            return
        accepted = self.tables[name].accept(push, frame.body, frame.buffer)
        if accepted.problem or accepted.wanted is not None:
            raise Diverged(f"the head has accepted push {push_id} of table '{name}': {accepted.problem or 'no ids'}")
        self._fresh[push_id] = name

    def _look(self, header: bytes, ids: memoryview) -> None:
        look = decode(header)
        table = look.pull.table if isinstance(look, RowPullFrame) else look.table if isinstance(look, RowsUsed) else ""
        if not isinstance(look, RowPullFrame | RowsUsed) or table not in self.tables:
            raise PeerError(f"the head sent a {type(look).__name__} that makes no sense here")
        self.tables[table].repeat_look(look, ids)

    def _repeat(self, written: Written, now: float, body: memoryview) -> None:
        match written:
            case Asked(worker, incarnation, header):
                self.tables.host.time, self._asked = now, header
                self._carry_out((worker, incarnation), decode(header), body)
            case Unapplied(table, _, reason):
                if not self.tables[table].broken:
                    raise Diverged(f"an update of table '{table}' has failed on the head alone: {reason}")
                self._broken.add(table)
            case Declared(table) if table not in self.tables:
                raise Diverged(f"table '{table}' of the head cannot be declared here: {self._objection()}")
            case Began() | Declared() | Changed() | NotFinite() | Measured():
                pass  # comes of what is done here
            case event:
                self._compare_broken()
                held = self.handle(event, now)
                for push in _pushes_of(event):
                    table = self._fresh.pop(push.id, None)
                    if table is not None and push.id not in held:
                        self.tables[table].discard(push.id)

    def _objection(self) -> str:
        """Return why the declaration is refused here that was the last request."""
        try:
            self.tables.declare(cast("Declare | DeclareRows", decode(self._asked)).spec)
        except REQUEST_ERRORS as error:
            return describe_error(error)
        return "it was refused, and now would not be"

    def _carry_out(self, life: Life, message: object, body: memoryview) -> None:
        if isinstance(message, WholeTable):
            try:
                self.parts.calls.handle(life, message, body)
            except PeerError:  # the head has refused it, too
                return
        else:
            self.carry_out(life, cast("Request", message), body)


def _pushes_of(event: ServerEvent) -> tuple[Push, ...]:
    match event:
        case Push():
            return (event,)
        case ClippedPush(push):
            return (push,)
        case WholeStep():
            return event.pushes
        case _:
            return ()
