"""Code that a worker names by its import path: only what is there to be named, and it ends nothing but itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import count

import pytest
from tests.attacks.rogue import Rogue, bytes_of, dense, rogue_in, row_table
from tests.attacks.target import Target, target
from tests.attacks.test_rogue_workers import ALL_IDS, ROW_BODY
from tests.nodes.client import ONES
from torch import zeros

from paceline.core.messages import PushRefused
from paceline.errors import UsageError
from paceline.update.rules import RuleSpec
from paceline.update.user_code import member_at
from paceline.wire.messages import RowPushFrame
from paceline.wire.requests import (
    CallFunction,
    Declare,
    DeclareRows,
    Initialise,
    RequestDone,
    RequestFailed,
    SaveState,
    TableCall,
)

HERE = "tests.attacks.endings"
NUMBERS = count()  # of requests: one that comes twice is a copy


@pytest.fixture(scope="module")
def victim() -> Iterator[Target]:
    with target() as started:
        yield started


def fails(victim: Target, request: object, reason: str) -> None:
    with rogue_in(victim.servers, 1) as rogue:
        rogue.say(request)
        [failed] = rogue.hear()
    assert isinstance(failed, RequestFailed)
    assert re.search(reason, failed.reason), failed.reason
    assert victim.read() == bytes(16)


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("os:abort", "Python's own library"),
        ("test.support:run_in_subinterp", "Python's own library"),
        ("test:Rule", "Python's own library"),
        ("winreg:OpenKey", "Python's own library"),  # be it of another system
        ("idlelib.run:main", "Python's own library"),
        ("_testcapi:crash_no_current_thread", "Python's own library|private"),
        ("_ctypes_test:f", "Python's own library|private"),
        ("__main__:Rule", "the script itself"),
        ("tests._hidden:Rule", "private module"),
        ("numpy._core:Rule", "private module"),
        ("paceline.launch.signals:Signals", "part of Paceline"),
        ("paceline:connect", "part of Paceline"),
    ],
)
def test_modules_that_are_not_there_to_be_named(path: str, reason: str, victim: Target) -> None:
    with pytest.raises(UsageError, match=reason):
        member_at(path, None)
    fails(victim, Declare(1, dense("named", rule=RuleSpec(path, ({},)))), reason)
    fails(victim, CallFunction(TableCall(next(NUMBERS), "w", 0, 0), path, {}), reason)


@pytest.mark.parametrize("rule", ["tests.attacks.ends_on_import:Rule", f"{HERE}:OnMaking", f"{HERE}:OnLooking"])
def test_code_that_ends_as_it_is_loaded_is_refused(rule: str, victim: Target) -> None:
    reason = r"ended with (SystemExit\(3\)|KeyboardInterrupt\(\)), which servers do not do"
    fails(victim, Declare(1, dense("ending", rule=RuleSpec(rule, ({},)))), reason)
    if "ends_on_import" in rule:
        fails(victim, DeclareRows(2, row_table("ending rows", RuleSpec(rule, ({},)))), reason)


def test_a_function_that_ends_is_refused(victim: Target) -> None:
    fails(
        victim, CallFunction(TableCall(next(NUMBERS), "w", 0, 0), f"{HERE}:function", {}), "failed: KeyboardInterrupt"
    )


@pytest.mark.parametrize("how", [0, 1, 2])
def test_a_rule_that_ends_breaks_its_table_and_no_other(how: int, victim: Target) -> None:
    name, rows = f"dense {how}", f"rows {how}"

    def push_rows(rogue: Rogue, seq: int) -> None:
        rogue.say(RowPushFrame(rogue.push(seq, rows), 1.0, (), ALL_IDS), ROW_BODY)

    with rogue_in(victim.servers, 2 + how) as rogue:
        rogue.say(Declare(1, dense(name, rule=RuleSpec(f"{HERE}:OnCall", ({"how": how},)))))
        rogue.say(Initialise(2, name), bytes_of(zeros(4)))
        rogue.say(DeclareRows(3, row_table(rows, RuleSpec(f"{HERE}:OnRows", ({"how": how},)))))
        for seq in (0, 2):
            rogue.say(rogue.frame(seq, name), ONES)
            push_rows(rogue, seq + 1)
        rogue.say(SaveState(4, name))
        heard = rogue.hear()
    assert [RequestDone(1), RequestDone(2), RequestDone(3)] == heard[:3]
    *refusals, unsaved = heard[3:]
    assert len(refusals) == 4
    for refusal in refusals:
        assert isinstance(refusal, PushRefused)
        assert re.search("takes no more pushes on server 0 .*(ended with|Boom)", refusal.reason), refusal.reason
    assert isinstance(unsaved, RequestFailed)
    assert "takes no more pushes" in unsaved.reason
    assert victim.read() == bytes(16)
