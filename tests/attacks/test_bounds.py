"""One request, one bounded cost: what is larger is refused with the reason, before memory or time goes into it."""

from __future__ import annotations

import re
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.attacks.rogue import MOST, Rogue, bytes_of, rogue_in, row_table
from tests.attacks.target import Target, target
from tests.jobs import run_job
from tests.wire.test_send_queue import LARGE, PATIENCE_S, Gate

from paceline.api.session import Session
from paceline.core.messages import PullRefused, PushRefused
from paceline.errors import PeerError, Refused, UsageError
from paceline.serve.gateway import Gateway
from paceline.serve.messages import EnterRefused, EnterRequest
from paceline.server import work_queue as work_host
from paceline.transport.base import NO_IDENTITY
from paceline.update import functions
from paceline.update import named_rules as update
from paceline.update.rows import export
from paceline.update.rows.spec import First
from paceline.update.rules import Quorum, RuleSpec
from paceline.update.table import Segment, TableSpec
from paceline.wire import requests
from paceline.wire import send_queue as post
from paceline.wire.messages import Keys, PushFrame, Unsubscribe
from paceline.wire.requests import (
    Barrier,
    CallFunction,
    ClaimWork,
    Declare,
    DeclareRows,
    Describe,
    RequestDone,
    RequestFailed,
    TableCall,
)
from paceline.wire.send_queue import SendQueue

PATIENT_S = 1.0
Attack = Callable[[Rogue], None]


@pytest.fixture(scope="module")
def victim() -> Iterator[Target]:
    """A server with a table "w" of four numbers, and "wide" rows of 8 MiB each."""
    with target() as started:
        wide = row_table("wide", update.Add(), width=1 << 20, dtype="float64", first=First("normal", 1.0))
        started.honest.say(DeclareRows(3, wide))
        started.honest.hear(RequestDone)
        started.honest.say(DeclareRows(4, row_table("followed", consistency="essp:1")))
        started.honest.hear(RequestDone)
        yield started


def declare(**more: Any) -> Attack:
    given = {"segments": (Segment("a", (4,)),), "dtype": "float32", "rule": update.Add(), "consistency": "bsp"}
    spec = TableSpec(**({"name": "z", "scale": "sum", "nonfinite": "reject"} | given | more))
    return lambda rogue: rogue.say(Declare(9, spec))


def waits_for(num_pushes: int, num_workers: int, grace_s: float = 0.0) -> Attack:
    return declare(consistency="asynchronous", rule=RuleSpec("add", ({},), Quorum(num_pushes, grace_s, num_workers)))


def take(*sizes: int, work: str = "work", terms: tuple[int, ...] = ()) -> Attack:
    return lambda rogue: rogue.say(ClaimWork(9, work, 0, 0, sizes, terms))


def call(name: str, **numbers: int) -> Attack:
    return lambda rogue: rogue.say(CallFunction(TableCall(9, "w", 0, 0), name, dict(numbers)))


TOO_MUCH: dict[str, tuple[Attack, str]] = {
    "100,000 dimensions": (declare(segments=(Segment("a", (2,) * 100_000),)), "100000 dimensions, expected at most 64"),
    "large dimensions": (declare(segments=(Segment("a", (MOST,) * 80_000),)), "80000 dimensions, expected at most 64"),
    "parameters": (declare(segments=tuple(Segment(f"{i}", ()) for i in range(20_000))), "20000 parameters, .* 16384"),
    "a long consistency": (declare(consistency="ssp:" + "1" * 200), "204 characters, expected at most 100"),
    "a quorum of more than all": (waits_for(3, 2), "3 pushes of 2 workers"),
    "a quorum without end": (waits_for(2**62, 2**63), "pushes of 9223372036854775808 workers"),
    "a window without end": (waits_for(1, 2, float("inf")), "waits inf s"),
    "a long place": (lambda rogue: rogue.say(Barrier(9, "x" * 501)), "501 characters, expected at most 500"),
    "a long name": (lambda rogue: rogue.say(Describe(9, "x" * 501)), "501 characters, expected at most 500"),
    "work of a long name": (take(1, work="x" * 501), "501 characters, expected at most 500"),
    "work of many terms": (take(1, terms=(1,) * 65), "65 terms, expected at most"),
    "work of many shares": (take(*(0,) * 70_000), "70000 shares"),
}


