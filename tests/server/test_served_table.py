"""What every table on a server promises, of either kind: the contract that `ServedTable` describes."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import save
from tests.nodes.cluster import hosted_tables
from tests.nodes.own_functions import HERE as OWN_FUNCTIONS

from paceline.core.messages import Delivered, Fetched, Pull, Push, PushId, Sender
from paceline.core.partition import holders
from paceline.core.settings import ServerSettings
from paceline.errors import PeerError, UsageError
from paceline.server.dense_table import ServedDenseTable
from paceline.server.served_table import ACCEPTED, SavedFile, ServedTable, TableHost
from paceline.server.tables import ServedTables
from paceline.transport import MemoryTransport
from paceline.transport.base import EMPTY, Connection
from paceline.transport.buffer_pool import BufferPool, ExactAllocator, is_poisoned
from paceline.transport.buffers import fresh_buffer
from paceline.update.named_rules import Add
from paceline.update.placement import spans
from paceline.update.rows.spec import RowTableSpec
from paceline.update.shard import Shard
from paceline.update.table import Segment, TableSpec
from paceline.wire.messages import Keys, PullFrame, PushFrame, RowPullFrame, RowPushFrame, RowsUsed, Unsubscribe
from paceline.wire.requests import SMALL_BYTES, Barrier, CallFunction, TableCall, WriteRows

NUMEL = 8  # of the dense table; the other has four rows of two
LIFE = (1, 0)
SENDER = Sender(1, 1, 0)
HERE = cast("Connection", object())
IDS = torch.arange(4)


class Kind(ABC):
    """How to talk to one kind of table."""

    spec: TableSpec | RowTableSpec
    adds_one: str  # a function that adds one to every value

    @abstractmethod
    def begin(self, table: ServedTable) -> None:
        """Give a table the values that it needs before it is read."""

    @abstractmethod
    def push(self, seq: int, value: float, **fields: Any) -> tuple[PushFrame | RowPushFrame, memoryview]:
        """Return a push that adds a value everywhere, and its body."""

    @abstractmethod
    def pull(self, request: int) -> tuple[PullFrame | RowPullFrame, memoryview]:
        """Return a pull of all values, and its body."""


class Dense(Kind):
    spec = TableSpec("t", (Segment("t", (NUMEL,)),), "float32", Add(), "bsp", "sum", "reject")
    adds_one = f"{OWN_FUNCTIONS}:increment"

    def begin(self, table: ServedTable) -> None:
        assert not table.has_values
        table.initialise(full(0.0))

    def push(self, seq: int, value: float, **fields: Any) -> tuple[PushFrame, memoryview]:
        return replace(PushFrame(made(seq), 1.0, (), ()), **fields), full(value)

    def pull(self, request: int) -> tuple[PullFrame, memoryview]:
        return PullFrame(Pull(SENDER, request, "t", 0, 0), request - 1), EMPTY


class Rows(Kind):
    spec = RowTableSpec("t", 2, "float32", Add(), "bsp", "sum", "reject")
    adds_one = f"{OWN_FUNCTIONS}:increment_rows"

    def begin(self, table: ServedTable) -> None:
        assert table.has_values

    def push(self, seq: int, value: float, **fields: Any) -> tuple[RowPushFrame, memoryview]:
        frame = RowPushFrame(made(seq), 1.0, (), Keys(len(IDS), b"", sent=True))
        return replace(frame, **fields), memoryview(bytearray(bytes(ids()) + bytes(full(value))))

    def pull(self, request: int) -> tuple[RowPullFrame, memoryview]:
        keys = Keys(len(IDS), b"", sent=True)
        return RowPullFrame(Pull(SENDER, request, "t", 0, 0), keys), ids()


def made(seq: int) -> Push:
    return Push(PushId(1, *LIFE, seq), "t", 0, 0)


def full(value: float) -> memoryview:
    return memoryview(bytearray(torch.full((NUMEL,), value).numpy().tobytes()))


def ids() -> memoryview:
    return memoryview(bytearray(IDS.numpy().tobytes()))


KINDS = (Dense(), Rows())


class World:
    """A table of one kind, a pool that pushes come in, and the names of tables that changed."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.changed = kind, list[str]()
        self.tables: ServedTables = hosted_tables(checks_memory=True, note_changed=self.changed.append)
        self.tables.declare(kind.spec)
        self.table: ServedTable = self.tables["t"]
        kind.begin(self.table)
        self.pool = BufferPool(ExactAllocator(fresh_buffer), poisons=True)

    def accept(self, seq: int, value: float = 1.0, kind: Kind | None = None, **fields: Any) -> str:
        """Have a push arrive in memory of the pool; return why it is refused."""
        frame, body = (kind or self.kind).push(seq, value, **fields)
        buffer = self.pool.lend(len(body))
        buffer.memory[:] = body
        accepted = self.table.accept(frame, buffer.memory, buffer)
        assert accepted.wanted is None
        assert (accepted == ACCEPTED) is self.table.has(frame.push.id) is not bool(accepted.problem)
        return accepted.problem

    def read(self, request: int = 1) -> list[float]:
        """Read all values as a worker does."""
        frame, body = self.kind.pull(request)
        assert self.table.accept_pull(frame, HERE, body) == ACCEPTED
        served = self.table.serve(LIFE, HERE, Fetched(request, "t", 0, 0, 0, ()))
        assert served is not None
        return np.frombuffer(served.body, dtype=np.float32).tolist()


