"""The gate: no sample is used beyond the bound, none counts twice, and none is lost."""

from __future__ import annotations

import copy
import math
import threading
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import paceline
from paceline.errors import DeadlineExceeded, UsageError
from paceline.versions.gate import Ticket

PATIENCE_S = 60.0


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["admit", "consume", "again", "cancel", "advance"]), st.integers(0, 99))),
)
def test_whatever_is_done_the_bound_holds_and_each_ticket_counts_once(
    bound: int, per_version: int, steps: list[tuple[str, int]]
) -> None:
    gate = paceline.gate(bound, per_version)
    waiting, over = list[Ticket](), list[Ticket]()
    for what, number in steps:
        if what == "admit":
            try:
                waiting += gate.admit(1 + number % 3, timeout_s=0.0)
            except (DeadlineExceeded, UsageError):
                done = gate.num_admitted - gate.num_cancelled - gate.version * per_version
                assert done + 1 + number % 3 > (bound + 1) * per_version
        elif what in ("consume", "cancel") and waiting:
            ticket = waiting.pop(number % len(waiting))
            over.append(ticket)
            if what == "cancel":
                gate.cancel(ticket)
            else:
                assert gate.consume(ticket) == gate.version - ticket.version <= bound
        elif what == "again" and over:
            with pytest.raises(UsageError, match="Use each ticket once"):
                gate.consume(over[number % len(over)])
        elif what == "advance":
            may = all(gate.version + 1 - ticket.version <= bound for ticket in waiting)
            assert gate.can_advance == may
            if may:
                gate.advance()
            else:
                with pytest.raises(UsageError, match="wait for its sample and consume it"):
                    gate.advance()
        assert gate.num_admitted - gate.num_cancelled <= (gate.version + bound + 1) * per_version
        assert gate.num_admitted == len(waiting) + gate.num_consumed + gate.num_cancelled
        assert sum(gate.histogram().values()) == gate.num_consumed
        assert max(gate.histogram(), default=0) <= bound


@pytest.mark.parametrize("bound", [0, 2, None])
def test_producers_in_threads_are_held_to_the_bound(bound: int | None) -> None:
    gate, samples, num_versions = paceline.gate(bound, 4), SimpleQueue[Ticket](), 200
    over = threading.Event()

    def produce() -> None:
        while not over.is_set():
            try:
                for ticket in gate.admit(1, timeout_s=PATIENCE_S):
                    samples.put(ticket)
            except DeadlineExceeded:
                return
            if bound is None and samples.qsize() > 100:
                over.wait(0.001)

    producers = [threading.Thread(target=produce) for _ in range(3)]
    for producer in producers:
        producer.start()
    for _ in range(num_versions):
        num = 0
        while num < 4 or not gate.can_advance:
            gate.consume(samples.get(timeout=PATIENCE_S))
            num += 1
        gate.advance()
    over.set()
    for producer in producers:
        while producer.is_alive():
            while not samples.empty():
                gate.consume(samples.get())
            producer.join(0.01)
    assert gate.num_consumed >= 4 * num_versions
    if bound is not None:
        assert max(gate.histogram()) <= bound


@pytest.mark.parametrize(("bound", "per_version"), [(math.nan, 1), (1.5, 1), (1, 1.5), (None, math.nan), ("1", 1)])
def test_a_gate_is_of_whole_numbers(bound: int, per_version: int) -> None:
    with pytest.raises(UsageError, match="expected a whole number"):
        paceline.gate(bound, per_version)


def test_wrong_calls_of_a_gate_are_told_and_change_nothing() -> None:
    gate = paceline.gate(0, 2)
    for num in (math.nan, 1.5, "1", None):
        with pytest.raises(UsageError, match=r"admit: num is .*, expected a whole number"):
            gate.admit(num)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="timeout_s is nan, expected a number of seconds"):
        gate.admit(timeout_s=math.nan)
    tickets = gate.admit(2, timeout_s=math.inf)
    for wrong in (tickets, None, 0):
        for act in (gate.consume, gate.cancel):
            with pytest.raises(UsageError, match="is not a ticket, expected one of the list that admit"):
                act(wrong)  # pyright: ignore[reportArgumentType]
    assert [gate.consume(ticket) for ticket in tickets] == [0, 0]


def test_a_ticket_of_another_gate_is_refused_and_one_that_was_in_another_process_is_not() -> None:
    one, other = paceline.gate(0, 1), paceline.gate(0, 1)
    mine, theirs = one.admit()[0], other.admit()[0]
    for act in (one.consume, one.cancel):
        with pytest.raises(UsageError, match="ticket 0 of version 0 is of another gate"):
            act(theirs)
    assert (one.num_consumed, one.num_cancelled) == (0, 0)
    assert one.consume(copy.deepcopy(mine)) == 0
    assert other.consume(theirs) == 0


def test_numbers_that_make_no_gate_are_refused() -> None:
    for bound, per_version in ((-1, 1), (0, 0)):
        with pytest.raises(UsageError):
            paceline.gate(bound, per_version)
    with pytest.raises(UsageError, match="take fewer at a time"):
        paceline.gate(0, 2).admit(3)
    gate = paceline.gate(0, 1)
    gate.admit()
    with pytest.raises(
        DeadlineExceeded,
        match="waited 0 s at the gate for 1 tickets: 1 are open at version 0",
    ):
        gate.admit(timeout_s=0.0)
