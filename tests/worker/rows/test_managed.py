"""Pushes that wait for a budget, by an injected clock: what goes when, and what becomes of its futures."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.core.consistency import Deferral, ssp
from paceline.errors import PeerError
from paceline.update.filters.traffic import RowTraffic, WireBytes
from paceline.update.rows.ops import row_ops
from paceline.update.rows.pending import PendingRows, Priority
from paceline.worker.pushes import PushOutcome, pending_future
from paceline.worker.rows.cache import RowCache
from paceline.worker.rows.managed import Managed
from paceline.worker.rows.throttle import BudgetedRows, SendRate, sent_bytes

ROW_BYTES = 8 + 16
APPLIED = PushOutcome(applied=True)


@dataclass
class PushReceiver:
    """Takes what is sent, and answers when told to."""

    room: int = 8
    clock: int = 0
    sent: list[tuple[list[int], Tensor]] = field(default_factory=list)
    answers: list[Future[PushOutcome]] = field(default_factory=list)
    traffic: RowTraffic = field(default_factory=RowTraffic)

    def send(self, ids: Tensor, rows: Tensor) -> Future[PushOutcome]:
        self.sent.append((ids.tolist(), rows))
        self.answers.append(pending_future(PushOutcome))
        self.traffic += RowTraffic(pushed=WireBytes(frames=1, key_bytes=8 * len(ids), value_bytes=16 * len(ids)))
        return self.answers[-1]

    def answer(self, number: int, outcome: PushOutcome = APPLIED) -> None:
        self.answers[number].set_result(outcome)

    @property
    def num_under_way(self) -> int:
        return sum(not answer.done() for answer in self.answers)


def budgeted(receiver: PushReceiver, chosen: Managed | None = None, hold: int = 1, lr: float = -1.0) -> BudgetedRows:
    chosen, ops = chosen or Managed(budget_mbps=1.0), row_ops()
    return BudgetedRows(
        "t",
        chosen,
        Deferral(ssp(2), hold),
        PendingRows(2, torch.float64, ops, chosen.priority, chosen.seed),
        RowCache(ops, 2, torch.float64),
        True,
        lambda rows: -lr * rows,
        ROW_BYTES,
        receiver.send,
        lambda: receiver.num_under_way < receiver.room,
        lambda: receiver.traffic,
        lambda: receiver.clock,
    )


def push(rows: BudgetedRows, ids: list[int], value: float = 1.0) -> Future[PushOutcome]:
    return rows.push(torch.tensor(ids, dtype=torch.int64), torch.full((len(ids), 2), value, dtype=torch.float64))


STEPS = st.lists(
    st.tuples(st.just("push"), st.lists(st.integers(0, 30), unique=True, max_size=20), st.integers(-3, 3))
    | st.tuples(st.just("act"), st.floats(0, 0.1), st.just(0))
    | st.tuples(st.just("answer"), st.integers(0, 7), st.just(0))
    | st.tuples(st.just("demand"), st.integers(0, 9), st.just(0)),
    max_size=40,
)


@settings(max_examples=40)
@given(steps=STEPS, priority=st.sampled_from(["relative_magnitude", "random", "fifo"]))
def test_what_was_sent_and_what_waits_are_what_was_pushed(
    steps: list[tuple[str, object, int]], priority: Priority
) -> None:
    receiver = PushReceiver()
    rows = budgeted(receiver, Managed(budget_mbps=0.2, priority=priority))
    now, pushed = 0.0, torch.zeros(31, dtype=torch.float64)
    futures = list[Future[PushOutcome]]()
    for what, first, value in steps:
        if what == "push":
            assert isinstance(first, list)
            futures.append(push(rows, first, value))
            pushed[first] += value
            receiver.clock += 1
        elif what == "act":
            assert isinstance(first, float)
            now += first
            rows.act(now)
        elif what == "answer":
            open_answers = [answer for answer in receiver.answers if not answer.done()]
            for answer in open_answers[: first if isinstance(first, int) else 0][::-1]:
                answer.set_result(APPLIED)
        else:
            assert isinstance(first, int)
            rows.demand(first)
        sent = torch.zeros(31, dtype=torch.float64)
        for ids, values in receiver.sent:
            sent[ids] += values[:, 0]
        assert torch.equal(sent + rows.pending.read(torch.arange(31))[:, 0], pushed)
    while len(rows.pending) or receiver.num_under_way:
        now += 1.0
        rows.act(now)
        for answer in receiver.answers:
            if not answer.done():
                answer.set_result(APPLIED)
    assert all(future.result(timeout=0).applied for future in futures)


def test_a_row_of_low_priority_goes_before_the_clock_that_bounds_its_wait_is_finished() -> None:
    receiver, now = PushReceiver(room=1000), 0.0
    rows = budgeted(receiver, Managed(budget_mbps=0.2), hold=1)  # 4000 bytes at a time: 159 rows
    push(rows, [99], value=1e-9)
    num_sent = list[int]()
    for receiver.clock in range(2):
        for _ in range(3):
            push(rows, list(range(100, 2100)))
            now += 1.0
            rows.act(now)
        due = rows.deferral.due(receiver.clock)
        if rows.has_due(due):
            rows.demand(due)
            while rows.has_due(due):
                now += 1.0
                rows.act(now)
            rows.relax()
        num_sent.append(sum(99 in ids for ids, _ in receiver.sent))
    assert num_sent == [0, 1]


def test_half_of_a_burst_is_for_rows_that_have_to_go_in_this_clock() -> None:
    receiver = PushReceiver()
    rows = budgeted(receiver, Managed(budget_mbps=1.0, chunk_kb=0.11), hold=1)  # four rows at a time
    push(rows, [1, 2, 3], value=0.1)
    receiver.clock = 1
    push(rows, [5, 6, 7, 8], value=9.0)
    rows.act(0.0)
    assert len(set(receiver.sent[0][0]) & {1, 2, 3}) == 2
    assert len(set(receiver.sent[0][0]) & {5, 6, 7, 8}) == 2
    rows.demand(0)  # what is left of clock 0 is waited for
    rows.act(9.0)
    assert len(set(receiver.sent[1][0]) & {1, 2, 3}) == 1


def test_what_changes_most_goes_first_and_then_counts_anew() -> None:
    receiver = PushReceiver()
    rows = budgeted(receiver, Managed(budget_mbps=1.0, chunk_kb=0.06))  # two rows at a time
    rows.cache.install(
        0, torch.tensor([1, 2, 3]), torch.tensor([[10.0, 10.0], [0.1, 0.1], [0.0, 0.0]]).double(), 0, 0, ()
    )
    push(rows, [1, 2, 3])  # weights 0.2, 20 and 2
    rows.act(0.0)
    push(rows, [4], value=0.01)
    push(rows, [2], value=1e-9)  # its 20 were sent
    rows.act(10.0)
    assert [ids for ids, _ in receiver.sent] == [[2, 3], [1, 4]]
    rows.act(20.0)
    assert receiver.sent[-1][0] == [2]


def test_own_pushes_are_in_rows_here_and_in_rows_that_come() -> None:
    receiver = PushReceiver()
    rows = budgeted(receiver, lr=0.5)
    ids = torch.tensor([1, 2])
    rows.cache.install(0, ids[:1], torch.ones(1, 2).double(), 0, 0, ())
    push(rows, [1, 2], value=4.0)
    assert rows.cache.read(ids[:1])[0].tolist() == [[-1.0, -1.0]]
    rows.cache.install(0, ids, torch.tensor([[7.0, 7.0], [3.0, 3.0]]).double(), 0, 0, ())  # sent before it was pushed
    assert rows.cache.read(ids)[0].tolist() == [[5.0, 5.0], [1.0, 1.0]]


@settings(max_examples=40)
@given(
    bursts=st.lists(
        st.tuples(st.floats(0.05, 1.0), st.sampled_from([0.0, 0.0, 0.0, 0.003, 0.02, 0.4])), min_size=1, max_size=100
    ),
    start=st.integers(0, 99),
)
def test_no_window_of_a_second_or_more_carries_more_than_the_budget_and_two_percent(
    bursts: list[tuple[float, float]], start: int
) -> None:
    pace, now, sent = SendRate(1e6, credit_s=0.01), 5.0, list[tuple[float, int]]()
    for share, late_s in bursts:
        now += pace.wait_s(now) + late_s
        size = int(share * 0.01 * 1e6)
        pace.pay(size, now)
        sent.append((now, size))
    window = sent[start % len(sent) :]
    for count in range(1, len(window) + 1):
        length_s = max(1.0, window[count - 1][0] - window[0][0])
        assert sum(size for _, size in window[:count]) <= 1.02 * 1e6 * length_s + 1


def test_a_thread_that_wakes_late_loses_nothing() -> None:
    pace, now = SendRate(1e6, credit_s=0.01), 0.0
    for _ in range(100):
        pace.pay(10_000, now)
        now += pace.wait_s(now) + 0.004
    assert now == pytest.approx(1.0, abs=0.02)


def test_sends_keep_to_the_budget_and_say_when_to_go_on() -> None:
    receiver = PushReceiver(room=1000)
    rows = budgeted(receiver, Managed(budget_mbps=8.0))  # 1 MB a second
    push(rows, list(range(20_000)))
    now, end = 0.0, 0.0
    while (pause_s := rows.act(now)) is not None:
        assert 0 < pause_s < 0.02
        end = now = now + pause_s
    assert sent_bytes(receiver.traffic) / 1e6 == pytest.approx(end, abs=0.03)
    assert max(len(ids) for ids, _ in receiver.sent) * ROW_BYTES <= rows.settings.burst_bytes == 10_000


def test_reads_are_paid_for_before_more_is_sent() -> None:
    receiver = PushReceiver()
    rows = budgeted(receiver, Managed(budget_mbps=8.0))
    receiver.traffic += RowTraffic(pulled=WireBytes(frames=1, key_bytes=500_000))
    push(rows, [1])
    pause_s = rows.act(0.0)
    assert not receiver.sent
    assert pause_s == pytest.approx(0.51, abs=0.02)
    assert rows.act(pause_s) is None
    assert len(receiver.sent) == 1


def test_no_more_is_sent_while_too_much_is_under_way() -> None:
    receiver = PushReceiver(room=1)
    rows = budgeted(receiver, Managed(budget_mbps=1.0, chunk_kb=0.03))
    push(rows, [1, 2])
    assert rows.act(0.0) is None
    assert rows.act(9.0) is None
    assert len(receiver.sent) == 1
    receiver.answer(0)
    rows.act(9.0)
    assert len(receiver.sent) == 2


def test_a_push_is_answered_when_all_of_it_is() -> None:
    receiver = PushReceiver()
    rows = budgeted(receiver, Managed(budget_mbps=1.0, priority="fifo", chunk_kb=0.06))
    first, second = push(rows, [1, 2, 3]), push(rows, [3, 4])
    rows.act(0.0)
    rows.act(1.0)
    receiver.answer(1)
    assert not first.done()
    receiver.answer(0)
    assert first.result(timeout=0).applied
    assert second.result(timeout=0).applied  # its rows were in the same two
    assert push(rows, []).result(timeout=0).applied


def test_a_push_is_refused_if_something_that_may_be_of_it_was() -> None:
    receiver = PushReceiver()
    rows = budgeted(receiver)
    first = push(rows, [1])
    rows.act(0.0)
    second = push(rows, [1])
    rows.act(1.0)
    receiver.answer(1, PushOutcome(applied=False, reason="full"))
    receiver.answer(0)
    third = push(rows, [1])
    rows.act(2.0)
    receiver.answer(2)
    assert second.result(timeout=0).reason == "full"
    assert third.result(timeout=0).applied
    assert first.result(timeout=0).applied


def test_a_wait_for_a_push_ends_when_all_is_over() -> None:
    receiver = PushReceiver()
    rows = budgeted(receiver)
    sent = push(rows, [1])
    rows.act(0.0)
    waiting = push(rows, [1])
    receiver.answers[0].set_exception(PeerError("gone"))
    rows.abandon(PeerError("gone"))
    for future in (sent, waiting):
        with pytest.raises(PeerError, match="gone"):
            future.result(timeout=0)
