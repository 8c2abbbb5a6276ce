"""How a server goes on in the place of one whose process was killed, with the memory that this has left behind.

The journal says what the process before knew and had decided; the tables say which updates are made. The tensors of
pushes are with the workers, which repeat what is unanswered over their new connections.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, cast, final

import msgspec

from paceline.core.effects import (
    Advanced,
    Apply,
    BoundMoved,
    Discard,
    Hold,
    Measure,
    MembershipChanged,
    Reply,
    Serve,
    ServerEffect,
    Tell,
)
from paceline.core.events import Died, Measured, NotFinite, Unapplied
from paceline.core.messages import Push, PushId
from paceline.core.server import ServerCore
from paceline.core.state import Plain, StateCodec
from paceline.core.work_queue import Life
from paceline.errors import PacelineError, UsageError
from paceline.server.journal import Asked, Began, Entry
from paceline.server.requests import RequestHandler
from paceline.server.table_rpc import TableRpc
from paceline.server.tables import ServedTables
from paceline.server.work_queue import WorkQueueHost
from paceline.transport.base import EMPTY
from paceline.update.rows.spec import RowTableSpec
from paceline.update.table import TableSpec
from paceline.wire.messages import decode, encode
from paceline.wire.requests import Declare, DeclareRows, Request

_CORE: Final = StateCodec(ServerCore)
_REQUESTS: Final = StateCodec(RequestHandler, leaves_out=("tables", "send", "work_host"))
_WORK: Final = StateCodec(WorkQueueHost, leaves_out=("send",))
_CALLS: Final = StateCodec(TableRpc, leaves_out=("tables", "send", "clock_of", "note_began", "versions"))


class CannotGoOn(PacelineError):
    """What the process before has left behind is not enough to go on with."""


@final
@dataclass(slots=True)
class Declarations:
    """The tables of a server in the order of their declaration, the clients of their views, and the fate of updates."""

    # By table: the message that declared it.
    messages: dict[str, bytes] = field(default_factory=dict[str, bytes])
    live: set[tuple[str, int, int]] = field(default_factory=set[tuple[str, int, int]])  # table, rank, incarnation
    num_applies: Counter[str] = field(default_factory=Counter[str])  # updates that were made, by table
    broken: dict[str, str] = field(default_factory=dict[str, str])  # why an update of a table has failed

    def note(self, life: Life, declare: Declare | DeclareRows) -> None:
        """Note that a worker has declared a table."""
        name = declare.spec.name
        self.messages.setdefault(name, encode(declare))
        if isinstance(declare, Declare) and declare.live:
            self.live.add((name, *life))

    def forget(self, life: Life) -> None:
        """Note that a worker has left."""
        self.live = {entry for entry in self.live if entry[1:] != life}


_DECLARATIONS: Final = StateCodec(Declarations)


class ServerParts(msgspec.Struct, frozen=True):
    """What of a server changes with what it is told, its tables aside."""

    core: ServerCore
    requests: RequestHandler
    calls: TableRpc
    declarations: Declarations

    def dump(self) -> bytes:
        """Return the state of all parts."""
        return msgspec.msgpack.encode(
            [
                _CORE.dump(self.core),
                _REQUESTS.dump(self.requests),
                _WORK.dump(self.requests.work_host),
                _CALLS.dump(self.calls),
                _DECLARATIONS.dump(self.declarations),
            ]
        )

    def load(self, content: bytes) -> None:
        """Replace the state of all parts by what `dump` has returned."""
        core, requests, work, calls, declarations = cast("list[Plain]", msgspec.msgpack.decode(content))
        _CORE.load_into(self.core, core)
        _REQUESTS.load_into(self.requests, requests)
        _WORK.load_into(self.requests.work_host, work)
        _CALLS.load_into(self.calls, calls)
        _DECLARATIONS.load_into(self.declarations, declarations)


@dataclass(slots=True)
class Recovery:
    """What is left to do before a successor serves: tensors have to come again, and effects are not performed yet.

    Attributes:
        unfinished: effects from the first update that is not made, in order.
        wanted: pushes whose tensors have not come again.
        repeated: pushes whose tensors have come again. They are answered once all have, or will not, and unfinished
            updates are made: an answer lets a worker finish a clock, of which other pushes may be lost.
        deaths: of workers meanwhile. They are handled before what is postponed: a tick there may complete a clock with
            a push whose tensor is gone with its worker.
        postponed: what else has arrived, in order.
        lag: by how many clocks this process may lack what workers were answered, and say again.
        served: what is served, for messages about that.
    """

    unfinished: list[ServerEffect] = field(default_factory=list[ServerEffect])
    wanted: set[PushId] = field(default_factory=set[PushId])
    repeated: list[Push] = field(default_factory=list[Push])
    deaths: list[Died] = field(default_factory=list[Died])
    postponed: list[object] = field(default_factory=list[object])
    lag: int = 0
    served: str = ""
    _needed: set[PushId] = field(default_factory=set[PushId])  # by unfinished updates

    def want(self, held: list[tuple[str, PushId]]) -> None:
        """Expect the tensors of held pushes, and those of unfinished updates."""
        self._needed = {i for effect in self.unfinished if isinstance(effect, Apply | Measure) for i in effect.ids}
        self.wanted = self._needed | {push_id for _, push_id in held}

    def note_death(self, death: Died) -> None:
        """Expect no more of a worker that has ended; raises CannotGoOn if an update that is half made needs it."""
        self.deaths.append(death)
        life = death.worker, death.incarnation
        self._give_up({push_id for push_id in self.wanted if (push_id.worker, push_id.incarnation) == life})

    def end_waiting(self) -> None:
        """Expect no more of any worker; raises as `note_death`."""
        self._give_up(set(self.wanted))

    def _give_up(self, gone: set[PushId]) -> None:
        lost = sorted(gone & self._needed)
        if lost:
            ranks = ", ".join(map(str, sorted({push_id.worker for push_id in lost})))
            raise CannotGoOn(f"an update was half made, and worker {ranks} did not come back to repeat its part")
        self.wanted -= gone


@final
class JournalReplay(msgspec.Struct, frozen=True):
    """Makes a server what the process before it was. Used by the server's thread, before it listens.

    Args:
        parts: of the server, that change with what it is told.
        tables: of the server.
        note_declared: notes that a worker has declared a table.
        change_members: does what follows where a worker takes part, or no longer.
    """

    parts: ServerParts
    tables: ServedTables
    note_declared: Callable[[Life, object], None]
    change_members: Callable[[MembershipChanged], None]

    def run(self, state: bytes, entries: Sequence[Entry]) -> Recovery:
        """Load a snapshot and replay what follows; return what is left to do. Raises CannotGoOn."""
        self.parts.load(state)
        recovery, declarations = Recovery(), self.parts.declarations
        for header in declarations.messages.values():
            self._declare_again(cast("Declare | DeclareRows", decode(header)).spec)
        for table, reason in declarations.broken.items():
            self.tables[table].broken = reason
        self._replay(entries, recovery)
        for table, rank, incarnation in declarations.live:
            self.tables[table].add_reader((rank, incarnation), live=True)
        recovery.want(self.parts.core.held_pushes())
        return recovery

    def _declare_again(self, spec: TableSpec | RowTableSpec) -> None:
        try:
            self.tables.declare(spec)
        except UsageError as error:
            raise CannotGoOn(f"table '{spec.name}' cannot be taken over: {error}") from error

    def _replay(self, entries: Sequence[Entry], recovery: Recovery) -> None:
        """Bring the core and what is kept beside it to where they were, and find the effects that are left."""
        core, requests = self.parts.core, self.parts.requests
        failed = {(entry.written.table, entry.written.ids) for entry in entries if isinstance(entry.written, Unapplied)}
        refused = {entry.written.id for entry in entries if isinstance(entry.written, NotFinite)}
        measured = {(each.table, each.clock) for each in (e.written for e in entries) if isinstance(each, Measured)}
        for entry in entries:
            match entry.written:
                case Asked(worker, incarnation, header):
                    life, request = (worker, incarnation), cast("Request", decode(header))
                    declared = requests.handle(life, request, EMPTY)
                    if declared is not None:
                        self.note_declared(life, request)
                        # Its own entry follows, unless the process was killed between the two; later ones need it.
                        core.handle(declared, entry.now)
                    requests.release(core.members)
                case Began(table, what):
                    raise CannotGoOn(f"it was killed during {what} of table '{table}'")
                case event:
                    for effect in core.handle(event, entry.now):
                        if isinstance(effect, Measure) and (effect.table, effect.clock) in measured:
                            continue
                        made = effect.without(refused) if isinstance(effect, Apply) else effect
                        self._replay_effect(made, failed, recovery)
                    if isinstance(event, Unapplied):
                        self.tables[event.table].broken = event.reason
        for table in self.tables.values():
            if table.cold:
                raise CannotGoOn(table.cold)

    def _replay_effect(
        self, effect: ServerEffect, failed: set[tuple[str, tuple[PushId, ...]]], recovery: Recovery
    ) -> None:
        """Note an effect that was performed; keep it if it was not. Workers and servers ask again for messages."""
        num_applies = self.parts.declarations.num_applies
        match effect:
            case Reply() | Serve() | Tell() | Hold():
                pass
            case _ if recovery.unfinished:
                recovery.unfinished.append(effect)
            case Apply(table, ids) if (table, ids) in failed:
                pass
            case Apply(table, ids) if num_applies[table] < self.tables[table].num_applied:
                num_applies[table] += 1
                self.parts.requests.work_host.settle(ids)
            case Apply() | Measure():
                recovery.unfinished.append(effect)
            case Advanced(table, clock):
                self.tables[table].advance(clock)
            case MembershipChanged():
                self.change_members(effect)
            case Discard() | BoundMoved():
                pass
