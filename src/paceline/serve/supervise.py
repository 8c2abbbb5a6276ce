"""Keeps `paceline serve` going: a process that is killed while it serves is followed by one that was started ahead.

The memory of the process that serves, its listening socket and the lock of its folder are kept here, too. So the next
one goes on where it ended, and clients wait in the kernel meanwhile. A newer program takes over in the same way:
another supervisor, or a process that this one starts anew from what is installed by then.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Final, Self, final

import msgspec
from msgspec.structs import replace

from paceline.errors import EXIT_FAILURE, PacelineError, UsageError
from paceline.job.environment import same_imports
from paceline.launch.crash_policy import describe_exit
from paceline.launch.limits import explain
from paceline.launch.signals import ENDING_SIGNALS
from paceline.launch.successors import NUM_ENTRIES
from paceline.notices import NEWS, tell
from paceline.serve.orders import (
    HAND_OVER,
    LISTENER,
    LOCK,
    ORDER_BYTES,
    TAKEN,
    ServeOffer,
    ServeOrders,
    ServeVersion,
    read_version,
    ready,
)
from paceline.serve.state import note_holder
from paceline.server.journal import FORMAT, JOURNAL, START_BYTES, counts
from paceline.transport.lasting_memory import LastingMemory, MemoryHolder

CONTROL_NAME: Final = "control"  # in the folder of the state: where the next supervisor asks
START_TIMEOUT_S: Final = 120.0  # importing torch takes seconds, and more on a busy machine
HAND_OVER_TIMEOUT_S: Final = 900.0  # it may have to save
ASK_TIMEOUT_S: Final = 10.0
NEXT_AFTER_S: Final = 1.0  # the start of a server is left the cores
RESTART_PAUSE_S: Final = 5.0  # after a process that was killed before it was needed
MOST_FRUITLESS: Final = 5  # deaths in a row before anything more was done
FRUITFUL_S: Final = 60.0  # what a server was told does not kill it so late
_UPGRADE: Final = signal.SIGUSR2
_TURN_S: Final = 1.0
_SIGNALLED: Final = 128
_LEAST_REGIONS: Final = 64
_MOST_REGIONS: Final = 4096


@final
@dataclass(slots=True, eq=False)
class ServeProcess:
    """A process that serves, or waits to. It ends with its channel."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    version: ServeVersion | None = None  # once it has imported all
    serves: bool = False
    began_s: float = 0.0  # when it was told what to serve
    makes_room: bool = False  # for another process, by its death

    @staticmethod
    def start() -> ServeProcess:
        """Start one, which does not hear what a terminal tells this process; does not block. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, ExitStack() as undo:
            undo.enter_context(ours)
            command = [sys.executable, "-P", "-m", "paceline.serve.process", str(theirs.fileno()), str(os.getpid())]
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                env=same_imports(),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            undo.pop_all()
        return ServeProcess(process, ours)

    def read(self) -> bool:
        """Take in what it says; return False once it has ended. Called when there is something to read."""
        try:
            message = self.channel.recv(ORDER_BYTES)
        except ConnectionError:
            message = b""
        if message and self.version is None:
            self.version = read_version(message)
        elif message:
            self.serves = True
        return bool(message)

    def wait_ready(self) -> ServeVersion:
        """Block until it has imported all; raises PacelineError if it does not."""
        self.channel.settimeout(START_TIMEOUT_S)
        with suppress(TimeoutError):
            self.read()
        self.channel.settimeout(None)
        if self.version is None:
            self.kill()
            raise PacelineError("the process that is to serve has not started: see what it wrote")
        return self.version

    def go(self, orders: ServeOrders, memory: MemoryHolder) -> None:
        """Have it serve; a process that is gone is found to be later."""
        self.began_s = time.monotonic()
        with suppress(OSError):
            socket.send_fds(self.channel, [orders.encode()], [memory.theirs.fileno()])

    def end(self) -> int:
        """Wait until it has ended, as its channel has; return its exit code (negative: the signal that killed it)."""
        code = self.process.wait()
        self.channel.close()
        return code

    def kill(self) -> None:
        """Kill it, and wait until it has ended."""
        self.process.kill()
        self.end()


@final
@dataclass(slots=True)
class RepeatedDeaths:
    """Whether processes that are killed one after the other have done anything between."""

    _done: int = -NUM_ENTRIES  # entries of all journals at the last death
    _num_fruitless: int = 0

    def note(self, memory: MemoryHolder, lived_s: float) -> bool:
        """Note that a process was killed; return whether the next one would only be killed as well."""
        done = sum(counts(memory.read(name, START_BYTES))[0] for name in _journals(memory))
        is_fruitless = lived_s < FRUITFUL_S and self._done <= done < self._done + NUM_ENTRIES
        self._num_fruitless = self._num_fruitless + 1 if is_fruitless else 0
        self._done = done
        return self._num_fruitless >= MOST_FRUITLESS


@final
@dataclass(slots=True)
class ServeSupervisor:
    """Has a process serve a folder until it is told to end; a context manager, which ends all processes at its end.

    Args:
        orders: what is served.
        folder: of the state, absolute.
        memory: with the socket and the lock in it.
    """

    orders: ServeOrders
    folder: Path
    memory: MemoryHolder
    _serving: ServeProcess | None = None
    _next: ServeProcess | None = None
    _next_at: float = 0.0  # when to start it
    _untold: bool = True  # that it cannot be started
    _has_failed: bool = False  # the last one that was to serve
    _deaths: RepeatedDeaths = field(default_factory=RepeatedDeaths)
    _is_ending: bool = False
    _upgrades: bool = False
    _undo: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        """Return this supervisor."""
        return self

    def __exit__(self, *error: object) -> None:
        """Kill what still runs, and free the memory."""
        for process in (self._serving, self._next):
            if process is not None:
                process.kill()
        self._undo.close()

    def run(self, first: ServeProcess | None = None) -> int:
        """Block until a signal to end, or until another supervisor has taken over; return the exit code.

        `first` is a process that is ready already.
        """
        signals = self._undo.enter_context(_signals())
        control = self._undo.enter_context(_control_socket(self.folder))
        self._next = first
        while True:
            self._advance()
            ours = {process.channel: process for process in (self._serving, self._next) if process is not None}
            readable, _, _ = select.select([signals, control, *ours], [], [], _TURN_S)
            for number in signals.recv(64) if signals in readable else b"":
                again = self._is_ending or self.orders.greets  # or nothing is served yet
                if number in ENDING_SIGNALS and again:
                    return _SIGNALLED + number
                self._heed(number)
            left = (self._serving, self._next)  # a signal may have ended one
            code = self._hear([process for end, process in ours.items() if end in readable and process in left])
            if code is not None:
                (self.folder / CONTROL_NAME).unlink(missing_ok=True)
                return code
            if control in readable and self._answer(control):
                return 0

    def _advance(self) -> None:
        """Have a process serve, and one wait to."""
        now = time.monotonic()
        if self._next is None and now >= self._next_at and (self._serving is None or self._serving.serves):
            self._start_next(now)
        waiting = self._next
        if waiting is None or waiting.version is None:
            return
        if self._serving is None:
            self._next, self._serving = None, waiting
            waiting.go(replace(self.orders, ends=self._is_ending), self.memory)
            self.orders = replace(self.orders, greets=False, checks=False)
        elif self._upgrades:
            self._upgrades = False
            self._hand_over_within(self._serving, waiting.version)

    def _start_next(self, now: float) -> None:
        """Start a process that waits to serve, or try again later: without it the one that serves goes on.

        Raises:
            OSError: the first one cannot be started.
        """
        try:
            self._next, self._untold = ServeProcess.start(), True
        except OSError as error:
            if self.orders.greets:  # nothing is served yet
                raise
            self._next_at = now + RESTART_PAUSE_S
            if self._untold:
                tell(
                    f"no other process can be started to go on if this server is killed; tried again: {explain(error)}"
                )
            self._untold = False

    def _heed(self, number: int) -> None:
        if number in ENDING_SIGNALS:
            self._is_ending = True
            if self._serving is not None and self._serving.serves:  # else once it heeds signals
                self._serving.process.terminate()
        elif number == _UPGRADE and not self._is_ending:
            self._upgrades = True
            if self._next is not None:
                self._next.kill()
            self._next, self._next_at = None, 0.0

    def _hear(self, talking: list[ServeProcess]) -> int | None:
        """Take in what processes say, and note those that have ended; return the exit code if that is the end."""
        for process in talking:
            served = process.serves
            if process.read():
                if process.serves and not served:
                    self._has_failed = False
                    self._next_at = time.monotonic() + NEXT_AFTER_S
                    if self._is_ending:
                        process.process.terminate()
                continue
            code = self._on_ended(process, process.end())
            if code is not None:
                return code
        return None

    def _on_ended(self, process: ServeProcess, code: int) -> int | None:
        """Note that a process has ended; return the exit code if that is the end."""
        self._next_at = time.monotonic() + RESTART_PAUSE_S
        if process is self._next:
            self._next = None
        else:
            self._serving = None
        if process.serves and code >= 0:
            return code
        if code < 0 and process.began_s:
            self._next_at = 0.0
            self._on_killed(process, code)
        elif code >= 0 and self._serving is None:
            if not _journals(self.memory):
                return code or EXIT_FAILURE
            self._tell_of_failure(code)
        return None

    def _tell_of_failure(self, code: int) -> None:
        """Say once that no process comes to serve, as it has said itself: what clients have pushed is kept for one."""
        if not self._has_failed:
            tell(
                f"the process that was to go on {describe_exit(code)} before it served, for the reason above; another "
                f"one is tried every {RESTART_PAUSE_S:g} s, as what clients have pushed since the last save is in "
                "memory alone. To give that up, end this server twice"
            )
        self._has_failed = True

    def _on_killed(self, process: ServeProcess, code: int) -> None:
        if process.makes_room and code == -signal.SIGKILL:  # its own, as it was told
            return
        happened = f"the process that serves (pid {process.process.pid}) {describe_exit(code)}"
        if process.makes_room or not self._deaths.note(self.memory, time.monotonic() - process.began_s):
            tell(f"{happened}; another process goes on in its place")
            return
        times = MOST_FRUITLESS + 1
        tell(f"{happened}, {times} times in a row before it had done anything more: the next goes on from its saves")
        for name in self.memory.names():
            if name not in (LISTENER, LOCK):
                self.memory.drop(name)
        self._deaths = RepeatedDeaths()

    def _hand_over_within(self, serving: ServeProcess, version: ServeVersion) -> None:
        """Have the process that serves make room for the one that was started anew."""
        if version.format != FORMAT:
            tell(_other_format(version.program))
            return
        tell(f"a process of paceline {version.program} takes over", NEWS)
        serving.makes_room = True
        with suppress(OSError):
            serving.channel.send(HAND_OVER)

    def _answer(self, control: socket.socket) -> bool:
        """Answer another supervisor that wants to take over; return whether it has."""
        with suppress(OSError, msgspec.DecodeError):
            asking, _ = control.accept()
            with asking:
                asking.settimeout(ASK_TIMEOUT_S)
                if _user_of(asking) == os.geteuid():
                    return self._offer(asking, read_version(asking.recv(ORDER_BYTES)))
        return False

    def _offer(self, asking: socket.socket, version: ServeVersion) -> bool:
        if version.format != FORMAT:
            asking.send(msgspec.json.encode(ServeOffer(refusal=_other_format(version.program))))
            return False
        waiting = self._next if self._next is not None and self._next.version is not None else None
        offer = ServeOffer(
            self.orders.address,
            serving=_pid_of(self._serving),
            waiting=_pid_of(waiting),
            metrics=self.orders.metrics,
        )
        asking.send(msgspec.json.encode(offer))
        if asking.recv(ORDER_BYTES) != HAND_OVER:
            return False
        if self._serving is not None:
            with suppress(OSError):
                self._serving.channel.send(HAND_OVER)
                self._serving.channel.settimeout(HAND_OVER_TIMEOUT_S)
                while self._serving.read():
                    pass
            self._serving.kill()
            self._serving = None
        # It may be slow to take all. While it lives nothing may serve here, as it goes on once it has: if it ends
        # before, this end says so at once.
        asking.settimeout(HAND_OVER_TIMEOUT_S)
        socket.send_fds(asking, [HAND_OVER], [self.memory.theirs.fileno()])
        is_taken = asking.recv(ORDER_BYTES) == TAKEN
        if is_taken:
            tell("another process has taken over", NEWS)
        return is_taken


def take_from(folder: Path, keep: MemoryHolder, check: Callable[[ServeOffer], None]) -> str:
    """Take over from the supervisor of this folder; return the address that it listens at.

    What it kept is in `keep` afterwards. Blocks until its process has made room; `check` is called with what it offers
    before, and may raise.

    Raises:
        UsageError: there is none, or it keeps memory of another format; it goes on then.
        PacelineError: it has not let go.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        end.settimeout(ASK_TIMEOUT_S)
        try:
            with _short(folder) as short:
                end.connect(f"{short}/{CONTROL_NAME}")
        except (FileNotFoundError, NotADirectoryError, ConnectionRefusedError) as error:
            raise UsageError(f"no server keeps its state in {folder}: start one without --take-over") from error
        try:
            end.send(ready())
            offer = msgspec.json.decode(end.recv(ORDER_BYTES), type=ServeOffer)
            if offer.refusal:
                raise UsageError(offer.refusal)
            check(offer)
            end.send(HAND_OVER)
            end.settimeout(HAND_OVER_TIMEOUT_S)
            _, descriptors, _, _ = socket.recv_fds(end, ORDER_BYTES, 1)
            with socket.socket(fileno=descriptors[0]) as theirs:
                _adopt_all(LastingMemory.connect(theirs), keep)
        except (OSError, IndexError, msgspec.DecodeError) as error:
            raise PacelineError(f"the server of {folder} has not let go of it: see what it wrote") from error
        with suppress(OSError):  # it was killed, now that all is here
            end.send(TAKEN)
            end.recv(1)  # it answers by closing its end
    return offer.address