@pytest.fixture(params=KINDS, ids=lambda kind: type(kind).__name__.lower())
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world = World(request.param)
    yield world
    world.tables.close()


def test_a_push_waits_until_it_is_applied_and_shows_then(world: World) -> None:
    assert (world.accept(0), world.accept(1, 2.0)) == ("", "")
    assert world.table.num_waiting == world.pool.num_lent == 2
    assert world.read() == [0.0] * NUMEL
    before = world.table.version

    assert world.table.apply([made(0).id, made(1).id], 0) == ""
    assert world.read(2) == [3.0] * NUMEL
    assert world.table.num_waiting == world.pool.num_lent == 0
    assert world.table.version > before
    assert not world.table.has(made(0).id)


def test_a_discarded_push_leaves_nothing(world: World) -> None:
    world.accept(0)
    world.accept(1)
    world.table.discard(made(0).id)
    world.table.discard(made(0).id)
    assert world.table.num_waiting == world.pool.num_lent == 1
    assert world.table.apply([made(1).id], 0) == ""
    assert world.read() == [1.0] * NUMEL


def test_memory_of_a_push_is_free_once_it_is_applied_and_not_before(world: World) -> None:
    frame, body = world.kind.push(0, 1.0)
    buffer = world.pool.lend(len(body))
    buffer.memory[:] = body
    world.table.accept(frame, buffer.memory, buffer)
    assert not is_poisoned(buffer.memory)
    world.table.apply([frame.push.id], 0)
    assert is_poisoned(buffer.memory)
    assert world.read() == [1.0] * NUMEL, "what was applied is a copy"


def test_what_cannot_be_applied_is_refused_and_its_memory_is_free(world: World) -> None:
    other = next(kind for kind in KINDS if kind is not world.kind)
    short = world.kind.push(9, 1.0)
    problems = [
        world.accept(0, kind=other),
        world.accept(1, float("nan")),
        world.accept(2, count=-1.0),
        world.accept(3, hyper=({}, {})),
        world.accept(4, hyper=({"lr": 1.0},)),
        world.accept(5, expected=float("nan")),
        world.table.accept(short[0], short[1][:-4], None).problem,
    ]
    for problem, expected in zip(
        problems,
        ("of rows", "NaN or infinite", "-1.0 samples", "of 2 groups", "group 0: unknown", "nan samples", "bytes"),
        strict=True,
    ):
        assert expected in problem
    assert world.table.num_waiting == world.pool.num_lent == 0


@pytest.mark.parametrize(
    ("field", "wrong", "problem"),
    [
        ("count", -1.0, "-1.0 samples"),
        ("expected", float("inf"), "inf samples"),
        ("hyper", ({"lr": 1.0},), "group 0: unknown"),
        ("absent", (7,), r"leaves out parameters \(7,\)"),
    ],
)
def test_each_push_is_looked_at_however_alike_the_one_before_was(field: str, wrong: Any, problem: str) -> None:
    world = World(Dense())
    assert world.accept(0) == ""
    assert re.search(problem, world.accept(1, **{field: wrong}))
    assert world.accept(2) == ""
    world.tables.close()


