"""Clients of one namespace keep those of others waiting by no number, and by nothing that they wait for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from tests.leaks import nothing_left_behind

from paceline.serve.answer_lines import MOST_AT_ONCE, MOST_DEFERRED, AnswerLines

PATIENCE_S = 60.0


@pytest.fixture
def lines() -> Iterator[AnswerLines]:
    with nothing_left_behind(), AnswerLines(2) as made:
        yield made


def test_a_namespace_that_answers_none_keeps_no_other_waiting(lines: AnswerLines) -> None:
    stuck, is_over, given = threading.Semaphore(0), threading.Event(), threading.Event()

    def wait() -> None:
        stuck.release()
        is_over.wait(PATIENCE_S)

    try:
        for _ in range(10 * MOST_AT_ONCE):
            lines.add("slow", wait)
        for _ in range(MOST_AT_ONCE):
            assert stuck.acquire(timeout=PATIENCE_S)
        lines.add("other", given.set)
        assert given.wait(PATIENCE_S)
        assert not stuck.acquire(blocking=False)
    finally:
        is_over.set()


def test_all_answers_are_given_and_a_fault_ends_none_but_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    given: list[int] = []
    begin = threading.Event()

    def wait() -> None:
        begin.wait(PATIENCE_S)

    def fail() -> None:
        begin.wait(PATIENCE_S)
        raise RuntimeError("a fault of ours")

    with AnswerLines(1) as made:
        for _ in range(MOST_AT_ONCE - 1):
            made.add("a", wait)
        made.add("a", fail)
        for number in range(100):
            made.add("a", lambda number=number: given.append(number))
        begin.set()
    assert sorted(given) == [*range(100)]
    assert "RuntimeError: a fault of ours" in capsys.readouterr().err


def test_what_is_deferred_takes_no_thread_and_is_bounded() -> None:
    given = list[str]()
    with AnswerLines(1) as made:
        assert all(made.defer("a", lambda: given.append("first")) for _ in range(MOST_DEFERRED))
        assert not made.defer("b", lambda: given.append("too many"))
        assert given == []
        made.resume()
        assert made.defer("b", lambda: given.append("at the end"))
    assert given == ["first"] * MOST_DEFERRED + ["at the end"]
    assert not made.defer("a", lambda: given.append("too late"))
