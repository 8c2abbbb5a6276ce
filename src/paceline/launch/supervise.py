"""Watches over the processes of a job from their start to the last exit.

Rules: (1) everything that happens is seen in `_turn`; nothing else waits. (2) The first reason to end the run wins and
decides the exit code. (3) Workers are stopped before servers, so that a worker can finish what it is saying.
(4) Whatever happens in here, no child is left when `run` returns or raises.
"""

import math
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, final

from paceline.launch.child import Launch
from paceline.launch.console import Console
from paceline.launch.notice import EXIT_TOLD
from paceline.launch.policy import Decision, Policy, describe_exit, shell_code
from paceline.launch.signals import Signals

STARTING_TURN_S: Final = 0.01
TURN_S: Final = 0.25
KILL_TIMEOUT_S: Final = 5.0


class Board(Protocol):
    """A live display of the run's progress."""

    def refresh(self, now: float) -> None:
        """Show the state of things at `now` (monotonic seconds)."""
        ...

    def close(self) -> None:
        """Leave the display as it is."""
        ...


class Rendezvous(Protocol):
    """Where the servers say that they listen, and the workers hear it."""

    def poll(self) -> bool:
        """Tell whether all have met; does not block."""
        ...

    def missing(self) -> list[str]:
        """Return the names of the servers that are still awaited."""
        ...


class Member(Protocol):
    """A process of the job that was started, wherever it runs."""

    @property
    def launch(self) -> Launch:
        """How it was started."""
        ...

    @property
    def name(self) -> str:
        """What it is called in messages."""
        ...

    @property
    def last_lines(self) -> Sequence[str]:
        """What it last wrote to stderr."""
        ...

    def reap(self) -> int | None:
        """Return its exit code (negative: the signal that killed it), or None while it runs."""
        ...

    def signal(self, number: int) -> None:
        """Send it a signal."""
        ...

    def kill(self) -> None:
        """Kill it and all that it started."""
        ...

    def tell(self, line: str) -> None:
        """Write a line to its standard input, if it is there to read it."""
        ...


class Stage(Protocol):
    """Where processes run: this machine, or those of an engine."""

    def prepare(self) -> Sequence[Member]:
        """Begin to make room for the processes; return those that help with that. Does not block."""
        ...

    def settled(self) -> bool:
        """Tell whether processes can be started now; does not block. Raises when they never can."""
        ...

    def start(self, launch: Launch) -> Member:
        """Start a process; does not wait until it runs."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Block until something happens or `timeout_s` have passed; relay what processes have written."""
        ...

    def release(self, member: Member) -> None:
        """Relay the rest of what a member that has ended has written, and forget it."""
        ...

    def close(self) -> None:
        """Release what is left; nothing runs any more."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """Why the run ends before its workers are done, and the exit code that says so."""

    code: int
    reason: str
    culprit: Member | None = None
    tell_workers: int = signal.SIGTERM
    lets_finish: bool = False  # the step that each worker is in


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a run is held to."""

    policy: Policy
    start_timeout_s: float
    grace_s: float
    called_off: Path  # this file is made when workers are to end at once, whatever they do