@pytest.mark.parametrize("num_servers", [1, 2])
def test_servers_that_must_leave_out_the_same_pushes_refuse_what_is_not_finite_as_it_comes(
    num_servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Shard, "checks_in_updates", property(lambda _: True))
    settings = ServerSettings(0, num_servers)
    [holder] = holders(spans(Dense.spec, settings))  # of so few values one server has all
    tables = ServedTables(TableHost(replace(settings, server=holder), MemoryTransport()))
    tables.declare(Dense.spec)
    frame, body = KINDS[0].push(0, float("nan"))
    problem = tables["t"].accept(frame, body[: tables["t"].value_bytes], None).problem
    assert ("NaN or infinite" in problem) is (num_servers > 1)
    assert tables["t"].num_waiting == (num_servers == 1)
    tables.close()


def test_values_that_were_sent_ahead_of_a_clock_do_not_count_once_a_function_has_changed_them() -> None:
    world = World(Dense())
    table, ahead = cast("ServedDenseTable", world.table), []
    for clock in range(2):
        assert table._early is not None
        table._early.add_reader(LIFE, HERE)
        world.accept(clock)
        made_ahead = table._early.make(
            [LIFE[0]], 0, {made(clock).id: (table._waiting[made(clock).id].contribution, 32)}
        )
        assert made_ahead is not None
        table.apply([made(clock).id], clock)
        if clock:
            table.carry_out(call(world), EMPTY, clock)
        served = table.serve(LIFE, HERE, Fetched(clock, "t", 0, 0, 0, ()))
        assert served is not None
        ahead.append(served.num_early)
    assert ahead == [32, 0]
    world.tables.close()


def test_a_push_that_breaks_the_protocol_leaves_nothing() -> None:
    world = World(Rows())
    with pytest.raises(PeerError, match="keeps no lists of ids"):
        world.accept(0, keys=Keys(len(IDS), b"digest", sent=True))
    assert world.table.num_waiting == world.pool.num_lent == 0
    world.tables.close()


def test_frames_of_the_other_kind_break_the_protocol_or_change_nothing(world: World) -> None:
    other = next(kind for kind in KINDS if kind is not world.kind)
    frame, body = other.pull(1)
    with pytest.raises(PeerError, match=r"pull of (row|dense) table 't'"):
        world.table.accept_pull(frame, HERE, body)
    with pytest.raises(UsageError, match=r"exists on server 0 with (rows|a shape); use another name"):
        world.tables.declare(other.spec)
    world.table.note_read(LIFE, RowsUsed(SENDER, "t", 0), ids())
    world.table.note_read(LIFE, Unsubscribe(SENDER, "t", 0), ids())
    world.table.note_taken(HERE, 3)
    world.table.advance(1)
    assert world.read() == [0.0] * NUMEL


def test_a_declaration_that_differs_is_refused_and_an_equal_one_changes_nothing(world: World) -> None:
    declared = world.tables.declare(world.kind.spec)
    assert (declared.table, declared.consistency, declared.keyed) == ("t", world.table.consistency, world.table.keyed)
    assert world.tables["t"] is world.table
    with pytest.raises(UsageError, match="exists on server 0 with other settings"):
        world.tables.declare(replace(world.kind.spec, consistency="ssp:1"))


