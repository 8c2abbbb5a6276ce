"""What server 0 says of the waits in a job, and which worker it has say it."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from paceline.core.consistency import Consistency
from paceline.core.events import Declared, Disconnected
from paceline.core.messages import Clock, Join, Leave, Pull, Sender
from paceline.core.server import ServerCore, ServerEvent
from paceline.core.settings import ServerSettings
from paceline.server.requests import WaitReports
from paceline.wire.requests import NAMED, ReportWait

STUCK = ". None of these can go on"
ADVICE = (
    ": have all workers make the same calls in the same order, and finish as many clocks before each barrier(), or let "
    "those that are done end"
)


@dataclass
class Job:
    """The lead of a job of three workers, with one table."""

    consistency: str = "bsp"
    joined: int = 3
    at_barriers: dict[str, list[int]] = field(default_factory=dict)
    dealt: list[tuple[int, str, list[int]]] = field(default_factory=list)
    names: dict[str, list[int]] = field(default_factory=dict)
    core: ServerCore = field(init=False)
    reports: WaitReports = field(init=False)
    now: float = 0.0

    def __post_init__(self) -> None:
        self.core = ServerCore(ServerSettings(0, 1, workers=(0, 1, 2)), 0.0)
        self.handle(*(Join(Sender(1, rank, 0)) for rank in range(self.joined)))
        self.handle(Declared("model", Consistency.parse(self.consistency)))
        request_handler: Any = SimpleNamespace(
            at_barriers=lambda: self.at_barriers,
            waiting_for_names=lambda: self.names,
            work_host=SimpleNamespace(waiting=lambda: self.dealt),
        )
        self.reports = WaitReports(self.core, request_handler)

    def handle(self, *events: ServerEvent) -> None:
        for event in events:
            self.core.handle(event, 0.0)

    def tick(self, worker: int, clock: int) -> None:
        self.handle(Clock(Sender(1, worker, 0), clock))

    def pull(self, worker: int, clock: int, needs: int) -> None:
        self.handle(Pull(Sender(1, worker, 0), 1, "model", clock, needs))

    def report(self, worker: int, waited_s: float, what: str, **known: Any) -> str:
        self.now += 0.1
        return self.reports.add((worker, 0), ReportWait(1, waited_s, what, **known), self.now).decode()


def test_a_barrier_against_a_loop_that_goes_on_is_named_as_what_it_is() -> None:
    job = Job(at_barriers={"barrier": [1, 2]})
    for worker, clock in enumerate((5, 4, 9)):
        job.tick(worker, clock)
    job.pull(0, 5, 5)
    seen = "worker 0 waits for clock 4 of worker 1 (table 'model', bsp); "
    seen += "workers 1, 2 are in barrier(), waiting for worker 0"
    assert job.report(1, 5.0, "the others to come to the barrier") == f"3{seen}{STUCK}{ADVICE}"
    assert job.report(0, 5.2, "values", table="model", needs=5) == f"2{seen}{STUCK}", "what to do is told once"
    assert job.report(1, 10.0, "the others to come to the barrier") == f"3{seen}{STUCK}", "again after twice the time"


def test_a_name_that_is_not_there_names_those_that_may_push_to_it() -> None:
    job = Job(names={"counts": [0]})
    job.handle(Declared(f"{NAMED}count", Consistency.parse("asynchronous")))
    assert job.report(0, 10.0, "the first push to 'counts'") == (
        "1worker 0 waits for the first push to 'counts' by workers 1, 2 (names that exist: 'count'); workers 1, 2 are "
        "at clock 0, in no call that waits: computing, or stopped"
    )
    job.tick(1, 1)
    job.pull(1, 1, 1)
    assert STUCK not in job.report(0, 11.0, "the first push to 'counts'"), "worker 2 may push"
    job.tick(2, 1)
    job.pull(2, 1, 1)
    assert STUCK in job.report(0, 12.0, "the first push to 'counts'")
    job.names = {"\x1b{}" * 99: [0]}
    assert job.report(0, 13.0, "").isprintable()


def test_a_worker_alone_waits_for_a_name_that_it_has_to_push_itself() -> None:
    job = Job(joined=1, names={"counts": [0]})
    for rank in (1, 2):
        job.handle(Join(Sender(1, rank, 0)), Leave(Sender(1, rank, 0)))
    told = "1worker 0 waits for the first push to 'counts' (names that exist: none)"
    assert job.report(0, 10.0, "the first push to 'counts'") == told


def test_workers_that_wait_for_the_same_are_told_once() -> None:
    job = Job()
    for rank in (1, 2):
        job.tick(rank, 3)
        job.pull(rank, 3, 3)
    told = "workers 1, 2 wait for clock 2 of worker 0 (table 'model', bsp); "
    told += "worker 0 is at clock 0, in no call that waits: computing, or stopped"
    assert job.report(1, 5.0, "values", table="model", needs=3) == f"1{told}"
    assert job.report(2, 5.2, "values", table="model", needs=3) == f"0{told}"
    assert job.report(1, 10.0, "values", table="model", needs=3)[0] == "1", "again when it has lasted twice as long"
    assert job.report(2, 10.2, "values", table="model", needs=3)[0] == "0"
    for rank in (1, 2):
        assert job.report(rank, 0.0, "") == "0"
    assert job.report(1, 5.0, "values", table="model", needs=3)[0] == "1", "another wait is told anew"


def test_a_wait_that_is_not_long_yet_is_known_and_not_told() -> None:
    job = Job(at_barriers={"barrier": [0]})
    job.handle(Leave(Sender(1, 2, 0)))
    assert job.report(1, 0.0, "model, call 3, backward", workers=(0,))[0] == "2"
    assert job.report(0, 5.0, "the others to come to the barrier") == (
        "3worker 0 is in barrier(), waiting for worker 1; worker 1 waits for worker 0 (model, call 3, backward)"
        f"{STUCK}{ADVICE}"
    )


def test_another_cause_is_told_at_once_but_not_more_often_than_every_few_seconds() -> None:
    job = Job()
    assert job.report(1, 5.0, "call 1, all_reduce", workers=(0, 2))[0] == "1"
    assert job.report(2, 5.0, "call 1, all_reduce", workers=(0, 1))[0] == "0"
    job.now += 5.0
    assert job.report(1, 9.0, "call 1, all_reduce", workers=(0, 2)) == (
        "1workers 1, 2 wait for worker 0 (call 1, all_reduce); worker 0 is at clock 0, in no call that waits: "
        "computing, or stopped"
    )


def test_workers_that_have_not_come_or_are_cut_off_are_named() -> None:
    job = Job(joined=2)
    job.handle(Disconnected(1, 0))
    assert job.report(0, 10.0, "all to come", workers=(1, 2)).endswith(
        "worker 1 has lost its connection; worker 2 has not joined yet"
    )


def test_a_worker_that_has_left_is_not_waited_for() -> None:
    job = Job()
    job.tick(0, 1)
    job.handle(Leave(Sender(1, 1, 0)))
    assert "of worker 2 (" in job.report(0, 5.0, "values", table="model", needs=1)


def test_work_is_waited_for_from_those_that_hold_it() -> None:
    job = Job(dealt=[(0, "slices of loader 0", [0, 2])])
    assert job.report(0, 5.0, "slices of loader 0").startswith(
        "1worker 0 waits for slices of loader 0, of which worker 2 has some; worker 2 is at clock 0"
    )


def test_backup_workers_are_not_to_blame() -> None:
    job = Job(consistency="backup:1")
    job.tick(0, 1)
    job.tick(1, 1)
    assert job.report(0, 5.0, "values of 'model'", table="model", needs=1) == "1worker 0 waits for values of 'model'"


def test_what_a_worker_says_is_cut_and_cannot_command_a_terminal() -> None:
    job = Job()
    told = job.report(0, 5.0, "\x1b[2J{}" + "x" * 10_000, table="\x1b" * 9999, needs=1)
    assert told.isprintable()
    assert len(told) < 1000


def test_a_former_life_reports_nothing() -> None:
    job = Job()
    assert job.reports.add((0, 7), ReportWait(1, 5.0, "values"), 0.0) == b"0"
    assert not job.reports._reports