def _adopt_all(found: LastingMemory, keep: MemoryHolder) -> None:
    for name in found.names:
        descriptor = found.descriptor(name)
        try:
            keep.adopt(name, descriptor)
            if name == LOCK:
                note_holder(descriptor)
        finally:
            os.close(descriptor)


def _journals(memory: MemoryHolder) -> list[str]:
    """Return the names of the journals of namespaces with which another process can go on."""
    return [name for name in memory.names() if name.endswith(f"/{JOURNAL}")]


def most_regions() -> int:
    """Return how many descriptors may be kept: the process that serves has each of them, and its connections."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_REGIONS if soft == resource.RLIM_INFINITY else soft // 2
    return max(_LEAST_REGIONS, min(most, _MOST_REGIONS))


def _pid_of(process: ServeProcess | None) -> int:
    return 0 if process is None else process.process.pid


def _other_format(program: str) -> str:
    return (
        f"paceline {program} cannot go on with what the server keeps in memory, which has another format: end the "
        "server, which saves, and start it again"
    )


@contextmanager
def _signals() -> Generator[socket.socket]:
    """Yield a socket from which the numbers of signals are read, as they come."""
    reader, writer = socket.socketpair()
    handlers = {number: signal.getsignal(number) for number in (*ENDING_SIGNALS, _UPGRADE)}
    heeded = [number for number, before in handlers.items() if before is not signal.SIG_IGN]
    with reader, writer:
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        try:
            for number in heeded:
                signal.signal(number, _note_nothing)
            yield reader
        finally:
            for number in heeded:
                signal.signal(number, handlers[number])
            signal.set_wakeup_fd(before)


def _note_nothing(_number: int, _frame: FrameType | None) -> None:
    """Heed a signal elsewhere: its number is written to a socket."""


@contextmanager
def _short(folder: Path) -> Generator[str]:
    """Yield a path of the folder that is short: addresses of sockets have 107 bytes."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


@contextmanager
def _control_socket(folder: Path) -> Generator[socket.socket]:
    """Listen in a folder, whose lock this server holds."""
    path = folder / CONTROL_NAME
    path.unlink(missing_ok=True)  # of a process that was killed, or has let go of it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control, _short(folder) as short:
        control.bind(f"{short}/{CONTROL_NAME}")
        path.chmod(0o600)
        control.listen(1)
        yield control


def _user_of(end: socket.socket) -> int:
    """Return the identity of the process that asks."""
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1]
