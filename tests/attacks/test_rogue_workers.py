"""A worker that was taken over may send wrong gradients; it ends no server, stalls no other and speaks for itself."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from safetensors.torch import save
from tests.attacks.rogue import IDS, MOST, Rogue, bytes_of, container, dense, rogue_in, row_table
from tests.attacks.target import REFUSED_WITHIN_S, Target, target
from tests.nodes.client import ONES, client, member

from paceline.core.messages import (
    Applied,
    Clock,
    Closed,
    Delivered,
    Fetched,
    Follow,
    Held,
    Join,
    Joined,
    Leave,
    Left,
    PushRefused,
    Sender,
    Taken,
    Ticked,
    WorkerRefused,
)
from paceline.update import named_rules as update
from paceline.update.rows.spec import FilterSpec, First, Lifecycle
from paceline.update.rules import RuleSpec
from paceline.wire.messages import (
    EarlyValues,
    FactoredMatrix,
    FactoredPush,
    Hello,
    Keys,
    KeysWanted,
    PushFrame,
    PushPiece,
    RowPullFrame,
    RowPushFrame,
    StepFrame,
    Unsubscribe,
)
from paceline.wire.requests import (
    Barrier,
    CallFunction,
    ClaimWork,
    Declare,
    DeclareRows,
    Describe,
    Initialise,
    LoadState,
    ReadRows,
    RequestDone,
    RequestFailed,
    TableCall,
    WriteRows,
)

Attack = Callable[[Rogue], None]

RANKS = count(1)
ALL_IDS = Keys(2, b"", sent=True)
ROW_BODY = bytes_of(IDS) + bytes_of(torch.ones(2, 2))
ADAM = update.Adam().groups[0]


@pytest.fixture(scope="module")
def victim() -> Iterator[Target]:
    """A server with a table "w" of four numbers and a table "r" of rows."""
    with target() as started:
        started.honest.say(DeclareRows(3, row_table("r", update.Adam())))
        started.honest.hear(RequestDone)
        yield started


def what_counts(victim: Target, rogue: Rogue) -> dict[str, object]:
    """The picture of the server but for what is the rogue's own: its clock, and tables that it has made."""
    seen = victim.picture()
    of_tables = {
        kind: {name: found for name, found in seen[kind].items() if name in ("w", "r")}
        for kind in ("values", "versions", "rows")
    }
    clocks = {rank: clock for rank, clock in seen["clocks"].items() if rank != rogue.rank}
    members = [rank for rank in seen["members"] if rank != rogue.rank]
    return {**of_tables, "clocks": clocks, "members": members, "waiting": seen["waiting"]}


def outcome(victim: Target, attack: Attack) -> list[object]:
    """Attack, and return what came of it; nothing that counts has changed, and others are served at once."""
    with rogue_in(victim.servers, next(RANKS)) as rogue:
        before = what_counts(victim, rogue)
        attack(rogue)
        heard = rogue.hear()
        began_s = time.process_time()
        assert victim.read() == bytes(16)
        assert time.process_time() - began_s < 2 * REFUSED_WITHIN_S
        assert what_counts(victim, rogue) == before
    return heard


def factored(rogue: Rogue, *matrices: tuple[int, int]) -> FactoredPush:
    """A push with so many samples of each of these parameters."""
    return FactoredPush(rogue.frame(), tuple(FactoredMatrix(*each) for each in matrices))


