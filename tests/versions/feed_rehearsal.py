"""Feeds of rows in one thread, with drawn faults: the real code at both ends of each line, and real tables.

Tables change in all ways there are, logs are too short, servers are killed and replaced, lines are cut, and consumers
end and go on from the cursor that they have saved. `FeedHistory` checks what they have then, and shares no code with
what it checks.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tests.server.test_row_changes import Bits, Changing, bits_of
from tests.versions.rehearsal import Lines, Place, ReaderEnd

from paceline.errors import PacelineError
from paceline.server.readers import Published
from paceline.server.served_table import SavedFile
from paceline.server.tables import ServerState
from paceline.transport.base import Frame
from paceline.transport.deadline import Deadline
from paceline.update.rows import changes
from paceline.update.rows.changes import ChangeLog
from paceline.update.rows.spec import Lifecycle
from paceline.versions.feed import RowChanges, RowFeed
from paceline.versions.links import ServerLinks
from paceline.versions.places import PublishingServers, VersionPlaces
from paceline.wire.row_codec import ids_body
from paceline.wire.versions import RowChoice

TABLE = "t"
LIVES = (Lifecycle(), Lifecycle(expire_after=2), Lifecycle(max_rows=8, evict="lfu"), Lifecycle(admit_after=2))
IDS = [each * 7919 - 5 for each in range(30)]
CHOSEN = IDS[::3]
NUM_PARTS = 2
LOG_BYTES = (300, 5000)  # which are too few, and mostly enough
ANSWER_BYTES, PIECE_BYTES = 150, 100
NUM_ACTIONS, CALM_POLLS = 100, 400


class WrongFeedError(AssertionError):
    """A consumer has what it must not; the message says which promise is broken."""


@dataclass
class FeedHistory:
    """What each server had after each entry of each of its logs; raises WrongFeedError.

    F1: rows that were shown and the changes behind them are the table at the cursor; F2: parts have each row once
    together; F3: a cursor does not go back; F4: a feed begins anew only where a log has ended or forgotten; F5: a log
    is bounded; F6: without faults each consumer comes to the table; F7: nothing is kept for consumers that have gone.
    """

    states: dict[str, dict[int, Bits]] = field(default_factory=dict)  # by log, and number of its newest entry
    part_of: dict[int, int] = field(default_factory=dict)  # by row
    counts: Counter[str] = field(default_factory=Counter)

    def note(self, log: ChangeLog, rows: Bits) -> None:
        """Note what a server has, and that its log is not longer than it may be."""
        self.states.setdefault(log.name, {})[log.sequence] = rows
        sizes = [entry.size_bytes for entry in log._entries]
        if len(sizes) > 1 and sum(sizes) > log._limit_bytes:
            raise WrongFeedError(f"F5: a log of {log._limit_bytes} bytes has {sizes}")

    def at_cursor(self, consumer: Consumer) -> None:
        """Check the rows of a consumer that has handled all changes up to its cursor."""
        wanted = Bits()
        for log, sequence in positions_of(consumer.cursor):
            state = self.states.get(log, {}).get(sequence)
            if state is None:  # between two entries of one call
                return
            wanted |= state
        self.counts["a cursor checked"] += 1
        self._same("F1", consumer, wanted)

    def _same(self, rule: str, consumer: Consumer, wanted: Bits) -> None:
        wanted = {row: bits for row, bits in wanted.items() if consumer.wants(row)}
        if consumer.part is None:
            if consumer.rows != wanted:
                odd = sorted(row for row in consumer.rows.keys() | wanted if consumer.rows.get(row) != wanted.get(row))
                raise WrongFeedError(
                    f"{rule}: {consumer.name} has other rows than the table at {consumer.cursor}: {odd}"
                )
            return
        for row, bits in consumer.rows.items():
            if self.part_of.setdefault(row, consumer.part) != consumer.part:
                raise WrongFeedError(f"F2: row {row} is in part {consumer.part} and in part {self.part_of[row]}")
            if wanted.get(row) != bits:
                raise WrongFeedError(f"{rule}: {consumer.name} has row {row}, which the table does not have so")
        lost = [row for row in wanted if self.part_of.get(row) == consumer.part and row not in consumer.rows]
        if lost:
            raise WrongFeedError(f"{rule}: {consumer.name} lacks {lost}")

    def went_on(self, consumer: Consumer, found: RowChanges, logs: list[ChangeLog | None]) -> None:
        """Check that a feed goes on behind its cursor, or begins anew with a reason."""
        if found.resets:
            self.counts["a feed begun anew"] += 1
        if not consumer.cursor or not consumer.goes_on:
            return
        before = positions_of(consumer.cursor)
        if found.resets:
            if len(before) == len(logs) and all(map(has_all, logs, before)):
                raise WrongFeedError(f"F4: {consumer.name} begins anew though logs go on from {consumer.cursor}")
        elif found.cursor:
            after = positions_of(found.cursor)
            if any(new[0] != old[0] or new[1] < old[1] for new, old in zip(after, before, strict=True)):
                raise WrongFeedError(f"F3: {consumer.name} goes from {consumer.cursor} to {found.cursor}")

    def ended(self, consumers: list[Consumer], tables: list[Bits]) -> None:
        """Check that all consumers have what the tables have."""
        whole = {row: bits for each in tables for row, bits in each.items()}
        for each in consumers:
            self._same("F6", each, whole)
        parts = Counter(row for each in consumers if each.part is not None for row in each.rows)
        if parts != Counter(whole.keys()):
            raise WrongFeedError(f"F2: parts have {sorted(parts.items())}, the table {sorted(whole)}")


def positions_of(cursor: str) -> list[tuple[str, int]]:
    """Return log and sequence of each server."""
    return [(log, int(number)) for log, _, number in (part.partition(":") for part in cursor.split(","))]


def has_all(log: ChangeLog | None, position: tuple[str, int]) -> bool:
    """Return whether a log goes on from a position."""
    if log is None or log.name != position[0]:
        return False
    return position[1] >= log.sequence - len(log._entries)


@dataclass
class Consumer:
    """Keeps rows by handling changes, and a cursor; what it saves now and then survives its end.

    Args:
        part: of `NUM_PARTS`; None for other choices.
        ids: only these; None for all.
    """

    name: str
    links: ServerLinks
    part: int | None = None
    ids: list[int] | None = None
    rows: Bits = field(default_factory=dict)
    cursor: str = ""
    saved: tuple[str, Bits] = field(default_factory=lambda: ("", Bits()))
    goes_on: bool = False  # the cursor is of the feed, or that was begun with it
    feed: RowFeed = field(init=False)

    def __post_init__(self) -> None:
        self.feed = RowFeed(self.links, TABLE, "", self.only)

    @property
    def only(self) -> RowChoice | None:
        if self.ids is not None:
            return RowChoice(bytes(ids_body(torch.tensor(self.ids))), 0, 1)
        return None if self.part is None else RowChoice(b"", self.part, NUM_PARTS)

    def wants(self, row: int) -> bool:
        return self.ids is None or row in self.ids

    def restart(self) -> None:
        """End without a word, and go on from what was saved."""
        self.links.drop()
        self.cursor, rows = self.saved
        self.rows = dict(rows)
        self.feed, self.goes_on = RowFeed(self.links, TABLE, self.cursor, self.only), bool(self.cursor)

    def handle(self, found: RowChanges) -> None:
        if found.resets:
            self.rows, self.cursor = {}, ""
        self.rows.update(bits_of(found.ids, found.values))
        for row in found.removed.tolist():
            self.rows.pop(row, None)
        self.cursor = found.cursor or self.cursor
        self.goes_on = bool(self.cursor)


class FeedWorld:
    """One seeded run: the servers of a job, and consumers of all rows, of some ids, and of parts."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.rng, self.folder = Random(seed), folder
        self.history = FeedHistory()
        self.is_calm = False
        self.life, self.dtype = self.rng.choice(LIVES), self.rng.choice(("float32", "bfloat16"))
        self.tables = [Changing(self.life, self.dtype) for _ in range(self.rng.randint(1, 3))]
        self.places = [Published() for _ in self.tables]
        self.place = Place(lambda: lambda: tuple(self.places), share_address=False)
        self.place.kill()
        for server in range(len(self.tables)):
            self._serve(server)
        self.consumers = [
            Consumer("all", self._links()),
            Consumer("some", self._links(), ids=CHOSEN),
            *(Consumer(f"part {part}", self._links(), part=part) for part in range(NUM_PARTS)),
        ]

    def run(self) -> FeedHistory:
        """Act and read; then have no faults any more, and check that all consumers come to the table."""
        for _ in range(NUM_ACTIONS):
            self.happen()
            for _ in range(3):
                self._poll(self.rng.choice(self.consumers))
        self.is_calm = True
        for _ in range(CALM_POLLS):
            came = [self._poll(each) for each in self.consumers]
            if not any(came) and all(each.cursor and self._is_there(each) for each in self.consumers):
                break
        self.history.ended(self.consumers, [table.now() for table in self.tables])
        for each in self.consumers:
            each.links.close()
        for part in self.places:
            if part.feeds._places:
                raise WrongFeedError("F7: rows are shown to consumers that have gone")
        for table in self.tables:
            table.tables.close()
        return self.history

    # -- what happens ------------------------------------------------------------------------------------------------

    def happen(self) -> None:
        """Have something happen that no consumer does."""
        if self.is_calm:
            return
        what = self.rng.choices(
            (self._push, self._advance, self._load, self._kill_server, self._restart, self._end_log),
            (8, 3, 1, 0.15, 0.7, 0.1),
        )
        what[0]()

    def disturb(self, line: ReaderEnd) -> None:
        """Perhaps cut a line, or have something happen while it is used."""
        chance = self.rng.random()
        if self.is_calm:
            return
        if chance < 0.005:
            self.history.counts["a line cut"] += 1
            line.close()
        elif chance < 0.1:
            self.happen()

    def carried(self, frame: Frame) -> Frame:
        """Return what arrives of a frame: all of it, in memory of the consumer."""
        return Frame(frame.header, memoryview(bytearray(frame.body)))

    def _push(self) -> None:
        self._change("push", self.rng.sample(IDS, self.rng.randint(1, 6)))

    def _load(self) -> None:
        self._change("load", self.rng.sample(IDS, self.rng.randint(1, 4)))

    def _advance(self) -> None:
        for server in range(len(self.tables)):
            self._on_server(server, "advance", [])

    def _change(self, what: str, ids: list[int]) -> None:
        for server in range(len(self.tables)):
            mine = [each for each in ids if each % len(self.tables) == server]
            if mine:
                self._on_server(server, what, mine)

    def _on_server(self, server: int, what: str, ids: list[int]) -> None:
        table = self.tables[server]
        before = set(table.now())
        getattr(table, what)(ids)
        self.history.counts["rows gone"] += len(before - set(table.now()))
        log = table.table.log
        if log is not None:
            self.history.note(log, table.now())
        self.places[server].feeds.note_clocks(table.tables, lambda _: table.clock)

    def _end_log(self) -> None:
        """Have a log end, as no one had read it for long."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(changes, "UNREAD_S", -1.0)
            self.history.counts["a log ended"] += 1
            self._push()

    def _restart(self) -> None:
        self.history.counts["a consumer restarted"] += 1
        self.rng.choice(self.consumers).restart()

    def _kill_server(self) -> None:
        """Have another process go on with the rows of a server that was killed; it knows nothing of the log."""
        self.history.counts["a server killed"] += 1
        server = self.rng.randrange(len(self.tables))
        before, after = self.tables[server], Changing(self.life, self.dtype)
        path = self.folder / "table"
        before.table.save(path, before.clock)
        saved = SavedFile(path)
        after.table.restore(saved, before.clock, before.table.version, before.table.hyper)
        after.clock, after.num_pushes = before.clock, before.num_pushes
        for line in [line for line in self.place.lines if self.places[server] in line._reading._parts]:
            line.close()
        self.places[server].feeds.detach(before.tables)
        before.tables.close()
        self.tables[server], self.places[server] = after, Published()
        self._serve(server)

    def _serve(self, server: int) -> None:
        table = self.tables[server]
        core = cast("Any", SimpleNamespace(clock_of=lambda _: table.clock))
        state = ServerState(core, table.tables, lambda: True, cast("Any", None))

        def do(call: Any) -> None:
            call(state)
            if table.table.log is not None:
                self.history.note(table.table.log, table.now())

        self.places[server].feeds.attach(do, table.tables)

    # -- consumers ---------------------------------------------------------------------------------------------------

    def _links(self) -> ServerLinks:
        def find() -> PublishingServers:
            addresses = tuple(map(str, range(len(self.places))))
            return PublishingServers(Lines(cast("Any", self), self.place), addresses)  # pyright: ignore[reportArgumentType]

        return ServerLinks(TABLE, VersionPlaces("a job", (find,)))

    def _poll(self, consumer: Consumer) -> bool:
        """Have a consumer handle what comes next; return whether something did."""
        feed = consumer.feed
        with suppress(PacelineError):
            found = feed.poll(0.0, Deadline.after(0.0))
            if consumer.feed is not feed:  # it was restarted meanwhile
                return True
            skipped = feed.skipped()
            for each in [*found, *([] if skipped is None else [skipped])]:
                self.history.went_on(consumer, each, [table.table.log for table in self.tables])
                consumer.handle(each)
                if consumer.cursor and not each.is_snapshot:
                    self.history.at_cursor(consumer)
                    if self.rng.random() < 0.3:
                        consumer.saved = consumer.cursor, dict(consumer.rows)
            return bool(found)
        return True

    def _is_there(self, consumer: Consumer) -> bool:
        logs = [table.table.log for table in self.tables]
        sequences = [None if log is None else (log.name, log.sequence) for log in logs]
        return list(positions_of(consumer.cursor)) == sequences


def rehearse_feeds(seed: int) -> FeedHistory:
    """Run one job; raises WrongFeedError."""
    with small(LOG_BYTES[seed % 4 > 0]), tempfile.TemporaryDirectory() as folder:
        return FeedWorld(seed, Path(folder)).run()


@contextmanager
def small(log_bytes: int) -> Iterator[None]:
    """Have logs, answers and pieces of few bytes, and no pauses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.server.row_table.LEAST_LOG_BYTES", log_bytes)
        patch.setattr(changes, "MOST_ANSWER_BYTES", ANSWER_BYTES)
        patch.setattr("paceline.update.rows.cuts.PIECE_BYTES", PIECE_BYTES)
        patch.setattr("paceline.versions.links._FIRST_PAUSE_S", 0.0)
        patch.setattr("paceline.server.feeds._LONGEST_PAUSE_S", 0.0)
        patch.setattr("paceline.server.feeds._BETWEEN_SHOWS_S", 0.0)
        yield