@pytest.mark.parametrize(("attack", "reason"), TOO_MUCH.values(), ids=TOO_MUCH)
def test_a_request_for_too_much_is_refused_at_once(attack: Attack, reason: str, victim: Target) -> None:
    with rogue_in(victim.servers, 1) as rogue:
        began_s = time.process_time()
        attack(rogue)
        [failed] = rogue.hear()
        assert time.process_time() - began_s < PATIENT_S
    assert isinstance(failed, RequestFailed)
    assert re.search(reason, failed.reason), failed.reason
    assert len(failed.reason) < 5000


@pytest.mark.parametrize("num_ids", [3, 8000])
def test_a_pull_of_more_than_one_answer_may_have_is_refused(num_ids: int, victim: Target) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with rogue_in(victim.servers, 1) as rogue:
        rogue.say(rogue.row_pull(Keys(num_ids, b"", sent=True), "wide"), bytes_of(torch.arange(num_ids)))
        [refused] = rogue.hear()
    assert isinstance(refused, PullRefused)
    assert f"asks for {num_ids} rows of table 'wide' at once, 8388608 bytes each: expected at most 2" in refused.reason
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + (64 << 10)  # of KiB
    assert victim.read() == bytes(16)


def test_pulls_that_wait_are_bounded_together(victim: Target) -> None:
    with rogue_in(victim.servers, 1) as rogue:
        rogue.say(DeclareRows(1, row_table("late", width=1 << 20, dtype="float64", consistency="bsp")))
        for request in range(65):
            pull = rogue.row_pull(Keys(2, b"", sent=True), "late", needs=2**60, request=request)
            rogue.say(pull, bytes_of(torch.arange(2)))
            rogue.say(pull, bytes_of(torch.arange(2)))  # said again, it is the same one
        declared, *refused = rogue.hear()
    assert declared == RequestDone(1)
    assert [type(message) for message in refused] == [PullRefused] * 2
    assert "waits for 128 rows" in cast("PullRefused", refused[0]).reason


@pytest.mark.parametrize("kind", ["pull", "unsubscribe"])
def test_lists_of_more_ids_than_a_worker_sends_end_the_connection(kind: str, victim: Target) -> None:
    ids = bytes(8 * (requests.MAX_IDS + 1))
    with rogue_in(victim.servers, 1) as rogue:
        asked = rogue.row_pull(Keys(requests.MAX_IDS + 1, b"", sent=True), "followed")
        with suppress(PeerError):  # it is cut off in the middle of it
            rogue.say(asked if kind == "pull" else Unsubscribe(rogue.sender, "followed", 1), ids)
        assert rogue.hear() == ["cut"]


def test_epochs_and_rounds_that_are_not_finished_are_bounded(victim: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_host, "MAX_OPEN_ROUNDS", 10)
    with rogue_in(victim.servers, 1) as rogue:
        for number in range(work_host.MAX_EPOCHS + 2):
            rogue.say(ClaimWork(number + 1, "epochs", 10**6 - number, 0, (1,), ()))
        *_, before, last = rogue.hear()
        assert isinstance(before, RequestFailed)
        assert isinstance(last, RequestFailed)
        assert f"{work_host.MAX_EPOCHS} epochs of epochs are begun" in last.reason
    with rogue_in(victim.servers, 2) as rogue:
        for number in range(2 * work_host.MAX_OPEN_ROUNDS):
            rogue.say(ClaimWork(number + 1, "rounds", 0, number, (2, 2), ()))
        assert "and 10 rounds of rounds" in cast("RequestFailed", rogue.hear()[-1]).reason


def test_a_refusal_quotes_little_of_what_was_said(victim: Target) -> None:
    with rogue_in(victim.servers, 1) as rogue:
        rogue.say(rogue.frame(0, hyper=({"x" * 900_000: 1.0},)), bytes(16))
        rogue.say(PushFrame(rogue.push(1), 1.0, (0,) * 300_000, ()), bytes(16))
        for refused in rogue.hear():
            assert isinstance(refused, PushRefused)
            assert len(refused.reason) < 500