FORGED: dict[str, Attack] = {
    "a push of another": lambda rogue: rogue.say(PushFrame(rogue.push(worker=0), 1.0, (), ()), ONES),
    "a step of another": lambda rogue: rogue.say(
        StepFrame((PushFrame(rogue.push(worker=0), 1.0, (), ()),), 1, (), (16,)), ONES
    ),
    "a step of rows": lambda rogue: rogue.say(StepFrame((rogue.frame(table="r"),), 1, (), (16,)), ONES),
    "a step of rows without their ids": lambda rogue: rogue.say(
        StepFrame((), 1, (), (16,), (rogue.rows(Keys(2, b"", sent=False)),)), ONES
    ),
    "a step of rows by a digest": lambda rogue: rogue.say(
        StepFrame((), 1, (), (32,), (rogue.rows(Keys(2, b"x", sent=True)),)), bytes_of(IDS) + ONES
    ),
    "a step after the last clock": lambda rogue: rogue.say(StepFrame((rogue.frame(),), 2**64 - 1, (), (16,)), ONES),
    "a step of two tables with the bytes of one": lambda rogue: rogue.say(
        StepFrame((rogue.frame(), rogue.frame()), 1, (), (16, 16)), ONES
    ),
    "a step with more bytes than it names": lambda rogue: rogue.say(StepFrame((rogue.frame(),), 1, (), (8,)), ONES),
    "a step with fewer than no bytes": lambda rogue: rogue.say(
        StepFrame((rogue.frame(), rogue.frame()), 1, (), (32, -16)), ONES
    ),
    "a step of nothing": lambda rogue: rogue.say(StepFrame((), 1, (), ())),
    "a piece of a push of another": lambda rogue: rogue.say(
        PushPiece(PushFrame(rogue.push(worker=0), 1.0, (), ()), 0), ONES
    ),
    "a piece of rows": lambda rogue: rogue.say(PushPiece(rogue.frame(table="r"), 0), ONES),
    "a piece behind its push": lambda rogue: rogue.say(PushPiece(rogue.frame(), 4), ONES),
    "a piece before its push": lambda rogue: rogue.say(PushPiece(rogue.frame(), -4), ONES),
    "a piece without numbers": lambda rogue: rogue.say(PushPiece(rogue.frame(), 0)),
    "factors of another": lambda rogue: rogue.say(
        FactoredPush(PushFrame(rogue.push(worker=0), 1.0, (), ()), (FactoredMatrix(0, 1),)), ONES
    ),
    "factors of rows": lambda rogue: rogue.say(FactoredPush(rogue.frame(table="r"), (FactoredMatrix(0, 1),)), ONES),
    "factors of what is no matrix": lambda rogue: rogue.say(factored(rogue, (0, 0)), ONES),
    "factors of no parameter": lambda rogue: rogue.say(factored(rogue, (-1, 0)), ONES),
    "factors without a matrix": lambda rogue: rogue.say(factored(rogue), ONES),
    "factors with another checksum": lambda rogue: rogue.say(
        FactoredPush(rogue.frame(), (FactoredMatrix(0, 0),), 7), ONES
    ),
    "values ahead of a clock": lambda rogue: rogue.say(EarlyValues("w", 1, 0), ONES),
    "a pull of another": lambda rogue: rogue.say(rogue.pull(worker=0)),
    "a tick of another": lambda rogue: rogue.say(Clock(Sender(1, 0, 0), 9)),
    "a tick of another life": lambda rogue: rogue.say(Clock(Sender(1, rogue.rank, 7), 9)),
    "a join of another": lambda rogue: rogue.say(Join(Sender(1, 0, 1))),
    "a leave of another": lambda rogue: rogue.say(Leave(Sender(1, 0, 0))),
    "a receipt of another": lambda rogue: rogue.say(Taken(Sender(1, 0, 0), "w", 1)),
    "a word of the lead": lambda rogue: rogue.say(Closed(1, "w", 0, ((rogue.rank, 0),))),
    "a question of another server": lambda rogue: rogue.say(Follow(1, 1, "w", 0)),
    "an answer of a server": lambda rogue: rogue.say(Joined(3)),
    "an acknowledgement": lambda rogue: rogue.say(Applied(rogue.push().id)),
    "values": lambda rogue: rogue.say(Delivered("w", 1, 1, 0, ()), ONES),
    "an end of another": lambda rogue: rogue.say(WorkerRefused(Sender(1, 0, 0), "go")),
    "an answer to a request": lambda rogue: rogue.say(RequestDone(1)),
    "a wish for ids": lambda rogue: rogue.say(KeysWanted("r", 0, 0)),
    "a farewell": lambda rogue: rogue.say(Left()),
    "another introduction": lambda rogue: rogue.say(Hello("server", 0, 0, 1)),
    "an unknown kind": lambda rogue: rogue.say_bytes(b"\xff\x80"),
    "nothing": lambda rogue: rogue.say_bytes(b""),
    "noise": lambda rogue: rogue.say_bytes(os.urandom(2000)),
    "no fields": lambda rogue: rogue.say_bytes(b"\x01\x80"),
    "fields in depth": lambda rogue: rogue.say_bytes(b"\x01\x81\xa1x" + b"\x91" * 60_000 + b"\x00"),
    "a number that is none": lambda rogue: rogue.say_bytes(b"\x04\x83\xa6sender\xc0\xa5clock\xcb\x7f\xf8" + bytes(6)),
    "ids that are none": lambda rogue: rogue.say(rogue.row_pull(ALL_IDS), bytes(15)),
    "fewer ids than announced": lambda rogue: rogue.say(rogue.row_pull(Keys(2**62, b"", sent=True)), bytes(16)),
    "a digest where none are kept": lambda rogue: rogue.say(rogue.row_pull(Keys(2, b"x" * 16, sent=False))),
}


