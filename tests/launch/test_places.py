"""Places of workers that come and go: requests for another number of them, and what a run does about them."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.launch.test_supervise import Machine, Member
from tests.launch.test_supervise import launch as describe

from paceline.errors import EXIT_LOST, EXIT_PREEMPTED, ConnectionLost, PacelineError, UsageError
from paceline.job.addresses import SPEC_NAME
from paceline.job.environment import Place
from paceline.job.folders import make_once
from paceline.job.spec import TOKEN_NAME, ClusterSpec, write_token
from paceline.launch.child import Launch
from paceline.launch.crash_policy import CrashPolicy
from paceline.launch.output import Console
from paceline.launch.places import ANSWER_NAME, REQUEST_NAME, WorkerPlaces, request_workers
from paceline.launch.plan import LocalRun, read_workers
from paceline.launch.signals import Signals
from paceline.launch.supervise import Exits, SupervisionConfig, Supervisor

WAIT_S = 30.0


def spec_in(folder: Path, num_at_start: int) -> None:
    spec = ClusterSpec(
        job="a", num_workers=4, num_at_start=num_at_start, num_servers=1, transport="shm", run_dir=str(folder)
    )
    spec.write(folder / SPEC_NAME)
    write_token(folder)


def worker(rank: int, incarnation: int = 0) -> Launch:
    place = Place(Path("cluster.json"), rank, rank, incarnation)
    return Launch(role="worker", name=f"worker {rank}", rank=rank, command=(), environment={}, place=place)


def test_a_request_is_answered_once(tmp_path: Path) -> None:
    spec_in(tmp_path, 2)
    places = WorkerPlaces(tmp_path, [])
    answers: list[str] = []
    asking = threading.Thread(target=lambda: answers.append(request_workers(tmp_path, 3, WAIT_S)))
    asking.start()
    found = None
    while found is None:
        found = places.requested()
    places.answer("done")
    asking.join()

    assert (found, answers, places.requested()) == (3, ["done"], None)
    assert {path.name for path in tmp_path.iterdir()} == {SPEC_NAME, TOKEN_NAME}


def test_a_file_that_is_read_and_removed_at_once_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def link_for_one_that_is_quick(unfinished: Path, path: Path) -> None:
        link(unfinished, path)
        path.unlink()

    monkeypatch.setattr(os, "link", link_for_one_that_is_quick)
    assert make_once(tmp_path / REQUEST_NAME, b"3")


def test_a_request_that_is_not_answered_is_taken_back(tmp_path: Path) -> None:
    spec_in(tmp_path, 2)
    with pytest.raises(PacelineError, match=r"did not answer within 0\.05 s: has the run ended\?"):
        request_workers(tmp_path, 3, 0.05)
    assert not (tmp_path / REQUEST_NAME).exists()


NO_NUMBERS = (b"", b"-1", b"3\n", "\u00b2".encode(), b"\xff", b"9" * 10, b"9" * 5000)


@pytest.mark.parametrize("content", NO_NUMBERS, ids=range(len(NO_NUMBERS)))
def test_what_is_no_number_is_no_request(tmp_path: Path, content: bytes) -> None:
    places = WorkerPlaces(tmp_path, [])
    (tmp_path / REQUEST_NAME).write_bytes(content)
    assert places.requested() is None
    assert not (tmp_path / REQUEST_NAME).exists()


def test_a_pipe_holds_up_no_launcher(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / REQUEST_NAME)
    assert WorkerPlaces(tmp_path, []).requested() is None
    assert not (tmp_path / REQUEST_NAME).exists()


def test_two_requests_at_a_time_are_one_too_many(tmp_path: Path) -> None:
    spec_in(tmp_path, 2)
    (tmp_path / REQUEST_NAME).write_text("4")
    with pytest.raises(PacelineError, match="has another request to answer: try again"):
        request_workers(tmp_path, 3, WAIT_S)
    assert (tmp_path / REQUEST_NAME).read_text() == "4"


@pytest.mark.parametrize(
    ("num_at_start", "num", "says"),
    [
        (0, 5, r"keeps its 4 workers: start it with --workers 4:5, for example"),
        (2, 5, "has places for 1 to 4 workers"),
        (2, 0, "has places for 1 to 4 workers"),
    ],
)
def test_a_number_that_cannot_be_is_refused_at_once(tmp_path: Path, num_at_start: int, num: int, says: str) -> None:
    spec_in(tmp_path, num_at_start)
    with pytest.raises(UsageError, match=says):
        request_workers(tmp_path, num, WAIT_S)


def test_a_run_that_has_ended_is_asked_for_no_workers(tmp_path: Path) -> None:
    spec_in(tmp_path, 2)
    (tmp_path / TOKEN_NAME).unlink()
    with pytest.raises(UsageError, match="has ended, and has no workers"):
        request_workers(tmp_path, 3, WAIT_S)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the cluster spec"):
        request_workers(tmp_path / "none", 2, WAIT_S)


@pytest.mark.parametrize("text", ["x", "2:x", ":", "2:", "1:2:3", "1.5", ""])
def test_a_number_of_workers_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a whole number, or as 2:8"):
        read_workers(text)


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"num_at_start": 3, "num_workers": 2}, "--workers is 3:2, expected how many begin"),
        ({"num_at_start": 0, "num_workers": 2}, "--workers is 0:2, expected how many begin"),
        ({"num_at_start": 1, "transport": "memory"}, "the job is one process; choose shm or tcp"),
        ({"num_at_start": 1, "strategy": "all-reduce"}, "--strategy all-reduce needs all workers at every step"),
        ({"num_at_start": 1, "strategy": "ssp:2+pipeline:2"}, "needs all workers at every step"),
        ({"num_at_start": 1, "debug": 1}, "--debug is 1, expected a worker from 0 to 0"),
    ],
)
def test_a_run_whose_workers_cannot_come_and_go_is_refused(run: dict[str, int | str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        LocalRun(script=Path("script.py"), **run).validate()  # pyright: ignore[reportArgumentType]


@dataclass
class Asked:
    """Answers the requests of a test, one at each turn of the run in which the machine has what was asked before."""

    places: WorkerPlaces
    machine: ElasticMachine
    wanted: deque[int]
    answers: list[str] = field(default_factory=list[str])
    begins: Callable[[], bool] = lambda: True

    def requested(self) -> int | None:
        if not (self.answers or self.begins()):
            return None
        if not self.wanted:
            self.machine.is_over = True
            return None
        return self.wanted.popleft()

    def answer(self, text: str) -> None:
        self.answers.append(text)

    def take(self, num: int) -> list[Launch]:
        return self.places.take(num)

    def give_back(self, launch: Launch) -> None:
        self.places.give_back(launch)


@dataclass
class ElasticWorker(Member):
    """A worker that leaves when it is told to, by itself or, before it has begun, by the signal; or at the end."""

    def reap(self) -> int | None:
        if self.launch.role == "server" or self.name in self.machine.dying:
            return super().reap()
        assert isinstance(self.machine, ElasticMachine)
        if self.is_told:
            return self.machine.code_when_told
        return 0 if self.machine.is_over else None

    def signal(self, number: int) -> None:
        assert number == signal.SIGTERM
        self.is_told = True


@dataclass
class ElasticMachine(Machine):
    is_over: bool = False
    code_when_told: int = EXIT_PREEMPTED

    def start(self, launch: Launch) -> Member:
        self.members.append(ElasticWorker(launch, self))
        return self.members[-1]


@contextmanager
def supervising(
    folder: Path, machine: ElasticMachine, asked: Asked, policy: CrashPolicy | None = None
) -> Iterator[Supervisor]:
    config = SupervisionConfig(
        crash_policy=policy or CrashPolicy(), start_timeout_s=WAIT_S, grace_s=1.0, run_dir=folder
    )
    with Signals() as signals:
        exits = Exits(Console(), None, folder)
        yield Supervisor(
            config, machine, machine, Console(), signals, None, exits, now=lambda: machine.now_s, places=asked
        )


@pytest.mark.parametrize("code_when_told", [EXIT_PREEMPTED, -signal.SIGTERM], ids=["in its loop", "before it began"])
def test_workers_come_to_the_lowest_places_and_leave_from_the_highest(tmp_path: Path, code_when_told: int) -> None:
    machine = ElasticMachine(deque(), code_when_told=code_when_told)
    places = WorkerPlaces(tmp_path, [worker(3, 1), worker(2, 1)])
    asked = Asked(places, machine, deque([4, 1, 1, 3]))
    with supervising(tmp_path, machine, asked) as run:
        assert run.run([describe("server"), worker(0), worker(1)]) == 0

    assert asked.answers == [
        "4 workers from now on: worker 2, worker 3 to come",
        "1 worker from now on: worker 1, worker 2, worker 3 to leave",
        "1 worker from now on",
        "3 workers from now on: worker 1, worker 2 to come",
    ]
    lives = [(member.launch.rank, member.launch.incarnation) for member in machine.members[1:]]
    assert lives == [(0, 0), (1, 0), (2, 1), (3, 1), (1, 1), (2, 2)]
    assert all(member.launch.num_restarts == 0 for member in machine.members[1:])


def test_a_worker_that_is_about_to_come_again_leaves_before_those_of_lower_ranks(tmp_path: Path) -> None:
    machine = ElasticMachine(deque(), dying=["worker 2"])
    asked = Asked(WorkerPlaces(tmp_path, []), machine, deque([2, 3]), begins=lambda: bool(run._due))
    with supervising(tmp_path, machine, asked, CrashPolicy(on_crash="restart")) as run:
        run.run([describe("server"), worker(0), worker(1), worker(2)])
    assert asked.answers == ["2 workers from now on: worker 2 to leave", "3 workers from now on: worker 2 to come"]
    assert not any(member.is_told for member in machine.members if member.launch.role == "worker")
    assert [member.name for member in machine.members[4:]] == ["worker 2"]


def test_a_worker_that_is_killed_as_it_leaves_does_not_come_again(tmp_path: Path) -> None:
    machine = ElasticMachine(deque(), code_when_told=-signal.SIGKILL)
    asked = Asked(WorkerPlaces(tmp_path, []), machine, deque([1, 1]))
    with supervising(tmp_path, machine, asked, CrashPolicy(on_crash="restart")) as run:
        assert run.run([describe("server"), worker(0), worker(1)]) == EXIT_LOST
    assert asked.answers == ["1 worker from now on: worker 1 to leave", "1 worker from now on"]
    assert [member.name for member in machine.members] == ["server 0", "worker 0", "worker 1"]


def test_the_number_stays_when_a_worker_has_finished(tmp_path: Path) -> None:
    machine = ElasticMachine(deque(), is_over=True)
    asked = Asked(WorkerPlaces(tmp_path, [worker(1, 1)]), machine, deque([2]))
    with supervising(tmp_path, machine, asked) as run:
        assert run.run([describe("server"), worker(0)]) == 0
    assert asked.answers == ["a worker has come to the end of the script: the number of workers stays as it is"]


def test_an_answer_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / ANSWER_NAME).write_text("of an earlier request")
    WorkerPlaces(tmp_path, []).answer("done")
    assert (tmp_path / ANSWER_NAME).read_text() == "of an earlier request"


@dataclass
class Asking:
    """A `paceline join` that asks at the start of a run, and is admitted or told why not."""

    num: int
    machine: ElasticMachine
    codes: tuple[int | None, ...] = ()  # how its workers end, in turn
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    is_gone: bool = False
    origin: str = "machine elsewhere"
    said: list[str] = field(default_factory=list[str])

    def permits(self, launch: Launch) -> bool:
        return launch.rank in self.ranks

    def refuse(self, reason: str) -> None:
        self.said.append(reason)

    def admit(self, launches: Sequence[Launch]) -> Sequence[Member]:
        if self.is_gone:
            raise ConnectionLost("the connection is over")
        self.said += [launch.name for launch in launches]
        codes = self.codes or (None,) * len(launches)
        joined = [replace(launch, origin=self.origin) for launch in launches]
        return [JoinedHere(launch, self.machine, code=code) for launch, code in zip(joined, codes, strict=True)]


@dataclass
class JoinedHere(ElasticWorker):
    code: int | None = None

    def reap(self) -> int | None:
        return super().reap() if self.code is None else self.code


@dataclass
class Requests:
    """Has a candidate ask at each turn once servers listen; the run is over when all are answered."""

    machine: ElasticMachine
    candidates: list[Asking]

    def requested(self) -> Sequence[Asking]:
        asking, self.candidates = self.candidates[:1], self.candidates[1:]
        self.machine.is_over |= not asking
        return asking


def run_with(folder: Path, machine: ElasticMachine, *candidates: Asking, policy: CrashPolicy | None = None) -> int:
    """Run a server and worker 0, with places for three others."""
    places = WorkerPlaces(folder, [worker(rank, 1) for rank in (1, 2, 3)])
    config = SupervisionConfig(
        crash_policy=policy or CrashPolicy(), start_timeout_s=WAIT_S, grace_s=1.0, run_dir=folder
    )
    with Signals() as signals:
        run = Supervisor(
            config,
            machine,
            machine,
            Console(),
            signals,
            None,
            Exits(Console(), None, folder),
            now=lambda: machine.now_s,
            places=places,
            candidates=Requests(machine, [*candidates]),
        )
        return run.run([describe("server"), worker(0)])


def test_those_that_ask_get_the_lowest_places_that_they_may_have_all_or_none(tmp_path: Path) -> None:
    machine = ElasticMachine(deque())
    asking = [
        Asking(2, machine, ranks=(2, 3)),
        Asking(2, machine),
        Asking(1, machine, ranks=(2,)),
        Asking(1, machine, is_gone=True),
        Asking(1, machine),
        Asking(1, machine),
    ]
    assert run_with(tmp_path, machine, *asking) == 0
    assert [each.said for each in asking] == [
        ["worker 2", "worker 3"],
        ["2 workers ask to join, and 1 place is free: wait until others have left, or ask for fewer"],
        ["a worker asks to join, and no place is free: wait until others have left, or ask for fewer"],
        [],
        ["worker 1"],
        ["a worker asks to join, and no place is free: wait until others have left, or ask for fewer"],
    ]


def test_none_joins_a_run_that_ends(tmp_path: Path) -> None:
    machine = ElasticMachine(deque(), is_over=True)
    late = Asking(1, machine)
    assert run_with(tmp_path, machine, late) == 0
    assert late.said == ["the run ends: the number of its workers stays as it is"]


LEFT = "worker 1 from machine elsewhere was told to leave, and has; the others go on without it"
FAILED = "worker 1 from machine elsewhere ended with exit code 3; the others go on without it"
KILLED = "worker 1 from machine elsewhere was killed by SIGKILL; the others go on without it"


@pytest.mark.parametrize("policy", [CrashPolicy(), CrashPolicy("stop", "stop"), CrashPolicy("restart", "continue")])
@pytest.mark.parametrize(
    ("code", "line", "ends_with"),
    [(0, "", 0), (EXIT_PREEMPTED, LEFT, 0), (3, FAILED, 0), (-signal.SIGKILL, KILLED, EXIT_LOST)],
)
def test_a_run_goes_on_without_a_worker_that_had_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: CrashPolicy, code: int, line: str, ends_with: int
) -> None:
    machine = ElasticMachine(deque())
    again = Asking(3, machine)
    assert run_with(tmp_path, machine, Asking(1, machine, codes=(code,)), again, policy=policy) == ends_with
    said = capsys.readouterr().err.splitlines()
    assert "paceline: worker 1 joins from machine elsewhere" in said
    assert (f"paceline: {line}" in said) == bool(line), said
    assert [member.launch.name for member in machine.members] == ["server 0", "worker 0"]  # none is started here
    assert again.said == ["worker 1", "worker 2", "worker 3"]