def test_an_update_that_fails_closes_the_table_for_all(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the rule gives up")

    table = cast("Any", world.table)
    monkeypatch.setattr(type(table.shard if hasattr(table, "shard") else table.store), "apply", fail)
    world.accept(0)
    world.accept(1)
    problem = world.table.apply([made(0).id], 0)
    assert "as an update of it failed: RuntimeError: the rule gives up" in problem
    assert (world.table.apply([made(1).id], 1), world.table.broken) == (problem, problem)
    assert world.accept(2) == problem
    assert world.pool.num_lent == 0
    for read in (world.read, lambda: world.table.carry_out(call(world), EMPTY, 0)):
        with pytest.raises(UsageError, match="the rule gives up"):
            read()
    with pytest.raises(UsageError, match="the rule gives up"):
        world.table.save(Path("nowhere"), 0)


def call(world: World) -> CallFunction:
    return CallFunction(TableCall(1, "t", 0, 0), world.kind.adds_one, {})


def test_a_function_changes_values_and_the_core_hears_of_it(world: World) -> None:
    world.accept(0)
    world.table.apply([made(0).id], 0)
    assert world.changed == []
    world.table.carry_out(call(world), EMPTY, 0)
    assert world.changed == ["t"]
    assert world.read() == [2.0] * NUMEL


def test_what_is_saved_is_restored_under_an_equal_declaration(world: World, tmp_path: Path) -> None:
    world.accept(0, 5.0)
    world.table.apply([made(0).id], 0)
    world.table.save(tmp_path / "t.safetensors", 1)
    again = World(world.kind)
    again.table.restore(SavedFile(tmp_path / "t.safetensors"), 1, world.table.version, world.table.hyper)
    assert again.read() == [5.0] * NUMEL
    assert (again.table.version, again.table.hyper) == (world.table.version, world.table.hyper)
    assert again.table.encoded_spec() == world.table.encoded_spec()
    assert again.table.has_values
    again.tables.close()


def test_a_worker_that_leaves_leaves_its_pushes_alone(world: World) -> None:
    world.accept(0)
    world.read()
    world.table.add_reader(LIFE, live=True)
    world.table.forget_worker(LIFE)
    world.table.forget_connection(HERE)
    world.table.forget_worker((7, 7))
    assert world.table.has(made(0).id)
    assert world.table.apply([made(0).id], 0) == ""
    assert world.read(2) == [1.0] * NUMEL


def test_a_delivery_has_the_newest_values(world: World) -> None:
    tables = hosted_tables()
    tables.declare(replace(world.kind.spec, consistency="essp:1"))
    world.table = tables["t"]
    world.kind.begin(world.table)
    world.read()
    world.accept(0)
    world.table.apply([made(0).id], 0)
    served = world.table.serve(LIFE, HERE, Delivered("t", 1, 1, 0, (), -1))
    assert served is not None
    assert bytes(served.body).endswith(bytes(full(1.0)))
    assert served.lent is None or bytes(served.lent.memory) == bytes(served.body)
    tables.close()


CHANGES: dict[str, Callable[[World], object]] = {
    "an update": lambda world: (world.accept(0, 2.0), world.table.apply([made(0).id], 0)),
    "a function": lambda world: world.table.carry_out(call(world), EMPTY, 0),
    "a state": lambda world: world.table.load_state(memoryview(save({"values": torch.full((NUMEL,), 2.0)}))),
    "two updates": lambda world: [CHANGES["an update"](world), CHANGES["a function"](world)],
}


@pytest.mark.parametrize("change", CHANGES)
def test_values_on_their_way_stay_as_they_were(change: str) -> None:
    world = World(Dense())
    on_their_way = [world.table.serve((worker, 0), HERE, Fetched(1, "t", 0, 0, 0, ())) for worker in range(3)]
    bodies = [served.lent for served in on_their_way if served is not None and served.lent is not None]
    assert len(bodies) == len(on_their_way)
    memory = world.table.memory if isinstance(world.table, ServedDenseTable) else EMPTY
    assert all(body.memory.obj is memory.obj for body in bodies)  # nothing is copied
    bodies[2].note_left()
    CHANGES[change](world)
    assert all(bytes(body.memory) == bytes(full(0.0)) for body in bodies[:2])
    assert bodies[0].memory.obj is bodies[1].memory.obj  # one copy for all
    assert bodies[2].memory.obj is memory.obj
    assert world.read()[0] > 0.0
    world.tables.close()


def test_only_messages_about_its_own_content_may_be_large(world: World) -> None:
    frame, body = world.kind.push(0, 1.0)
    least, most = world.table.body_bounds(frame)
    assert least <= len(body) <= most
    other = next(kind for kind in KINDS if kind is not world.kind)
    for message in (other.push(0, 1.0)[0], Barrier(1, "here")):
        assert world.table.body_bounds(message) == (0, SMALL_BYTES)
    assert (world.table.body_bounds(WriteRows(TableCall(1, "t", 0, 0)))[1] > SMALL_BYTES) is world.table.keyed


def test_a_state_that_does_not_fit_is_refused(world: World) -> None:
    world.accept(0)
    world.table.apply([made(0).id], 0)
    with pytest.raises((UsageError, SafetensorError), match=r"rows, and no shape|header too large"):
        world.table.load_state(memoryview(b"12345678"))
    assert world.read() == [1.0] * NUMEL


def test_a_table_that_is_not_declared_is_named_with_those_that_are(world: World) -> None:
    assert world.tables.get("u") is None
    assert ("u" in world.tables, "t" in world.tables, list(world.tables)) == (False, True, ["t"])
    with pytest.raises(UsageError, match="there is no table 'u' on server 0; tables: t"):
        world.tables.require("u")