def test_a_refusal_at_the_gateway_is_short() -> None:
    class Full:
        def admit(self, *_: object) -> None:
            raise Refused("x" * 2_000_000)

    answer = Gateway(cast("Any", None), cast("Any", Full()))._place("ns", EnterRequest(None, None, "1"), NO_IDENTITY)
    assert isinstance(answer, EnterRefused)
    assert len(answer.reason) < 5000


# -- what a worker of ours sends stays within the bounds --------------------------------------------------------------


def test_a_large_pull_and_a_file_travel_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "MAX_READ_NUMBERS", 5 * 2)  # five rows
    monkeypatch.setattr(export, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(export, "_LEAST_ROWS", 7)
    monkeypatch.setattr("paceline.worker.rows.table.MAX_PUSH_BYTES", 200 * 16)
    ids, rows = torch.randperm(200), torch.randn(200, 2)

    def work(ps: Session) -> None:
        users = ps.table("users", rows=2, update=update.Add(), consistency="bsp")
        users.push(ids, rows)
        ps.clock()
        assert torch.equal(users.pull(ids), rows)
        assert torch.equal(users.pull(ids.view(10, 20)), rows.view(10, 20, 2))
        assert torch.equal(users.pull_later(ids[:33]).result(), rows[:33])
        assert torch.equal(users.pull(range(400)), torch.zeros(400, 2).index_copy(0, ids, rows))  # in turns
        with pytest.raises(UsageError, match="400 rows are asked for at once, expected at most 320"):
            users.pull_later(range(400))
        with pytest.raises(UsageError, match="a push has 201 rows, expected at most 200"):
            users.push(range(201), torch.zeros(201, 2))
        users.export(tmp_path / "users.safetensors")
        users.call("scale", factor=0.0)
        users.load(tmp_path / "users.safetensors")
        assert torch.equal(users.pull(ids), rows)

    run_job(tmp_path, work, servers=2, workers=1)


def test_what_a_function_returns_is_bounded_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MAX_RESULT_BYTES", 24 * 10)
    monkeypatch.setattr(functions, "_ELEMENTS", 7)
    values = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    top = functions.function_at("top", "range", None)
    found = cast("dict[str, torch.Tensor]", top(values, 5, k=10))
    assert torch.equal(found["ids"], values.abs().argsort(descending=True)[:10] + 5)
    with pytest.raises(UsageError, match="k is 11, expected at most 10"):
        top(values, 0, k=11)
    assert len(cast("dict[str, torch.Tensor]", top(values[:9], 0, k=2**62))["ids"]) == 9


# -- a client that is slow to read what it asked for ------------------------------------------------------------------


def test_a_peer_that_takes_nothing_in_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "_MOST_WAITING_BYTES", 2 * LARGE)
    gate, broken = Gate(), threading.Event()
    gate.num_expected = 3
    line = SendQueue(cast("Any", gate), on_broken=broken.set, bounded=True, copies=True)
    body = memoryview(bytes(LARGE))
    for number in range(5):
        line.send(f"read {number}".encode(), body)  # did it wait for room, this would never end
    line.send(b"small")
    assert gate.begun.wait(PATIENCE_S)
    gate.open.set()
    assert gate.all_taken.wait(PATIENCE_S)
    line.close()
    assert [header for header, _ in gate.taken] == [b"read 0", b"read 1", b"small"]
    assert not broken.is_set()


@pytest.mark.parametrize("owed", ["", "w"])
def test_a_peer_that_is_owed_more_than_it_can_be_is_given_up(owed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(post, "_MOST_FRAMES", 100)
    gate, broken = Gate(), threading.Event()
    line = SendQueue(cast("Any", gate), on_broken=broken.set, bounded=True, copies=True)
    line.send(b"first", memoryview(bytes(LARGE)), owed=owed)
    for number in range(2 if owed else 100):
        assert not broken.is_set()
        line.send(f"{number}".encode(), memoryview(bytes(LARGE if owed else 0)), owed=owed)
    assert broken.is_set()
    line.close()