@pytest.mark.parametrize("attack", FORGED.values(), ids=FORGED)
def test_what_a_worker_may_not_say_ends_its_connection(attack: Attack, victim: Target) -> None:
    assert outcome(victim, attack) == ["cut"]


def bad_hyper(**numbers: object) -> Attack:
    return lambda rogue: rogue.say(rogue.rows(ALL_IDS, hyper=({**ADAM, **numbers},)), ROW_BODY)


REFUSED: dict[str, tuple[Attack, str]] = {
    "too few numbers": (lambda rogue: rogue.say(rogue.frame(), bytes(12)), "12 bytes, server 0 expects 16"),
    "no numbers": (lambda rogue: rogue.say(rogue.frame()), "0 bytes, server 0 expects 16"),
    "no such table": (lambda rogue: rogue.say(rogue.frame(table="x" * 5000), ONES), "no table 'x{200}' on server 0"),
    "a piece for no such table": (
        lambda rogue: rogue.say(PushPiece(rogue.frame(table="x"), 0), ONES),
        "no table 'x' on server 0",
    ),
    "NaN in a piece": (
        lambda rogue: rogue.say(PushPiece(rogue.frame(), 0), bytes_of(torch.full((4,), math.nan))),
        "4 of its 4 elements",
    ),
    "NaN samples of a piece": (
        lambda rogue: rogue.say(PushPiece(PushFrame(rogue.push(), math.nan, (), ()), 0), ONES),
        "nan samples",
    ),
    "NaN samples": (lambda rogue: rogue.say(PushFrame(rogue.push(), math.nan, (), ()), ONES), "nan samples"),
    "endless samples": (lambda rogue: rogue.say(PushFrame(rogue.push(), math.inf, (), ()), ONES), "inf samples"),
    "parameters that there are not": (
        lambda rogue: rogue.say(PushFrame(rogue.push(), 1.0, tuple(range(MOST - 90_000, MOST)), ()), ONES),
        "leaves out parameters .*but 'w' has 1",
    ),
    "NaN": (lambda rogue: rogue.say(rogue.frame(), bytes_of(torch.full((4,), math.nan))), "4 of its 4 elements"),
    "NaN in rows": (
        lambda rogue: rogue.say(rogue.rows(ALL_IDS), bytes_of(IDS) + bytes_of(torch.full((2, 2), math.nan))),
        "4 of its 4 elements on server 0 are NaN",
    ),
    "rows for what has none": (
        lambda rogue: rogue.say(RowPushFrame(rogue.push(), 1.0, (), ALL_IDS), ROW_BODY),
        "no table of rows 'w'",
    ),
    "a shape for rows": (lambda rogue: rogue.say(rogue.frame(table="r"), ONES), "'r' is a table of rows"),
    "fewer than no rows": (lambda rogue: rogue.say(rogue.rows(Keys(-1, b"", sent=True)), ROW_BODY), "-1 rows"),
    "too many rows": (lambda rogue: rogue.say(rogue.rows(Keys(MOST, b"", sent=True)), ROW_BODY), f"{MOST} rows"),
    "no rows": (lambda rogue: rogue.say(rogue.rows(ALL_IDS)), "did not come"),
    "no step size": (bad_hyper(lr=None), r"not a number \['lr'\]"),
    "a step size that is NaN": (bad_hyper(lr=math.nan), r"not a number \['lr'\]"),
    "an endless step size": (bad_hyper(lr=math.inf), r"not a number \['lr'\]"),
    "a step size out of range": (bad_hyper(lr=MOST), r"not a number \['lr'\]"),
    "a state that there is not": (bad_hyper(amsgrad=True), "amsgrad was off when 'r' was declared"),
    "one beta": (bad_hyper(betas=0.9), r"not a number \['betas'\]"),
    "three betas": (bad_hyper(betas=(0.9, 0.9, 0.9)), r"not a number \['betas'\]"),
    "too many groups": (
        lambda rogue: rogue.say(rogue.rows(ALL_IDS, hyper=(ADAM, ADAM)), ROW_BODY),
        "hyperparameters of 2 groups",
    ),
}


