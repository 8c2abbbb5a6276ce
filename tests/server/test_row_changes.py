"""The log of a row table: all rows at one moment, and the changes after it, are the rows at every later moment."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from tests.nodes.cluster import hosted_tables
from tests.nodes.own_functions import HERE as OWN_FUNCTIONS
from torch import Tensor

from paceline.core.messages import Push, PushId
from paceline.errors import UsageError
from paceline.server.feeds import RowFeeds
from paceline.server.served_table import ACCEPTED
from paceline.server.tables import ServerState
from paceline.transport.base import EMPTY
from paceline.update.named_rules import Adam
from paceline.update.rows import changes, cuts
from paceline.update.rows.changes import ChangeLog, CursorExpired, LogEntry
from paceline.update.rows.cuts import RowsCut
from paceline.update.rows.layout import IDS, VALUES
from paceline.update.rows.spec import First, Lifecycle, RowTableSpec
from paceline.versions.feed import RowChanges
from paceline.versions.rows import RowCopy
from paceline.wire.messages import Keys, RowPushFrame
from paceline.wire.requests import CallFunction, TableCall, WriteRows
from paceline.wire.row_codec import changes_body, changes_of

NONE = torch.empty(0, dtype=torch.int64)
Bits = dict[int, bytes]


def spec_of(life: Lifecycle, dtype: str = "float32") -> RowTableSpec:
    first = First("uniform", 0.5, 3)
    return RowTableSpec("t", 2, dtype, Adam(lr=0.1), "asynchronous", "sum", "reject", first, life)  # pyright: ignore[reportArgumentType]


def bits_of(ids: Tensor, values: Tensor) -> Bits:
    return {each: bytes(row.view(torch.uint8).numpy()) for each, row in zip(ids.tolist(), values, strict=True)}


@dataclass
class Follower:
    """A reader that was shown the rows at an entry of the log; it reads some pieces now and the others at the end."""

    cut: RowsCut
    since: int
    pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def read_piece(self) -> None:
        if len(self.pieces) < self.cut.num_pieces:
            columns = self.cut.read_columns(len(self.pieces))
            self.pieces.append((columns[IDS], columns[VALUES]))

    def copy(self, spec: RowTableSpec) -> RowCopy:
        while len(self.pieces) < self.cut.num_pieces:
            self.read_piece()
        made = RowCopy(spec)
        for ids, values in self.pieces:
            made.apply(RowChanges(ids, values, NONE, 0, ""))
        return made


class Changing:
    """A row table that changes in all ways there are; what its rows were after each entry of the log."""

    def __init__(self, life: Lifecycle, dtype: str) -> None:
        self.tables = hosted_tables(allowed_paths=None)
        self.tables.declare(spec_of(life, dtype))
        self.table, self.spec = self.tables["t"], spec_of(life, dtype)
        self.dtype = getattr(torch, dtype)
        self.num_pushes = self.clock = 0
        self.followers = list[Follower]()
        self.log: ChangeLog | None = None
        self.states = dict[int, Bits]()

    def push(self, ids: Sequence[int]) -> None:
        push_id = PushId(1, 1, 0, self.num_pushes)
        self.num_pushes += 1
        gradient = torch.full((len(ids), 2), float(self.num_pushes), dtype=self.dtype)
        frame = RowPushFrame(Push(push_id, "t", self.clock, 0), 1.0, (), Keys(len(ids), b"", sent=True))
        body = changes_body([(torch.tensor(ids), gradient, NONE)])
        assert self.table.accept(frame, memoryview(bytearray(body)), None) == ACCEPTED
        assert self.table.apply([push_id], self.clock) == ""

    def advance(self, _: Sequence[int]) -> None:
        self.clock += 1
        self.table.advance(self.clock)

    def load(self, ids: Sequence[int]) -> None:
        state = {f"state.{name}": torch.ones(len(ids), width, dtype=self.dtype) for name, width in self.columns()}
        values = torch.randn(len(ids), 2, generator=torch.Generator().manual_seed(ids[0])).to(self.dtype)
        body = save({IDS: torch.tensor(ids), VALUES: values, **state})
        self.table.carry_out(WriteRows(TableCall(0, "t", 0, 0)), memoryview(body), self.clock)

    def columns(self) -> list[tuple[str, int]]:
        piece = self.table.store.rows(0, 1)  # pyright: ignore[reportAttributeAccessIssue]
        return [
            (name.removeprefix("state."), column.shape[1])
            for name, column in piece.columns.items()
            if name.startswith("state.")
        ]

    def call(self, _: Sequence[int]) -> None:
        self.table.carry_out(
            CallFunction(TableCall(0, "t", 0, 0), f"{OWN_FUNCTIONS}:increment_rows", {"by": 1.0}), EMPTY, self.clock
        )

    def follow(self, _: Sequence[int]) -> None:
        self.log, since, cut = self.table.follow(self.clock)
        self.followers.append(Follower(cut, since))

    def read_piece(self, _: Sequence[int]) -> None:
        for each in self.followers:
            each.read_piece()

    def now(self) -> Bits:
        piece = self.table.store.rows(0, 1 << 20)  # pyright: ignore[reportAttributeAccessIssue]
        return bits_of(piece.ids, piece.values)


def read_all(log: ChangeLog, since: int, spec: RowTableSpec) -> list[LogEntry]:
    """Read a log to its end, as it comes over a wire."""
    found = list[LogEntry]()
    while True:
        part = log.read(since, wait_s=0.0)
        body = changes_body([(each.ids, each.values, each.removed) for each in part.entries])
        nums = [(len(each.ids), len(each.removed)) for each in part.entries]
        came = changes_of(body, nums, spec.width, getattr(torch, spec.dtype))
        found += [LogEntry(each.clock, *content) for each, content in zip(part.entries, came, strict=True)]
        since = part.sequence
        if part.is_all:
            return found


IDS_DRAWN = st.lists(st.integers(0, 30).map(lambda each: each * 7919 - 5), min_size=1, max_size=9, unique=True)
STEPS = st.lists(
    st.tuples(st.sampled_from(["push", "push", "push", "advance", "load", "call", "follow", "read_piece"]), IDS_DRAWN),
    max_size=25,
)
LIVES = (Lifecycle(), Lifecycle(expire_after=2), Lifecycle(max_rows=8, evict="lfu"), Lifecycle(admit_after=2))


@settings(max_examples=60)
@given(STEPS, st.sampled_from(LIVES), st.sampled_from(["float32", "bfloat16"]))
def test_the_rows_that_were_shown_and_the_changes_after_them_are_the_table(
    steps: list[tuple[str, list[int]]], life: Lifecycle, dtype: str
) -> None:
    world = Changing(life, dtype)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cuts, "PIECE_BYTES", 100)
        patched.setattr(changes, "MOST_ANSWER_BYTES", 200)
        for kind, ids in [("push", [1, 2, 3]), ("follow", []), *steps]:
            getattr(world, kind)(ids)
            if world.log is not None:
                world.states[world.log.sequence] = world.now()
        assert world.log is not None
        for follower in world.followers:
            copy, at = follower.copy(world.spec), follower.since
            assert bits_of(*copy.items()) == world.states[at]
            for entry in read_all(world.log, at, world.spec):
                at += 1
                copy.apply(RowChanges(entry.ids, entry.values, entry.removed, entry.clock, ""))
                if at in world.states:  # a call writes several entries
                    assert bits_of(*copy.items()) == world.states[at]
            assert at == world.log.sequence
            assert bits_of(*copy.items()) == world.now()
            copy.close()
    world.tables.close()


def entry_of(log: ChangeLog, value: float) -> None:
    log.append(torch.tensor([1]), torch.full((1, 4), value), NONE)


def test_a_log_forgets_the_oldest_changes_and_says_so() -> None:
    log = ChangeLog(limit_bytes=60, clock=0)  # two entries of 24 bytes
    for number in range(4):
        entry_of(log, float(number))
    assert [each.values[0, 0].item() for each in log.read(2, wait_s=0.0).entries] == [2.0, 3.0]
    assert log.read(4, wait_s=0.0).is_all
    for since in (1, 5, 1 << 62):
        with pytest.raises(CursorExpired, match=f"2 changes before 4, and {since} is not there"):
            log.read(since, wait_s=0.0)
    log.append(torch.arange(100), torch.zeros(100, 4), NONE)
    assert len(log.read(4, wait_s=0.0).entries) == 1, "the newest one stays, whatever it has"


def test_a_log_that_is_not_read_for_long_ends_with_the_next_change(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Changing(Lifecycle(), "float32")
    world.follow([])
    assert world.log is not None
    world.push([1])
    assert world.table.log is world.log
    monkeypatch.setattr(changes, "UNREAD_S", -1.0)
    world.push([1])
    assert world.table.log is None
    with pytest.raises(CursorExpired, match="no reader had asked for it"):
        world.log.read(1, wait_s=0.0)
    world.tables.close()


def test_a_read_waits_for_a_change_and_a_log_that_ends_wakes_it() -> None:
    log, found, came = ChangeLog(1 << 20, clock=0), list[object](), threading.Event()

    def read() -> None:
        found.append(log.read(0, wait_s=100.0).entries[0].values[0, 0].item())
        came.set()
        try:
            log.read(1, wait_s=100.0)
        except CursorExpired as error:
            found.append(str(error))

    reading = threading.Thread(target=read)
    reading.start()
    entry_of(log, 5.0)
    assert came.wait(100.0)
    log.end("its server has ended")
    reading.join(100.0)
    assert found == [5.0, "the log of changes does not go on from there: its server has ended"]


def test_clocks_are_noted_of_the_tables_that_are_served_now() -> None:
    feeds, worlds = RowFeeds(), [Changing(Lifecycle(), "float32") for _ in range(2)]
    core = cast("Any", SimpleNamespace(clock_of=lambda _: 0))
    first, second = (ServerState(core, each.tables, lambda: True, cast("Any", None)) for each in worlds)
    feeds.attach(lambda call: call(first), worlds[0].tables)
    log, _, _, _ = feeds.follow(first, "t")
    feeds.note_clocks(worlds[0].tables, lambda _: 3)
    assert log.clock == 3
    feeds.attach(lambda call: call(second), worlds[1].tables)  # as when a namespace is served anew
    for each in worlds:
        feeds.note_clocks(each.tables, lambda _: 9)
    assert log.clock == 3
    feeds.detach(worlds[0].tables)  # which is late, and takes nothing from the other
    assert feeds.ask(lambda held: held, lambda: False) is second
    feeds.detach(worlds[1].tables)
    with pytest.raises(UsageError, match="no tables are served here now"):
        feeds.ask(lambda held: held, lambda: False)
    for each in worlds:
        each.tables.close()
