"""What happened in a rehearsal, and whether it was allowed: checkers that know the rules but not the code."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.consistency import Consistency
from paceline.core.messages import PushId

Life = tuple[int, int]  # worker, incarnation
_NEVER = 1 << 60


class Violation(AssertionError):
    """A promise was broken; the message says which, where and when."""


@dataclass(slots=True)
class _Shard:
    """What one server has applied, in order."""

    order: list[tuple[PushId, int]] = field(default_factory=list[tuple[PushId, int]])  # push, its clock
    position: dict[PushId, int] = field(default_factory=dict[PushId, int])
    newest_clock: list[int] = field(default_factory=list[int])  # running maximum of the clocks in order
    contributors: dict[int, tuple[PushId, ...]] = field(default_factory=dict[int, tuple[PushId, ...]])


@dataclass(frozen=True, slots=True)
class Read:
    """One finished read; `parts` has, per server, how many updates the values contain and which are the reader's."""

    time: float
    life: Life
    clock: int
    value_clock: int
    waited_s: float
    source: str
    parts: dict[int, tuple[int, frozenset[int]]]


@dataclass(slots=True)
class History:
    """The record of one run, checked as it grows.

    The names of the rules (E1, SSP2, ...) are those of the reliability page in the documentation.
    """

    consistency: Consistency
    num_servers: int
    keeps_order: bool
    shards: list[_Shard] = field(init=False)
    reads: list[Read] = field(default_factory=list[Read])
    made: dict[Life, list[tuple[PushId, int]]] = field(default_factory=dict[Life, list[tuple[PushId, int]]])
    acknowledged: set[tuple[int, PushId]] = field(default_factory=set[tuple[int, PushId]])
    refused: set[tuple[int, PushId]] = field(default_factory=set[tuple[int, PushId]])
    replaced: dict[int, int] = field(default_factory=dict[int, int])  # worker -> incarnation that has joined
    gone: set[Life] = field(default_factory=set[Life])  # given up by some server
    _seen: dict[tuple[Life, int], int] = field(default_factory=dict[tuple[Life, int], int])

    def __post_init__(self) -> None:
        """Start with nothing applied."""
        self.shards = [_Shard() for _ in range(self.num_servers)]

    def pushed(self, push_id: PushId, clock: int) -> None:
        """Record that a push was made."""
        self.made.setdefault((push_id.worker, push_id.incarnation), []).append((push_id, clock))

    def applied(self, server: int, ids: tuple[PushId, ...], clocks: list[int]) -> None:
        """Record one update of a server and check E1 (once), E4 (refusal is final), E7 (order), M2 (no zombie)."""
        shard = self.shards[server]
        for push_id, clock in zip(ids, clocks, strict=True):
            _require(push_id not in shard.position, f"E1: {push_id} is applied twice on server {server}")
            _require((server, push_id) not in self.refused, f"E4: {push_id} is applied after it was refused")
            newest = self.replaced.get(push_id.worker, -1)
            # With visible = on_clock the lead's decision is the commit; the others may carry it out later.
            committed = self.consistency.visible == "on_clock" and server > 0
            _require(
                committed or push_id.incarnation >= newest,
                f"M2: {push_id} is applied after incarnation {newest} had joined",
            )
            shard.position[push_id] = len(shard.order)
            shard.order.append((push_id, clock))
            shard.newest_clock.append(max(clock, shard.newest_clock[-1] if shard.newest_clock else -1))
        if self.consistency.visible == "on_clock":
            _require(list(ids) == sorted(ids), f"BSP4: server {server} sums {ids}, not in rank order")
            _require(len(set(clocks)) == 1, f"BSP5: server {server} applies clocks {clocks} at once")
            shard.contributors[clocks[0]] = ids
        elif self.keeps_order:
            self._check_order(shard, ids)

    def answered(self, server: int, push_id: PushId, *, refused: bool) -> None:
        """Record the final answer to a push and check that an acknowledged one is applied (E2)."""
        (self.refused if refused else self.acknowledged).add((server, push_id))
        _require(
            refused or push_id in self.shards[server].position,
            f"E2: server {server} has acknowledged {push_id} and not applied it",
        )

    def read(self, read: Read, members: dict[Life, int]) -> None:
        """Record a finished read and check its bound, its freshness and its monotony."""
        self.reads.append(read)
        bound = self.consistency.bound
        # A quorum promises nothing about those who miss it: there the contributors are checked instead (BSP2).
        needs = 0 if bound is None or self.consistency.backups else max(0, read.clock - bound)
        members = {life: clock for life, clock in members.items() if life not in self.gone}
        where = f"read of worker {read.life[0]} at clock {read.clock}"
        slowest = min([clock for life, clock in members.items() if life != read.life], default=_NEVER)
        _require(slowest >= needs, f"SSP1: {where}, but the slowest worker stands at {slowest}, bound {bound}")
        for server, (length, own) in read.parts.items():
            self._check_freshness(server, length, needs, members, where)
            self._check_own(server, length, own, read.life, where)
            before = self._seen.get((read.life, server), 0)
            _require(length >= before, f"SSP5: {where} saw {before} updates of server {server}, now {length}")
            self._seen[read.life, server] = length
            if self.consistency.visible == "on_clock" and length:
                newest = self.shards[server].newest_clock[length - 1]
                exact = bound == 0 and not self.consistency.backups
                _require(newest < read.value_clock or not exact, f"BSP1: {where} contains an update of clock {newest}")

    def finish(self) -> None:
        """Check at the end of a run that every clock had the same contributors on every server (BSP2)."""
        if self.consistency.visible != "on_clock":
            return
        for clock in set.intersection(*(set(shard.contributors) for shard in self.shards)):
            sets = {frozenset(shard.contributors[clock]) for shard in self.shards}
            _require(len(sets) == 1, f"BSP2: clock {clock} has different contributors on different servers: {sets}")
        longest = max(max(shard.contributors, default=-1) for shard in self.shards)
        for server, shard in enumerate(self.shards):
            applied = {clock for clock in shard.contributors if clock < longest}
            others = {c for other in self.shards for c in other.contributors if c < longest}
            _require(applied == others, f"BSP5: server {server} lacks the clocks {sorted(others - applied)}")

    def _check_order(self, shard: _Shard, ids: tuple[PushId, ...]) -> None:
        for push_id in ids:
            made = self.made[push_id.worker, push_id.incarnation]
            index = next(i for i, (other, _) in enumerate(reversed(made)) if other == push_id)
            earlier = made[len(made) - 2 - index][0] if len(made) - 2 - index >= 0 else None
            _require(earlier is None or earlier in shard.position, f"E7: {push_id} is applied before {earlier}")

    def _check_freshness(self, server: int, length: int, needs: int, members: dict[Life, int], where: str) -> None:
        """SSP2: every push that a member made in a clock below `needs` is in the values."""
        shard = self.shards[server]
        for life in members:
            for push_id, clock in reversed(self.made.get(life, [])):
                if clock >= needs:
                    continue
                inside = shard.position.get(push_id, _NEVER) < length or (server, push_id) in self.refused
                _require(inside, f"SSP2: {where} needs clock {needs} and lacks {push_id} of clock {clock}")
                if clock < needs - 2:  # older ones were checked by earlier reads
                    break

    def _check_own(self, server: int, length: int, own: frozenset[int], life: Life, where: str) -> None:
        """SSP3: the reader is told exactly which of its own recent pushes are in, so that it can add the others."""
        shard = self.shards[server]
        for push_id, _ in self.made.get(life, [])[-8:]:
            inside = shard.position.get(push_id, _NEVER) < length
            if (server, push_id) not in self.refused:
                _require(
                    inside == (push_id.seq in own),
                    f"SSP3: {where}: {push_id} is {'in' if inside else 'missing from'} server {server}'s values, "
                    "the reader was told otherwise",
                )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Violation(message)
