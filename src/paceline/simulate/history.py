"""History of a simulation, and checkers of the rules of the protocol that share no code with the protocol."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from paceline.core.consistency import Consistency
from paceline.core.events import Died, Disconnected
from paceline.core.messages import Join, Pull, PushId

Life = tuple[int, int]  # worker, incarnation


class Violation(AssertionError):
    """A broken promise; the message says which, where and when."""


@dataclass(slots=True)
class Lives:
    """Lives of all workers in one run, recorded independently of the servers."""

    lease_s: float
    join_timeout_s: float
    replaced: dict[int, int] = field(default_factory=dict[int, int])  # worker -> incarnation that has joined
    gone: set[Life] = field(default_factory=set[Life])  # evicted by some server
    disturbed: set[Life] = field(default_factory=set[Life])  # killed, stopped or disconnected by the scenario
    # By (server, life): when the server lost its connection; and lives that have joined the server.
    _silent: dict[tuple[int, Life], float] = field(default_factory=dict[tuple[int, Life], float])
    _joined: set[tuple[int, Life]] = field(default_factory=set[tuple[int, Life]])
    _dead: set[tuple[int, Life]] = field(default_factory=set[tuple[int, Life]])

    def told(self, server: int, event: object, now: float) -> None:
        """Record an event that a server receives."""
        match event:
            case Join(sender=sender):
                life = (sender.worker, sender.incarnation)
                self._joined.add((server, life))
                self._silent.pop((server, life), None)
            case Disconnected():
                self._silent[server, (event.worker, event.incarnation)] = now
            case Died():
                self._dead.add((server, (event.worker, event.incarnation)))
            case _:
                pass

    def note_eviction(self, server: int, life: Life, now: float) -> None:
        """Check an eviction: the server was told of the death or of a successor, or the lease has expired."""
        self.gone.add(life)
        key = (server, life)
        if key in self._dead or any(s == server and w == life[0] and i > life[1] for s, (w, i) in self._joined):
            return
        if key not in self._joined and now >= self.join_timeout_s:
            return
        if now < self._silent.get(key, now) + self.lease_s:
            raise Violation(f"L6: at {now:g} s server {server} gives up worker {life[0]}.{life[1]} without a reason")


_NEVER = 1 << 60
_RECENT = 8  # latest own pushes of a reader that are checked; older ones were checked before


@dataclass(slots=True)
class SeenShard:
    """Updates applied by one server, or to one row, in order, and what readers were told about them."""

    order: list[tuple[PushId, int]] = field(default_factory=list[tuple[PushId, int]])  # push, its clock
    position: dict[PushId, int] = field(default_factory=dict[PushId, int])
    newest_clock: list[int] = field(default_factory=list[int])  # running maximum of the clocks in order
    contributors: dict[int, tuple[PushId, ...]] = field(default_factory=dict[int, tuple[PushId, ...]])
    # Readers were told that every update of lower clocks is included, so none may follow.
    promised: int = 0
    num_passed: dict[Life, int] = field(default_factory=dict[Life, int])  # pushes of a worker applied or refused so far

    def note(self, push_id: PushId, clock: int) -> None:
        """Add the next applied update."""
        self.position[push_id] = len(self.order)
        self.order.append((push_id, clock))
        self.newest_clock.append(max(clock, self.newest_clock[-1] if self.newest_clock else -1))


class SeenPart(msgspec.Struct, frozen=True):
    """Values of one server or row as read, and what the reader was told about them."""

    length: int  # number of updates in them
    clock: int
    own: frozenset[int]  # sequence numbers of the included own pushes of the reader
    added: frozenset[int] = frozenset()  # of own pushes that the reader has added


class SeenRead(msgspec.Struct, frozen=True):
    """One finished read, with its part of every server; of a row table, with every requested row."""

    time: float
    life: Life
    clock: int
    value_clock: int
    waited_s: float
    source: str
    parts: dict[int, SeenPart]
    request: int = -1  # by which servers know it, if it asked them

    @property
    def differential(self) -> int:
        """Return the clock differential: -1 is the freshest, -(bound + 1) the oldest."""
        return self.value_clock - 1 - self.clock


@dataclass(slots=True)
class History:
    """History of one table in one run, checked as it grows.

    The names of the rules (E1, SSP2, ...) are those of the reliability page in the documentation. A row table
    (`keyed`) keeps its row r on server r modulo their number, and every row has a history of its own: the values of a
    row in a read are compared with the pushes to this row.
    """

    consistency: Consistency
    num_servers: int
    keeps_order: bool
    lives: Lives
    keyed: bool = False
    shards: list[SeenShard] = field(init=False)
    rows: dict[int, SeenShard] = field(default_factory=dict[int, SeenShard])
    touched: dict[PushId, frozenset[int]] = field(default_factory=dict[PushId, frozenset[int]])  # push -> its rows
    reads: list[SeenRead] = field(default_factory=list[SeenRead])
    made: dict[Life, list[tuple[PushId, int]]] = field(default_factory=dict[Life, list[tuple[PushId, int]]])
    acknowledged: set[tuple[int, PushId]] = field(default_factory=set[tuple[int, PushId]])
    refused: set[tuple[int, PushId]] = field(default_factory=set[tuple[int, PushId]])
    invalid: set[PushId] = field(default_factory=set[PushId])  # arrived at a server with invalid values
    # Of an adaptive bound: where it is by server, and where it was when a pull came, by life, request and server.
    bounds: dict[int, int] = field(default_factory=dict[int, int])
    num_moves: int = 0
    _admitted: dict[tuple[Life, int, int], int] = field(default_factory=dict[tuple[Life, int, int], int])
    _seen: dict[tuple[Life, int], int] = field(default_factory=dict[tuple[Life, int], int])

    def __post_init__(self) -> None:
        """Start with an empty history."""
        self.shards = [SeenShard() for _ in range(self.num_servers)]

    # -- events ------------------------------------------------------------------------------------------------------

    def pushed(self, push_id: PushId, clock: int, rows: frozenset[int] = frozenset()) -> None:
        """Record a push, in a row table with its rows."""
        self.touched[push_id] = rows
        self.made.setdefault((push_id.worker, push_id.incarnation), []).append((push_id, clock))

    def applied(self, server: int, ids: tuple[PushId, ...], clocks: list[int]) -> None:
        """Record one update of a server: applied once (E1), never after a refusal (E4), never from a zombie (M2)."""
        shard = self.shards[server]
        for push_id, clock in zip(ids, clocks, strict=True):
            self._check_applied(server, shard, push_id, clock)
            shard.note(push_id, clock)
            for row in self.touched[push_id]:
                if self.server_of(row) == server:
                    self.shard_of(row).note(push_id, clock)
        if self.consistency.visible == "on_clock":
            self._check_batch(server, shard, ids, clocks)
        elif self.keeps_order:
            self._check_order(server, shard, ids)

    def answered(self, server: int, push_id: PushId, *, refused: bool, closed: int) -> None:
        """Record the final answer to a push: acknowledged means applied (E2), and a refusal has a reason (E4).

        `closed`: whether every clock below is closed on this server.
        """
        (self.refused if refused else self.acknowledged).add((server, push_id))
        applied = push_id in self.shards[server].position
        if not refused and not applied:
            raise Violation(f"E2: server {server} has acknowledged {push_id} and not applied it")
        if refused and applied:
            raise Violation(f"E4: server {server} has refused {push_id} after it was applied")
        life = (push_id.worker, push_id.incarnation)
        late = self.consistency.backups and self._clock_of(push_id) < closed
        if refused and not late and push_id not in self.invalid and life not in self.lives.gone:
            raise Violation(f"E4: server {server} has refused a sound {push_id} of a worker that takes part")

    def moved(self, server: int, before: int, bound: int) -> None:
        """Record that a server moved its adaptive bound: every move is told, and none leaves the range (SSP6)."""
        lowest, highest = self.consistency.lowest, self.consistency.bound
        known = self.bounds.get(server, lowest)
        if lowest is None or highest is None or not lowest <= bound <= highest or before != known or bound == before:
            raise Violation(f"SSP6: server {server} moves a bound from {before} to {bound}, and was at {known}")
        self.bounds[server] = bound
        self.num_moves += 1

    def admitted(self, server: int, pull: Pull) -> None:
        """Record that a pull has come to a server; a copy of it changes nothing."""
        if self.consistency.lowest is not None:
            key = (pull.sender.worker, pull.sender.incarnation), pull.request, server
            self._admitted.setdefault(key, self.bounds.get(server, self.consistency.lowest))

    def read(self, read: SeenRead, members: dict[Life, int]) -> None:
        """Record a finished read and check its bound, its freshness and its monotony."""
        self.reads.append(read)
        bound = self.consistency.bound
        # A quorum promises nothing to workers that miss it. The contributors are checked instead (BSP2).
        needs = 0 if bound is None or self.consistency.backups else max(0, read.clock - bound)
        members = {life: clock for life, clock in members.items() if life not in self.lives.gone}
        slowest = min([clock for life, clock in members.items() if life != read.life], default=_NEVER)
        if slowest < needs:
            raise Violation(f"SSP1: {_where(read)}, but the slowest worker stands at {slowest}, bound {bound}")
        if bound is not None and read.value_clock < read.clock - bound:
            raise Violation(f"SSP2: {_where(read)} is told clock {read.value_clock}, bound {bound}")
        for place, part in read.parts.items():
            shard, length = self.shard_of(place), part.length
            self._check_members(place, length, needs, members, read)
            self._check_promise(place, length, max(needs, part.clock), read)
            self._check_own(place, part, read)
            self._check_in_force(place, part, read)
            before = self._seen.get((read.life, place), 0)
            if length < before:
                raise Violation(f"SSP5: {_where(read)} saw {before} updates of {self._name(place)}, now {length}")
            self._seen[read.life, place] = length
            if self._is_exact and length and shard.newest_clock[length - 1] >= read.clock:
                raise Violation(f"BSP1: {_where(read)} contains an update of clock {shard.newest_clock[length - 1]}")

    def finish(self, settled: list[Life], clocks: list[int]) -> None:
        """Check at the end that all settled lives have their answers, and that no clock is torn (BSP2, BSP5).

        `clocks`: clock of the table on each server, once no message between servers is in flight.
        """
        for life in settled:
            for push_id, _ in self.made.get(life, []):
                for server in self.servers_of(push_id):
                    if (server, push_id) not in self.acknowledged and (server, push_id) not in self.refused:
                        raise Violation(f"E2: worker {life[0]} has left, and server {server} never answered {push_id}")
        if self.consistency.visible == "on_clock":
            self._check_contributors(clocks)

    # -- places: a server's part of a dense table, or one row ----------------------------------------------------------

    def server_of(self, place: int) -> int:
        """Return the server of a place."""
        return place % self.num_servers

    def servers_of(self, push_id: PushId) -> list[int]:
        """Return the servers that hold a part of a push."""
        rows = self.touched[push_id]
        return sorted({self.server_of(row) for row in rows}) if self.keyed else list(range(self.num_servers))

    def shard_of(self, place: int) -> SeenShard:
        """Return the updates applied at a place."""
        return self.rows.setdefault(place, SeenShard()) if self.keyed else self.shards[place]

    def _touches(self, push_id: PushId, place: int) -> bool:
        return not self.keyed or place in self.touched[push_id]

    def _name(self, place: int) -> str:
        return f"row {place} on server {self.server_of(place)}" if self.keyed else f"server {place}"

    # -- the rules ---------------------------------------------------------------------------------------------------

    @property
    def _is_exact(self) -> bool:
        c = self.consistency
        return c.bound == 0 and c.visible == "on_clock" and not c.backups

    def _check_applied(self, server: int, shard: SeenShard, push_id: PushId, clock: int) -> None:
        made = self.made.get((push_id.worker, push_id.incarnation), ())
        if not any(push_id == own and clock == its for own, its in reversed(made)):
            raise Violation(f"E3: {push_id} of clock {clock} is applied on server {server}, but no worker made it")
        if push_id in shard.position:
            raise Violation(f"E1: {push_id} is applied twice on server {server}")
        if (server, push_id) in self.refused:
            raise Violation(f"E4: {push_id} is applied after it was refused")
        if clock < shard.promised:
            raise Violation(
                f"SSP2: {push_id} of clock {clock} is applied on server {server} after a reader was told "
                f"that all clocks below {shard.promised} are in"
            )
        newest = self.lives.replaced.get(push_id.worker, -1)
        # With visible = on_clock the decision of the lead is the commit; other servers may apply it later.
        committed = self.consistency.visible == "on_clock" and server > 0
        if push_id.incarnation < newest and not committed:
            raise Violation(f"M2: {push_id} is applied after incarnation {newest} had joined")

    def _check_batch(self, server: int, shard: SeenShard, ids: tuple[PushId, ...], clocks: list[int]) -> None:
        if list(ids) != sorted(ids):
            raise Violation(f"BSP4: server {server} sums {ids}, not in rank order")
        lives = {(push_id.worker, push_id.incarnation) for push_id in ids}
        if len({worker for worker, _ in lives}) != len(lives):
            raise Violation(f"BSP2: server {server} sums {ids}, where a worker counts twice")
        clock = clocks[0]
        if len(set(clocks)) != 1 or clock in shard.contributors:
            raise Violation(f"BSP5: server {server} applies clocks {clocks} at once, or a clock twice")
        shard.contributors[clock] = ids

    def _check_order(self, server: int, shard: SeenShard, ids: tuple[PushId, ...]) -> None:
        for push_id in ids:
            life = (push_id.worker, push_id.incarnation)
            made, at = self.made[life], shard.num_passed.get(life, 0)
            while made[at][0] != push_id:
                if server in self.servers_of(made[at][0]) and (server, made[at][0]) not in self.refused:
                    raise Violation(f"E7: {push_id} is applied on server {server} before {made[at][0]}")
                at += 1
            shard.num_passed[life] = at + 1

    def _check_members(self, place: int, length: int, needs: int, members: dict[Life, int], read: SeenRead) -> None:
        """SSP2, checked against the workers: the values have every push of a member in a clock below `needs`."""
        position, server = self.shard_of(place).position, self.server_of(place)
        for life in members:
            for push_id, clock in reversed(self.made.get(life, ())):
                if clock >= needs or not self._touches(push_id, place):
                    continue
                if position.get(push_id, _NEVER) >= length and (server, push_id) not in self.refused:
                    lacks = f"lacks {push_id} of clock {clock} on {self._name(place)}"
                    raise Violation(f"SSP2: {_where(read)} needs clock {needs} and {lacks}")
                if clock < needs - 2 and not self.keyed:  # older ones were checked by earlier reads
                    break

    def _check_promise(self, place: int, length: int, complete: int, read: SeenRead) -> None:
        """SSP2, checked against the server: updates missing from the values are of clock `complete` or later."""
        for push_id, clock in self.shard_of(place).order[length:]:
            if clock < complete:
                raise Violation(f"SSP2: {_where(read)} lacks {push_id} of clock {clock} on {self._name(place)}")
        shard = self.shards[self.server_of(place)]
        shard.promised = max(shard.promised, complete)

    def _check_in_force(self, place: int, part: SeenPart, read: SeenRead) -> None:
        """SSP6: values keep the bound in force when their pull came; without a pull, the lowest."""
        lowest, server = self.consistency.lowest, self.server_of(place)
        if lowest is None:
            return
        bound = self._admitted.get((read.life, read.request, server), lowest)
        if part.clock < read.clock - bound:
            raise Violation(f"SSP6: {_where(read)} has {self._name(place)} of clock {part.clock}, in force was {bound}")

    def _check_own(self, place: int, part: SeenPart, read: SeenRead) -> None:
        """SSP3: the reader is told exactly which of its own recent pushes are included, so it can add the others."""
        position, server = self.shard_of(place).position, self.server_of(place)
        for push_id, _ in self.made.get(read.life, [])[0 if self.keyed else -_RECENT :]:
            inside = position.get(push_id, _NEVER) < part.length
            told = push_id.seq in part.own
            if inside != told and self._touches(push_id, place) and (server, push_id) not in self.refused:
                raise Violation(
                    f"SSP3: {_where(read)}: {push_id} is {'in' if inside else 'missing from'} the values of "
                    f"{self._name(place)}, the reader was told otherwise"
                )
            adds = self.keyed and self.consistency.visible == "on_arrival"
            if adds and inside == (push_id.seq in part.added) and not self._is_silent(push_id, place):
                raise Violation(f"SSP3: {_where(read)} sees its own {push_id} {'twice' if inside else 'never'}")

    def _is_silent(self, push_id: PushId, place: int) -> bool:
        """Return whether a push changes no value of a place: it has no part there, or was refused."""
        return not self._touches(push_id, place) or (self.server_of(place), push_id) in self.refused

    def _check_contributors(self, clocks: list[int]) -> None:
        applied: dict[int, set[PushId]] = {}
        for shard in self.shards:
            for clock, ids in shard.contributors.items():
                applied.setdefault(clock, set()).update(ids)
        for clock, ids in sorted(applied.items()):
            for server, shard in enumerate(self.shards):
                expected = {push_id for push_id in ids if server in self.servers_of(push_id)}
                if expected and clock not in shard.contributors:
                    raise Violation(f"BSP5: server {server} lacks the clock {clock}")
                if expected != set(shard.contributors.get(clock, ())):
                    sets = [shard.contributors.get(clock, ()) for shard in self.shards]
                    raise Violation(f"BSP2: clock {clock} has different contributors on different servers: {sets}")
        if len(set(clocks)) != 1:
            raise Violation(f"BSP5: at the end the servers stand at the clocks {clocks}")

    def _clock_of(self, push_id: PushId) -> int:
        made = self.made[push_id.worker, push_id.incarnation]
        return next(clock for own, clock in reversed(made) if own == push_id)


def _where(read: SeenRead) -> str:
    return f"at {read.time:.4f} s: read of worker {read.life[0]}.{read.life[1]} at clock {read.clock}"
