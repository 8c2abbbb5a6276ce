"""How long a run waits for its servers to start, on a clock that the test moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from paceline.errors import EXIT_LOST
from paceline.launch.child import Launch
from paceline.launch.crash_policy import CrashPolicy
from paceline.launch.local import make_spec
from paceline.launch.output import Console
from paceline.launch.plan import LocalRun
from paceline.launch.signals import Signals
from paceline.launch.supervise import MOST_NAMED, Exits, SupervisionConfig, Supervisor

START_TIMEOUT_S = 30.0


@dataclass
class Member:
    """A process: a worker ends once servers listen, a server when it is told to."""

    launch: Launch
    machine: Machine
    pid: int | None = None
    last_lines: Sequence[str] = ()
    is_killed: bool = False
    is_told: bool = False
    lines: list[str] = field(default_factory=list[str])

    @property
    def name(self) -> str:
        return self.launch.name

    def reap(self) -> int | None:
        dying = self.machine.dying
        if self.machine.has_met and self.name in dying:
            dying.remove(self.name)
            return -9
        has_ended = self.is_told or (self.machine.listens and not dying and self.launch.role == "worker")
        code = self.machine.worker_code if self.launch.role == "worker" else 0
        return -9 if self.is_killed else code if has_ended else None

    def signal(self, number: int) -> None: ...

    def kill(self) -> None:
        self.is_killed = True

    def send_line(self, line: str) -> None:
        self.is_told |= line == "stop"
        self.lines.append(line)


@dataclass
class Machine:
    """A process backend and rendezvous: each wait takes as long as the test says, and then servers listen."""

    waits_s: deque[float]
    now_s: float = 1000.0
    members: list[Member] = field(default_factory=list[Member])
    worker_code: int = 0
    dying: list[str] = field(default_factory=list[str])  # killed once, when all have met
    has_met: bool = False
    released_at: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])  # after how many starts
    objection_of: Callable[[int], str] | None = None  # why a server has no successor
    spares: tuple[str, ...] = ()
    failure: Exception | None = None  # of each look for addresses, once servers listen
    is_closed: bool = False

    def objection(self, rank: int) -> str:
        assert self.objection_of is not None
        return self.objection_of(rank)

    def following(self, launch: Launch, _exit_code: int, /) -> Launch:
        return launch.again()

    def is_spare(self, launch: Launch, /) -> bool:
        return launch.name in self.spares

    @property
    def listens(self) -> bool:
        return not self.waits_s

    def prepare(self) -> Sequence[Member]:
        return ()

    def settled(self) -> bool:
        return True

    def start(self, launch: Launch) -> Member:
        self.members.append(Member(launch, self))
        return self.members[-1]

    def wait(self, timeout_s: float) -> None:
        self.now_s += self.waits_s.popleft() if self.waits_s else timeout_s

    def release(self, member: Member) -> None:
        self.released_at.append((member.name, len(self.members)))

    def close(self) -> None:
        self.is_closed = True

    def poll(self) -> bool:
        if self.failure is not None and self.listens:
            raise self.failure
        self.has_met = self.listens
        return self.listens

    def missing(self) -> list[str]:
        return ["server 0"]


def launch(role: Literal["server", "worker"], rank: int = 0) -> Launch:
    return Launch(role=role, name=f"{role} {rank}", rank=rank, command=(), environment={})


def run(machine: Machine, folder: Path, launches: Sequence[Launch] = (launch("server"), launch("worker"))) -> int:
    config = SupervisionConfig(crash_policy=CrashPolicy(), start_timeout_s=START_TIMEOUT_S, grace_s=1.0, run_dir=folder)
    console = Console()
    with Signals() as signals:
        exits = Exits(console, None, folder)
        successors = None if machine.objection_of is None else machine
        supervisor = Supervisor(
            config, machine, machine, console, signals, None, exits, now=lambda: machine.now_s, successors=successors
        )
        return supervisor.run(launches)


def test_servers_have_a_time_to_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Machine(deque([0.25] * 121)), tmp_path) == 1

    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("server 0 did not say where it listens within 30 s (missing: server 0)")


def test_a_slow_start_is_told_once_with_what_is_not_ready(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Machine(deque([0.25] * 100)), tmp_path) == 0

    told = [line for line in capsys.readouterr().err.splitlines() if "still starting" in line]
    assert len(told) == 1
    assert "still starting after 15 s (not ready: server 0); the machine may be busy" in told[0]


def test_a_usual_start_is_not_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(Machine(deque([0.25] * 50)), tmp_path) == 0
    assert "still starting" not in capsys.readouterr().err


def test_servers_that_still_start_when_the_run_ends_are_killed_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(deque([0.25] * 200))

    assert run(machine, tmp_path) == 1

    server = next(member for member in machine.members if member.name == "server 0")
    assert server.is_killed
    assert "server 0 had not ended" not in capsys.readouterr().err


def test_a_worker_that_prepares_its_data_before_it_joins_is_waited_for_as_in_any_wait(tmp_path: Path) -> None:
    def join_timeout_s(timeout_s: float | None) -> float:
        return make_spec(LocalRun(script=tmp_path / "script.py", timeout_s=timeout_s), tmp_path).join_timeout_s

    assert [join_timeout_s(given) for given in (None, 1800.0, 5.0)] == [600.0, 1800.0, 60.0]


def test_the_last_line_of_a_run_whose_worker_wrote_nothing_says_what_happened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(deque(), worker_code=3)

    assert run(machine, tmp_path) == 3

    assert capsys.readouterr().err.splitlines()[-1].endswith("worker 0 ended with exit code 3; the run stops")


def test_time_in_which_the_job_was_stopped_does_not_count(tmp_path: Path) -> None:
    assert run(Machine(deque([0.25, 3600.0, 0.25])), tmp_path) == 0


def test_a_successor_of_a_server_is_told_of_the_workers_that_ended_before(tmp_path: Path) -> None:
    machine = Machine(deque(), dying=["worker 1", "server 0"], objection_of=lambda _: "")

    assert run(machine, tmp_path, (launch("worker", 1), launch("server"), launch("worker"))) == EXIT_LOST

    [first, second] = [member for member in machine.members if member.name == "server 0"]
    assert first.lines == ["ended 1 0"]  # which it may not have read any more
    assert second.lines == ["ended 1 0", "ended 0 0", "stop"]


def test_a_successor_of_a_server_starts_before_what_the_server_has_left_is_cleared_away(tmp_path: Path) -> None:
    machine = Machine(deque(), dying=["server 0"], objection_of=lambda _: "")

    assert run(machine, tmp_path) == 0

    assert machine.released_at == [("server 0", 3), ("worker 0", 3), ("server 0", 3)]


def test_a_process_that_holds_nothing_when_servers_are_to_stop_is_not_waited_for(tmp_path: Path) -> None:
    machine = Machine(deque(), objection_of=lambda _: "", spares=("server 0",))

    assert run(machine, tmp_path) == 0

    [server] = [member for member in machine.members if member.name == "server 0"]
    assert server.is_killed


def test_a_server_without_a_successor_ends_the_run_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(deque(), dying=["server 0"], objection_of=lambda rank: f"server {rank} keeps nothing")

    assert run(machine, tmp_path) == 1

    assert "server 0 was killed by SIGKILL; the run ends: server 0 keeps nothing" in capsys.readouterr().err


def test_what_a_launcher_kills_as_it_fails_is_not_told_as_lost_and_all_is_tidied_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(deque([0.1]), failure=OSError("No space left on device"), dying=["none yet"])

    with pytest.raises(OSError, match="No space left"):
        run(machine, tmp_path)

    assert all(member.is_killed for member in machine.members)
    assert (machine.is_closed, sorted(machine.released_at)) == (True, [("server 0", 2), ("worker 0", 2)])
    assert capsys.readouterr().err == ""


def test_workers_that_joined_and_went_without_end_are_named_up_to_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    exits, num = Exits(Console(), None, None, now=lambda: 0.0), MOST_NAMED + 1000
    for number in range(num):
        worker = Launch(role="worker", name=f"worker {number}", rank=number, command=(), environment={})
        exits.note_loss(Member(worker, Machine(deque())), -9, "the others go on without it")
    assert exits.conclude() == EXIT_LOST
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"worker {MOST_NAMED - 1}, which was killed by SIGKILL" in last
    assert last.endswith("; and 1000 more (exit code 75)")
