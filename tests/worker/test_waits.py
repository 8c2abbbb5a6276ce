"""What a worker makes of its waits: which are unusual, which are too long, and what is told."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from paceline.errors import PeerError, UsageError
from paceline.wire.requests import ReportWait
from paceline.worker.waits import PERIOD_S, About, Waits, tell_each


@dataclass
class Bench:
    """Waits on virtual time, and a server that answers as it is told."""

    now: float = 0.0
    busy: float = 0.0
    said: str = "1worker 0 waits for worker 1"
    asked: list[ReportWait] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    waits: Waits = field(init=False)

    def __post_init__(self) -> None:
        self.waits = Waits(0, 60.0, self.ask, lambda: self.now, lambda: self.busy)
        self.waits.note_clock()

    def ask(self, make: Callable[[int], ReportWait]) -> Future[memoryview]:
        self.asked.append(make(1))
        answer: Future[memoryview] = Future()
        if self.said:
            answer.set_result(memoryview((self.said if self.asked[-1].waited_s else f"0{self.said[1:]}").encode()))
        return answer

    def run(self, seconds: float, *, busy: bool = False) -> list[str]:
        told: list[str] = []
        for _ in range(round(seconds / PERIOD_S)):
            self.now += PERIOD_S
            self.busy += PERIOD_S * busy
            told += self.waits.report_due()
        self.lines += told
        return told


def test_a_long_wait_is_reported_after_5_seconds_and_then_ever_more_rarely() -> None:
    bench = Bench()
    with bench.waits.during("the others", About(table="w", needs=3)):
        assert bench.run(4.5) == []
        assert bench.run(1.5) == ["waiting for 6 s: worker 0 waits for worker 1"]
        assert len(bench.run(74.0)) == 3  # at 10, 20, 40 s
    assert (bench.asked[0].what, bench.asked[0].table, bench.asked[0].needs) == ("the others", "w", 3)
    assert bench.asked[-1].what == "", "server 0 is told when it is over"


def test_server_0_knows_of_a_wait_before_it_may_tell_of_it() -> None:
    bench = Bench()
    with bench.waits.during("the others") as wait:
        assert bench.run(4.0) == []
        assert [(report.waited_s, report.what) for report in bench.asked] == [(0.0, "the others")]
        assert wait.known == "worker 0 waits for worker 1"
        bench.run(1.5)
        assert [report.waited_s for report in bench.asked] == [0.0, 5.0]


def test_a_collective_call_is_known_while_it_lasts() -> None:
    waits = Bench().waits
    with waits.during("values"):
        assert waits.meeting() == ""
        with waits.during("model, call 3", About("model all_reduce", workers=(1,))):
            assert waits.meeting() == "model all_reduce"
        assert waits.meeting() == ""


def test_before_the_first_clock_more_patience_is_usual() -> None:
    bench = Bench()
    bench.waits = Waits(0, 60.0, bench.ask, lambda: bench.now, lambda: 0.0)
    with bench.waits.during("the first values"):
        assert bench.run(9.5) == []
        assert len(bench.run(2.0)) == 1


def test_waits_that_regularly_take_long_are_not_told() -> None:
    bench = Bench()
    for _ in range(3):
        with bench.waits.during("values at a clock", About("pull w")):
            bench.run(8.0)
        bench.run(60.0)
    assert len(bench.lines) == 1, "only the first surprises"
    with bench.waits.during("values at a clock", About("pull w")):
        assert len(bench.run(25.0)) == 1, "three times as long as usual is unusual again"


def test_only_the_worker_that_server_0_names_prints() -> None:
    bench = Bench(said="0worker 0 waits for worker 1")
    with bench.waits.during("the others") as wait:
        assert bench.run(30.0) == []
        assert wait.known == "worker 0 waits for worker 1", "what the error says if it comes to that"


def test_a_server_that_does_not_answer_is_named() -> None:
    bench = Bench(said="")
    with bench.waits.during("the others"):
        assert bench.run(8.0) == ["waiting for 8 s: worker 0 waits for the others; server 0 does not answer"]


def test_what_server_0_says_cannot_command_a_terminal() -> None:
    bench = Bench(said="1worker 0\x1b[2J\nwaits")
    with bench.waits.during("the others"):
        assert bench.run(6.0) == ["waiting for 6 s: worker 0?[2J?waits"]


def test_an_hour_in_which_everything_is_stopped_does_not_count() -> None:
    bench, given_up = Bench(), list[float]()
    with bench.waits.during("the others", limit_s=60.0, give_up=lambda: given_up.append(bench.now)) as wait:
        bench.run(2.0)
        bench.now += 3600.0
        bench.run(2.0)
        assert wait.waited_s < 7.0
        assert not given_up
        bench.run(60.0)
        assert len(given_up) == 1
    assert bench.waits.ran_s == pytest.approx(66.0, abs=2.0)


def test_the_deadline_follows_the_longest_clock() -> None:
    bench = Bench()
    assert bench.waits.limit_s == 60.0
    bench.run(300.0)
    bench.waits.note_clock()
    assert bench.waits.limit_s == 900.0
    bench.run(1.0)
    bench.waits.note_clock()
    assert bench.waits.limit_s == 900.0


def test_a_wait_that_computes_meanwhile_counts_the_time_in_which_it_does_not() -> None:
    bench = Bench()
    with bench.waits.during("forward_backward", About(computes=True)) as wait:
        bench.run(40.0, busy=True)
        assert wait.waited_s == pytest.approx(4.0)
        bench.run(4.0)
        assert wait.waited_s == pytest.approx(8.0)


def test_a_worker_that_cannot_go_on_reports_nothing() -> None:
    bench = Bench()

    def refuse(make: Callable[[int], ReportWait]) -> Future[memoryview]:
        raise PeerError("it has failed")

    bench.waits.send_report = refuse
    with bench.waits.during("the others"):
        assert bench.run(30.0) == []


def test_what_is_no_time_is_refused() -> None:
    waits = Bench().waits
    for timeout_s in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UsageError, match=r"timeout_s is .* expected more than 0 seconds"):
            waits.set_timeout(timeout_s)
    waits.set_timeout(None)
    assert waits.limit_s == 60.0
    waits.set_timeout(2.0)
    assert waits.limit_s == 2.0


def test_lines_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    tell_each(["waiting"])
    assert capsys.readouterr().err == "paceline: waiting\n"