def test_numbers_that_a_rule_of_rows_cannot_take_are_refused(victim: Target) -> None:
    rule = update.FTRL(alpha=0.1, l1=1.0)
    declared = rule.groups[0]

    def attack(rogue: Rogue) -> None:
        rogue.say(DeclareRows(9, row_table("clicks", rule)))
        for seq, alpha in enumerate((0, 0.2)):
            push = rogue.push(seq, "clicks")
            rogue.say(RowPushFrame(push, 1.0, ({**declared, "alpha": alpha},), ALL_IDS), ROW_BODY)

    _, refused, applied = outcome(victim, attack)
    assert isinstance(refused, PushRefused)
    assert "alpha is 0, expected" in refused.reason
    assert isinstance(applied, Applied)


@pytest.mark.parametrize(("attack", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_push_that_makes_no_sense_is_refused(attack: Attack, reason: str, victim: Target) -> None:
    [refused] = outcome(victim, attack)
    assert isinstance(refused, PushRefused)
    assert re.search(reason, refused.reason), refused.reason
    assert len(refused.reason) < 1000


def declare(*shape: int, rule: RuleSpec | None = None, consistency: str = "bsp", name: str = "z") -> Attack:
    return lambda rogue: rogue.say(Declare(9, dense(name, *shape, rule=rule, consistency=consistency)))


def declare_rows(rule: RuleSpec | None = None, **more: object) -> Attack:
    return lambda rogue: rogue.say(DeclareRows(9, row_table(rule=rule, **more)))


def load_state(content: bytes) -> Attack:
    return lambda rogue: rogue.say(LoadState(9, "w"), content)


def write_rows(content: bytes) -> Attack:
    return lambda rogue: rogue.say(WriteRows(TableCall(9, "r", 0, 0)), content)


def call(function: str, table: str = "w") -> Attack:
    return lambda rogue: rogue.say(CallFunction(TableCall(9, table, 0, 0), function, {}))


def take_piece(*sizes: int, epoch: int = 0, number: int = 0) -> Attack:
    return lambda rogue: rogue.say(ClaimWork(9, f"work of {rogue.rank}", epoch, number, sizes, ()))


HOPELESS: dict[str, tuple[Attack, str]] = {
    "a table of 2**62 numbers": (declare(2**62), "cannot hold table 'z': it needs 18446744073709551616 bytes"),
    "a table beyond all numbers": (declare(*(MOST,) * 20), "expected sizes whose product"),
    "a table of nothing that no file can name": (declare(4, 0, MOST), "expected sizes whose product"),
    "a table of 16 TiB": (declare(2**42), "cannot hold table 'z'"),
    "a table of less than nothing": (declare(-4, -4), "expected sizes of 0 or more"),
    "a long name": (declare(name="n" * 400_000), "400000 characters, expected at most 500"),
    "other settings": (declare(5, name="w"), "exists on server 0 with other settings"),
    "the name of rows": (declare(name="r"), "exists on server 0 with rows"),
    "a policy of 5000 digits": (declare(consistency="ssp:" + "9" * 5000), "consistency 'ssp:9"),
    "a rule that is a module": (declare(rule=RuleSpec("torch.optim.sys", ({},))), "no optimizer class"),
    "Python's own library": (declare(rule=RuleSpec("subprocess:Popen", ({},))), "Python's own library"),
    "rows of 2**64 numbers": (declare_rows(width=MOST), "expected 1 to"),
    "a file where none can be": (
        declare_rows(life=Lifecycle(memory_bytes=1 << 24, spill="a\0b")),
        "null byte",
    ),
    "rows that come after more pushes than are counted": (
        declare_rows(life=Lifecycle(admit_after=2**31)),
        "expected 1 \\(every row\\) to 2147483647 pushes",
    ),
    "first values beyond all numbers": (
        declare_rows(dtype="float16", first=First("constant", 1e6)),
        "a number that float16 can hold",
    ),
    "first values that are none": (declare_rows(first=First("normal", math.nan)), "a number that float32 can hold"),
    "a filter without its numbers": (declare_rows(filters=(FilterSpec("int8", {}),)), "has the numbers none"),
    "an unknown filter": (declare_rows(filters=(FilterSpec("sieve", {}),)), "There is no filter"),
    "a thousand filters": (
        declare_rows(filters=(FilterSpec("int8", {"push": True, "pull": True}),) * 1000),
        "1000 times",
    ),
    "a state that is noise": (load_state(os.urandom(300)), "header too large|Error while deserializing"),
    "a state without values": (load_state(save({"x": torch.ones(4)})), "state 'x' belongs to no segment"),
    "no state at all": (load_state(save({})), "without values"),
    "a state of another shape": (load_state(save({"values": torch.ones(3)})), r"shape \(3,\)"),
    "a state of a type that there is not": (load_state(container("F4", 2)), "KeyError"),
    "values for a table that there is not": (lambda rogue: rogue.say(Initialise(9, "x"), ONES), "no table 'x'"),
    "rows without ids": (write_rows(save({"values": torch.ones(2, 2)})), "without ids"),
    "rows without values": (write_rows(save({"ids": IDS})), "rows have none as"),
    "rows that repeat": (
        write_rows(save({"ids": torch.tensor([1, 1]), "values": torch.ones(2, 2)})),
        "repeat|rows have none",
    ),
    "a slot below all": (
        lambda rogue: rogue.say(ReadRows(TableCall(9, "r", 0, 0), -1, values_only=False)),
        "no slot -1",
    ),
    "a function to end a process": (call("os:abort"), "Python's own library"),
    "a function to crash it": (call("faulthandler:_sigsegv", "r"), "Python's own library"),
    "a function that there is not": (call("tests.nowhere:f"), "cannot be imported"),
    "a function without its numbers": (call("top"), "missing 1 required"),
    "work of 2**40 pieces": (take_piece(2**40), "expected at most"),
    "work without end": (take_piece(*(MOST,) * 9), "expected at most"),
    "less than no work": (take_piece(-4), "no number below 0"),
    "work before all epochs": (take_piece(1, epoch=-5), "no number below 0"),
}


@pytest.mark.parametrize(("attack", "reason"), HOPELESS.values(), ids=HOPELESS)
def test_a_request_that_cannot_be_carried_out_is_answered_with_the_reason(
    attack: Attack, reason: str, victim: Target
) -> None:
    [failed] = outcome(victim, attack)
    assert isinstance(failed, RequestFailed)
    assert re.search(reason, failed.reason), failed.reason
    assert len(failed.reason) < 5000


def test_another_generation_takes_no_part(victim: Target) -> None:
    heard = outcome(victim, lambda rogue: rogue.say(Clock(Sender(0, rogue.rank, 0), 1)))
    assert [type(message) for message in heard] == [WorkerRefused]


def test_a_life_that_has_ended_asks_for_nothing_more() -> None:
    with target() as victim, member(victim.servers, 1) as ended, member(victim.servers, 1, incarnation=1):
        before, rogue = victim.picture(), Rogue(ended, 1)
        rogue.say(LoadState(1, "w"), save({"values": torch.ones(4)}))
        rogue.say(Declare(2, dense("late")))
        rogue.say(Barrier(3, "here"))
        heard = rogue.hear()
        assert [message.number for message in heard if isinstance(message, RequestFailed)] == [1, 2, 3]
        assert all("worker 1 has ended since it joined" in str(message) for message in heard)
        assert victim.picture() == before


@pytest.mark.parametrize("rank", [-1, 2**16, MOST])
def test_a_rank_that_there_cannot_be_takes_no_part(rank: int, victim: Target) -> None:
    before = victim.picture()
    with client(victim.servers, Hello("worker", rank, 0, 1)) as peer:
        peer.say(Join(Sender(1, rank, 0)))
        assert peer.is_cut_off()
    assert victim.picture() == before


@pytest.mark.parametrize("clock", [-1, 2**63, MOST])
def test_a_leap_of_the_clock_takes_no_other_worker_along(clock: int, victim: Target) -> None:
    assert outcome(victim, lambda rogue: rogue.say(Clock(rogue.sender, clock))) == [Ticked(max(0, clock))]


@pytest.mark.parametrize("consistency", ["bsp", "backup:1"])
def test_a_leap_of_the_clock_stalls_no_table(consistency: str) -> None:
    with target(consistency=consistency) as victim, rogue_in(victim.servers, 1) as rogue:
        for _ in range(3):
            rogue.say(Clock(rogue.sender, 2**63, withdrawn=tuple(("w", 2**40 + i, i) for i in range(9999))))
        assert {type(message) for message in rogue.hear()} == {WorkerRefused}
        began_s = time.process_time()
        assert victim.read() == bytes(16)
        assert time.process_time() - began_s < REFUSED_WITHIN_S


def test_a_leap_before_there_is_a_table_stalls_none_later() -> None:
    with target() as victim, rogue_in(victim.servers, 1) as rogue:
        rogue.say(Clock(rogue.sender, MOST))
        rogue.say(Declare(1, dense("late", consistency="backup:1")))
        rogue.say(Clock(rogue.sender, MOST))
        assert [type(message) for message in rogue.hear()] == [Ticked, RequestDone, Ticked]
        assert victim.read() == bytes(16)


def test_pushes_that_are_never_due_are_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.core.exactly_once.WINDOW", 1024)
    with target(consistency="bsp") as victim, rogue_in(victim.servers, 1) as rogue:
        for seq in range(1100):
            rogue.say(PushFrame(rogue.push(seq, clock=2**60 + seq, settled=seq), 1.0, (), ()), ONES)
        heard = rogue.hear()
        assert [type(message) for message in heard[:1025]] == [Held] * 1024 + [WorkerRefused]
        assert victim.picture()["waiting"] == 1024
        assert victim.read() == bytes(16)


def test_a_push_that_is_repeated_counts_once() -> None:
    with target() as victim, rogue_in(victim.servers, 1) as rogue:
        for _ in range(50):
            rogue.say(rogue.frame(), ONES)
        assert rogue.hear() == [Applied(rogue.push().id)] * 50
        assert victim.read() == bytes_of(torch.ones(4))


def test_a_client_that_waits_for_too_much_is_told(victim: Target) -> None:
    def flood(rogue: Rogue) -> None:
        for number in range(1, 1100):
            rogue.say(Barrier(number, f"place {number}"))
            rogue.say(Describe(number, f"table {number}"))

    heard = outcome(victim, flood)
    assert len(heard) == 2 * (1099 - 1024)
    assert all(isinstance(message, RequestFailed) and "waits for 1024 others" in message.reason for message in heard)


def test_a_push_has_one_name_whatever_table_it_is_for() -> None:
    with target() as victim, rogue_in(victim.servers, 1) as rogue:
        for name in ("one", "other"):
            rogue.say(DeclareRows(1, row_table(name, consistency="bsp")))
        for name in ("one", "other", "one"):
            rogue.say(RowPushFrame(rogue.push(table=name), 1.0, (), ALL_IDS), ROW_BODY)
        rogue.say(Clock(rogue.sender, 1))
        victim.honest.say(Clock(Sender(1, 0, 0), 1))
        victim.honest.hear(Ticked)
        name = rogue.push().id
        assert rogue.hear() == [
            RequestDone(1),
            RequestDone(1),
            Held(name),
            Held(name),
            Held(name),
            Ticked(1),
            Applied(name),
        ]
        assert victim.picture()["rows"] == {"one": 2, "other": 0}


def test_rows_that_are_given_up_twice_are_given_up(victim: Target) -> None:
    def attack(rogue: Rogue) -> None:
        rogue.say(DeclareRows(7, row_table("followed", consistency="essp:1")))
        rogue.say(RowPullFrame(rogue.pull("followed").pull, ALL_IDS), bytes_of(IDS))
        rogue.say(Unsubscribe(rogue.sender, "followed", 2), bytes_of(torch.tensor([1, 1, 2, 1, 9])))

    assert [type(message) for message in outcome(victim, attack)] == [RequestDone, Fetched]


def test_a_rule_that_gives_up_breaks_its_table_and_no_other(victim: Target) -> None:
    boom = RuleSpec("tests.attacks.endings:OnCall", ({"how": 2},))

    def attack(rogue: Rogue) -> None:
        rogue.say(Declare(7, dense("broken", rule=boom)))
        rogue.say(Declare(8, dense("sound")))
        for seq in range(2):
            rogue.say(rogue.frame(seq, "broken"), ONES)
        rogue.say(rogue.frame(2, "sound"), ONES)

    heard = outcome(victim, attack)
    assert [type(message) for message in heard] == [RequestDone, RequestDone, PushRefused, PushRefused, Applied]
    for refused in heard[2:4]:
        assert isinstance(refused, PushRefused)
        assert "table 'broken' takes no more pushes on server 0" in refused.reason
        assert "Boom" in refused.reason
