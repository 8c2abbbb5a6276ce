"""A run of row tables by chance: which worker pushes, reads and finishes clocks, and what becomes of frames."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import torch
from tests.worker.rows.truth import Truth, spec_of
from tests.worker.rows.world import World

from paceline.core.consistency import Consistency, asynchronous, bsp, essp, ssp
from paceline.update.filters import KeyCache
from paceline.worker.rows.client import RowClient
from paceline.worker.rows.in_flight import RowReadInFlight
from paceline.worker.rows.state import CacheOptions

POINTS: tuple[Consistency, ...] = (
    bsp(),
    asynchronous(),
    *(point(s) for s in (0, 1, 2, 4, 8) for point in (ssp, essp)),
    Consistency(2, "on_clock"),
    Consistency(1, "on_clock", "on_clock"),
)
NUM_ROWS = 24


@dataclass(slots=True, eq=False)
class Asked:
    """A read that was begun for use at a clock."""

    reading: RowReadInFlight
    clock: int


@dataclass
class Rehearsal:
    """One run; whatever breaks a promise raises AssertionError."""

    seed: int
    point: Consistency
    num_workers: int = 3
    num_servers: int = 2
    roughness: float = 0.0
    keep: bool | None = True
    max_rows: int = 0
    reads_own_writes: bool = True
    most_ids: int = 6  # of a push or a read
    straggler: int = -1  # a worker that acts ten times less often
    num_reads: int = 0  # of rows
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.world = World(self.num_workers, self.num_servers, self.dice, self.roughness)
        self.truth = Truth(self.point, self.num_workers)
        self.asked: dict[int, list[Asked]] = {rank: [] for rank in range(self.num_workers)}
        filters = (KeyCache(max_lists=2),) if self.seed % 3 == 0 else ()
        spec = spec_of(self.point, self.num_workers, filters)
        keep = True if self.point.deliver == "on_clock" else self.keep
        options = CacheOptions(keep, self.max_rows, self.reads_own_writes)
        self.own_writes = self.reads_own_writes and bool(keep)
        for node in self.world.workers.values():
            RowClient.open(node.context, spec, options)

    # -- what users do -----------------------------------------------------------------------------------------------

    def push(self, rank: int, ids: list[int]) -> None:
        node = self.world.workers[rank]
        if node.client("t").num_under_way() < 6:
            ids, rows = self.truth.rows_for(rank, node.clock, ids)
            node.client("t").push(torch.tensor(ids, dtype=torch.int64), rows, count=1.0, hyper=())

    def ask(self, rank: int, ids: list[int], *, refresh: bool, ahead: int = 0) -> None:
        node = self.world.workers[rank]
        clock = node.clock + ahead
        distinct = torch.tensor(list(dict.fromkeys(ids)), dtype=torch.int64)
        reading = node.client("t").start_read(distinct, self.point.needs(clock), refresh=refresh)
        self.asked[rank].append(Asked(reading, clock))

    def tick(self, rank: int) -> None:
        """Finish a clock, unless a read of it is still awaited."""
        node = self.world.workers[rank]
        if not any(asked.clock <= node.clock for asked in self.asked[rank]):
            node.tick()

    def take(self, rank: int) -> None:
        """Use the reads that are there, those for a later clock not yet."""
        node = self.world.workers[rank]
        for asked in [a for a in self.asked[rank] if a.reading.future.done() and a.clock <= node.clock]:
            self.asked[rank].remove(asked)
            rows, clocks = node.client("t").wait_read(asked.reading)
            self.num_reads += len(rows)
            self.counts[f"age {clocks.min() - asked.clock}" if len(rows) else "none"] += 1
            needs = self.point.needs(asked.clock)
            self.truth.check(rank, needs, asked.clock, asked.reading.ids, rows, clocks, own_writes=self.own_writes)

    def kill(self, rank: int) -> None:
        self.truth.dead.add(rank)
        self.asked[rank] = []
        self.world.kill(rank)

    # -- a whole run -------------------------------------------------------------------------------------------------

    def run(self, num_steps: int, *, crash_at: int = -1) -> Rehearsal:
        try:
            for number in range(num_steps):
                self.act()
                if number == crash_at:
                    self.kill(self.dice.choice(list(self.world.workers)))
            self.finish()
        finally:
            self.world.close()
        return self

    def act(self) -> None:
        """Do something."""
        dice, world = self.dice, self.world
        rank = dice.choices(list(world.workers), [0.1 if rank == self.straggler else 1.0 for rank in world.workers])[0]
        ids = [dice.randrange(NUM_ROWS) - NUM_ROWS // 2 for _ in range(dice.randint(0, self.most_ids))]
        match dice.randrange(24):
            case 0 | 1:
                self.push(rank, ids)
            case 2 | 3:
                self.ask(rank, ids, refresh=dice.random() < 0.3, ahead=dice.random() < 0.2)
            case 4 | 5:
                self.take(rank)
                self.tick(rank)
            case 6 if dice.random() < 0.2:
                world.remind()
            case _:
                world.move()
                self.take(rank)

    def finish(self) -> None:
        """Let all come to the same clock and take what they asked for; then every row must be whole."""
        world = self.world
        world.roughness = 0.0
        last = max(asked.clock for some in self.asked.values() for asked in [*some, Asked(None, 0)])  # type: ignore[arg-type]
        last = 1 + max(last, *(node.clock for node in world.workers.values()))
        for _ in range(200_000):
            world.move()
            for rank, node in world.workers.items():
                self.take(rank)
                if node.clock < last:
                    self.tick(rank)
            if all(node.clock == last and not self.asked[rank] for rank, node in world.workers.items()):
                break
        assert not any(self.asked.values()), f"reads are left waiting: {self.asked}"
        self.check_final(last)

    def check_final(self, last: int) -> None:
        ids = torch.arange(NUM_ROWS) - NUM_ROWS // 2
        for rank, node in self.world.workers.items():
            reading = node.client("t").start_read(ids, last, refresh=True)
            rows, clocks = node.client("t").wait_read(reading)
            self.truth.check(rank, last, last, ids, rows, clocks, own_writes=self.own_writes)
            for row, values in zip(ids.tolist(), rows.tolist(), strict=True):
                living = [p for p in range(self.num_workers) if p not in self.truth.dead]
                whole = self.truth.final(row)
                assert [values[p] for p in living] == [whole[p] for p in living], row
