"""One process of the job: how to start it, and the handle on it while it runs."""

import os
import secrets
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Final, Literal, Protocol, final

import msgspec
from msgspec.structs import replace

from paceline.job.environment import Place, memory_variable
from paceline.launch.guard import MARK, Guard, kill_group, kill_marked
from paceline.launch.output import Pipe

NUM_LAST_LINES: Final = 20


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How to start one process. A worker has a place in the job; a server gets its rank on its command line.

    The fork server is not part of the job: it helps to start the others.
    """

    role: Literal["worker", "server", "data", "fork-server"]
    name: str
    rank: int
    command: tuple[str, ...]
    environment: Mapping[str, str]
    place: Place | None = None
    cores: tuple[int, ...] = ()  # where it may run; empty: anywhere
    is_fresh: bool = False  # it is not forked from a process that has imported torch
    has_terminal: bool = False  # its standard streams are the launcher's own
    num_restarts: int = 0  # since it was asked for
    process: int = 0  # which one of those of its server
    memory: int | None = None  # the descriptor by which a server reaches memory that outlives it
    origin: str = ""  # what has started it, where that is a `paceline join` and not this launcher

    @property
    def title(self) -> str:
        """Its name where a sentence begins: that of several workers in one process is not plural."""
        if self.origin:
            return f"{self.name} from {self.origin}"
        return f"the process of {self.name}" if self.name.startswith("workers ") else self.name

    @property
    def incarnation(self) -> int:
        """Which life of its worker this is, from 0; of a process without a place, how often it was started again."""
        return self.num_restarts if self.place is None else self.place.incarnation

    @property
    def takes_orders(self) -> bool:
        """Whether it reads what it is told on its standard input."""
        return self.role in ("server", "data")

    @property
    def variables(self) -> dict[str, str]:
        """All of its environment."""
        return {**self.environment, **({} if self.place is None else self.place.as_environment())}

    def again(self) -> "Launch":
        """Return how to start the same process once more, as its next incarnation."""
        return replace(
            self, num_restarts=self.num_restarts + 1, place=None if self.place is None else self.place.next()
        )

    def anew(self) -> "Launch":
        """Return how to start a worker that is asked for anew: its next incarnation, with no restart behind it."""
        return replace(self.again(), num_restarts=0)

    def marked(self, *marks: str) -> "Launch":
        """Return how to start the same process so that it and all that it starts carry these marks."""
        before = filter(None, (self.environment.get(MARK),))  # this launcher may belong to a job itself
        return replace(self, environment={**self.environment, MARK: ":".join((*before, *marks))})


class Process(Protocol):
    """A process that was started, a child of this one."""

    @property
    def pid(self) -> int:
        """Its number."""
        ...

    @property
    def stdin(self) -> IO[bytes] | None:
        """Where to write what it reads, when it reads anything."""
        ...

    @property
    def stdout(self) -> IO[bytes] | None:
        """Where to read what it says."""
        ...

    @property
    def stderr(self) -> IO[bytes] | None:
        """Where to read what it complains of."""
        ...

    def wait(self) -> int:
        """Block until it has ended, and return its exit code (negative: the signal that killed it)."""
        ...


class Relay(Protocol):
    """Receives the lines that a process writes."""

    def relay(self, name: str, colour: int, line: str, *, to_stderr: bool) -> None:
        """Take one line."""
        ...


class IsHeld(Protocol):
    """Whether no more can be relayed for now."""

    def __call__(self, *, to_stderr: bool) -> bool:
        """Return whether this stream is full."""
        ...


@final
class Child:
    """A process that was started, until it is reaped; it leads a session and process group of its own."""

    def __init__(
        self,
        launch: Launch,
        console: Relay,
        guard: Guard,
        start: Callable[[Launch], Process],
        is_held: IsHeld | None = None,
    ) -> None:
        """Start it; what it writes is not read while `is_held` says that the console is full."""
        self.launch = launch
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._console = console
        self._guard = guard
        self._is_held = is_held
        # Processes that the fork server forks are not its own, and may be listed under its environment.
        self._marks = () if launch.role == "fork-server" else (secrets.token_hex(8),)
        self._process = start(launch.marked(guard.mark, *self._marks))
        self._pid = self._process.pid
        self._guard.watch(self._pid)
        self.pipes = self._open_pipes()

    @property
    def name(self) -> str:
        """What it is called in messages: "worker 0"."""
        return self.launch.name

    @property
    def pid(self) -> int:
        """Its number, and that of its group."""
        return self._pid

    def reap(self) -> int | None:
        """Return the exit code (negative: the signal that killed it), or None while it runs; `clear` comes after it."""
        found = os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status

    def clear(self) -> None:
        """Kill what the process, which has ended, has started and left behind, and let its number go."""
        # In this order: the group's number cannot be given to others before its leader is waited for.
        self.kill()
        self._guard.forget(self._pid)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def signal(self, number: int) -> None:
        """Send a signal to the process itself, as a shell's `kill` would."""
        os.kill(self._pid, number)

    def kill(self) -> None:
        """Kill the process and all that it started, also what has left its group."""
        kill_group(self._pid)
        for mark in self._marks:
            kill_marked(mark)

    def send_line(self, line: str) -> None:
        """Write a line to the process's standard input; a process that is gone does not listen."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            return

    def _open_pipes(self) -> tuple[Pipe, ...]:
        stdout, stderr = self._process.stdout, self._process.stderr
        if self.launch.has_terminal:
            return ()
        assert stdout is not None
        assert stderr is not None
        return self._open_pipe(stdout, to_stderr=False), self._open_pipe(stderr, to_stderr=True)

    def _open_pipe(self, file: IO[bytes], *, to_stderr: bool) -> Pipe:
        def deliver(line: str) -> None:
            if to_stderr:
                self.last_lines.append(line)
            self._console.relay(self.name, self.launch.rank, line, to_stderr=to_stderr)

        held = self._is_held
        return Pipe(file, deliver) if held is None else Pipe(file, deliver, lambda: held(to_stderr=to_stderr))


def start_process(launch: Launch, stdin: int | None = None) -> subprocess.Popen[bytes]:
    """Start the process in a session of its own, so that a terminal's Ctrl-C reaches the launcher only.

    It reads from the descriptor `stdin`; without one, a server reads what it is told and others read nothing, but for
    the one that has the terminal. That is not the terminal of its session, so that reading from it never stops it.
    """
    orders = subprocess.PIPE if launch.takes_orders else None if launch.has_terminal else subprocess.DEVNULL
    output = None if launch.has_terminal else subprocess.PIPE
    process = subprocess.Popen(
        launch.command,
        stdin=orders if stdin is None else stdin,
        stdout=output,
        stderr=output,
        env={**launch.variables, **memory_variable(launch.memory)},
        bufsize=0,
        start_new_session=True,
        pass_fds=() if launch.memory is None else (launch.memory,),
    )
    pin(process.pid, launch.cores)
    return process


def pin(pid: int, cores: Sequence[int]) -> None:
    """Keep a process on these cores, if any are named; its threads, all of them still to come, stay there too."""
    if cores and sys.platform == "linux":
        os.sched_setaffinity(pid, cores)