@final
class Supervisor:
    """One run: starts its processes, answers what happens to them, and ends them all."""

    def __init__(
        self,
        terms: Terms,
        stage: Stage,
        rendezvous: Rendezvous,
        console: Console,
        signals: Signals,
        board: Board | None,
    ) -> None:
        self._terms = terms
        self._stage = stage
        self._rendezvous = rendezvous
        self._console = console
        self._signals = signals
        self._board = board
        self._running: list[Member] = []
        self._met = False
        self._servers_stopped = False
        self._ending: Ending | None = None
        self._num_finished = 0
        self._summary: list[str] = []  # one line for each worker that did not end well and did not end the run

    def run(self, launches: Sequence[Launch]) -> int:
        """Run the job to its end; blocks, and returns the exit code of the whole."""
        self._start_deadline_s = math.inf  # nobody was started, and nobody is awaited
        self._next_refresh_s = 0.0
        try:
            self._prepare()
            if self._ending is None:
                self._start_all(launches)
            while self._ending is None and self._alive("worker"):
                self._turn()
            self._stop_workers()
            self._stop_servers()
        finally:
            self._kill(self._running)
            self._wait_until_gone(self._running, time.monotonic() + KILL_TIMEOUT_S)
            self._stage.close()
            if self._board is not None:
                self._board.close()
        return self._conclude()

    # What happens

    def _turn(self) -> None:
        self._stage.wait(TURN_S if self._met else STARTING_TURN_S)
        for number in self._signals.take():
            self._on_signal(number)
        for child in tuple(self._running):
            exit_code = child.reap()
            if exit_code is not None:
                self._on_exit(child, exit_code)
        now = time.monotonic()
        self._meet(now)
        if self._board is not None and now >= self._next_refresh_s:
            self._next_refresh_s = now + TURN_S
            self._board.refresh(now)

    def _meet(self, now: float) -> None:
        self._met = self._met or self._rendezvous.poll()
        if self._met or self._ending is not None or now < self._start_deadline_s:
            return
        missing = self._rendezvous.missing()
        slowest = next(child for child in self._running if child.name in missing)
        reason = (
            f"{slowest.name} did not say where it listens within {self._terms.start_timeout_s:g} s "
            f"(missing: {', '.join(missing)})"
        )
        self._ending = Ending(1, reason, culprit=slowest)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        debugged = [child for child in self._running if child.launch.has_terminal]
        if number == signal.SIGINT and debugged and self._ending is None:
            debugged[0].signal(number)  # its debugger stops it, or its script ends as under plain Python
        elif self._ending is None:
            lets_finish = number != signal.SIGINT
            tell_workers = signal.SIGTERM if lets_finish else signal.SIGINT
            self._ending = Ending(128 + number, f"stopped by {name}", None, tell_workers, lets_finish)
        elif number == signal.SIGINT:
            self._console.say("interrupted again: killing what is left")
            self._kill(self._running)

    def _on_exit(self, child: Member, exit_code: int) -> None:
        self._running.remove(child)
        self._stage.release(child)
        match child.launch.role:
            case "worker":
                self._on_worker_exit(child, exit_code)
            case "server":
                self._on_server_exit(child, exit_code)
            case "data":
                self._on_data_server_exit(child, exit_code)
            case "nursery":  # the run can do without
                pass

    def _on_worker_exit(self, child: Member, exit_code: int) -> None:
        self._tell_servers_of_end(child.launch)
        if exit_code == 0:
            self._num_finished += 1
        elif self._ending is None:
            self._on_worker_loss(child, exit_code)

    def _on_server_exit(self, child: Member, exit_code: int) -> None:
        if self._ending is None and not (self._servers_stopped and exit_code == 0):
            when = "when it was told to stop" if self._servers_stopped else "before the run was over"
            self._ending = Ending(1, f"{child.name} {describe_exit(exit_code)} {when}", culprit=child)

    def _on_data_server_exit(self, child: Member, exit_code: int) -> None:
        """Go on with the others: none decides anything, so that each can serve what another was to."""
        if self._ending is not None or (self._servers_stopped and exit_code == 0):
            return
        happened, launch = f"{child.name} {describe_exit(exit_code)}", child.launch
        decision = self._terms.policy.decide(exit_code, launch.incarnation)
        if self._servers_stopped:
            self._summary.append(f"{happened} when it was told to stop")
        elif decision == Decision.RESTART:
            self._summary.append(f"{happened}; started again")
            self._start(launch.again())
        elif decision == Decision.STOP or not self._met:
            self._ending = Ending(1, f"{happened}; the run was stopped", culprit=child)
        elif self._alive("data"):
            self._summary.append(f"{happened}; the run went on without it")
        else:
            self._ending = Ending(1, f"{happened}; no data server was left", culprit=child)

    def _tell_servers_of_end(self, launch: Launch) -> None:
        """Let the servers wait for this worker no longer; one that has left by itself is not waited for anyway."""
        for server in self._alive("server"):
            server.tell(f"ended {launch.rank} {launch.incarnation}")

    def _on_worker_loss(self, child: Member, exit_code: int) -> None:
        launch = child.launch
        happened = f"{child.name} {describe_exit(exit_code)}"
        match self._terms.policy.decide(exit_code, launch.incarnation):
            case Decision.CONTINUE if self._num_finished or self._alive("worker"):
                self._summary.append(f"{happened}; the run went on without it")
            case Decision.CONTINUE:
                culprit = None if exit_code == EXIT_TOLD else child
                self._ending = Ending(shell_code(exit_code), f"{happened}; no worker was left", culprit)
            case Decision.RESTART:
                again = launch.again()
                self._summary.append(f"{happened}; started again as incarnation {again.incarnation}")
                self._start(again)
            case Decision.STOP:
                self._ending = Ending(shell_code(exit_code), f"{happened}; the run was stopped", culprit=child)

    # What is done

    def _prepare(self) -> None:
        self._running.extend(self._stage.prepare())
        while self._ending is None and not self._stage.settled():
            self._turn()

    def _start_all(self, launches: Sequence[Launch]) -> None:
        self._start_deadline_s = time.monotonic() + self._terms.start_timeout_s
        for launch in launches:
            self._start(launch)

    def _start(self, launch: Launch) -> None:
        self._running.append(self._stage.start(launch))

    def _stop_workers(self) -> None:
        if self._ending is None:
            return
        if not self._ending.lets_finish:
            with suppress(OSError):  # a full disk, for example: then they take their time
                self._terms.called_off.touch()
        workers = self._alive("worker")
        for worker in workers:
            worker.signal(self._ending.tell_workers)
        self._end_within(workers, time.monotonic() + self._terms.grace_s)

    def _stop_servers(self) -> None:
        self._servers_stopped = True
        servers = self._alive("server") + self._alive("data")
        for server in servers:
            server.tell("stop")
        grace_end_s = time.monotonic() + self._terms.grace_s
        # A server that is still starting hears of its end only when it has started.
        was_cut_short = self._met or self._ending is not None
        self._end_within(servers, grace_end_s if was_cut_short else max(grace_end_s, self._start_deadline_s))

    def _end_within(self, children: Sequence[Member], deadline_s: float) -> None:
        """Wait for the children to end; kill those that have not at the deadline."""
        self._wait_until_gone(children, deadline_s)
        late = [child for child in children if child in self._running]
        for child in late:
            self._summary.append(
                f"{child.name} had not ended {self._terms.grace_s:g} s after it was told to, and was killed"
            )
        self._kill(late)
        self._wait_until_gone(late, time.monotonic() + KILL_TIMEOUT_S)

    def _wait_until_gone(self, children: Sequence[Member], deadline_s: float) -> None:
        awaited = tuple(children)
        while time.monotonic() < deadline_s and any(child in self._running for child in awaited):
            self._turn()

    def _kill(self, children: Sequence[Member]) -> None:
        for child in children:
            child.kill()

    def _alive(self, role: str) -> list[Member]:
        return [child for child in self._running if child.launch.role == role]

    # What is told

    def _conclude(self) -> int:
        ending = self._ending
        if ending is not None and ending.culprit is not None:
            self._quote(ending.culprit)
        for line in self._summary:
            self._console.say(line)
        if ending is None:
            return 0
        self._console.say(ending.reason)
        return ending.code

    def _quote(self, culprit: Member) -> None:
        if culprit.launch.has_terminal:  # where its words stand already
            return
        if not culprit.last_lines:
            self._console.say(f"{culprit.name} wrote nothing to stderr")
            return
        self._console.quote(
            f"the last {len(culprit.last_lines)} lines that {culprit.name} wrote to stderr:",
            tuple(culprit.last_lines),
        )
