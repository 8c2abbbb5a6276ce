"""The launcher's end of the fork server: a process that has imported torch, and forks the processes of the job.

Starting Python and importing torch takes seconds of a core, and every process of a job would do it. The fork server
does it once. A forked process is a child of the launcher, and differs from one started afresh in its start only.
When the fork server fails, processes are started afresh.
"""

import json
import os
import select
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Final, Self, final

import msgspec

from paceline.errors import ProtocolBug
from paceline.launch.child import Launch, Process, pin, start_process
from paceline.launch.forkserver import FORK, FORK_TIMEOUT_S, GO, READY
from paceline.launch.forkserver.subreaper import adopting
from paceline.stopwatch import Stopwatch

READY_TIMEOUT_S: Final = 120.0  # each process would import torch by itself then, on a machine that is busy already
NUM_SPARES: Final = 2  # for two servers at once, or one that is killed again as it comes up


@final
class Forked(msgspec.Struct, frozen=True):
    """A process that the fork server has forked; a child of this process."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes]
    stderr: IO[bytes]

    def wait(self) -> int:
        """Block until it has ended, and return its exit code (negative: the signal that killed it)."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@final
class Unnamed(msgspec.Struct, frozen=True):
    """A process that was forked and waits to be told what it is to become; it ends with its channel."""

    process: Forked
    channel: socket.socket

    def become(self, launch: Launch) -> Forked:
        """Have it run this program, and return it; raises OSError when it is gone, and closes all of it."""
        asked = json.dumps({"command": launch.command, "environment": launch.variables}).encode()
        try:
            pin(self.process.pid, launch.cores)
            with self.channel, open(os.memfd_create("request"), "wb") as request:  # of any size
                request.write(asked)
                request.flush()
                files = [request.fileno()] if launch.memory is None else [request.fileno(), launch.memory]
                socket.send_fds(self.channel, [GO], files)
        except OSError:
            self.close()
            raise
        return self.process

    def close(self) -> None:
        """Let it end, having done nothing."""
        for file in (self.channel, self.process.stdin, self.process.stdout, self.process.stderr):
            if file is not None:
                file.close()


@final
class _Coming(msgspec.Struct, frozen=True):
    """A process that was asked for.

    Args:
        channel: on which it says its number.
        streams: our ends of its standard streams.
        adopts: has this process become its parent.
        held: all of these.
    """

    channel: socket.socket
    streams: tuple[IO[bytes] | None, IO[bytes], IO[bytes]]
    adopts: ExitStack
    held: ExitStack

    def is_here(self) -> bool:
        """Return whether it is there, or will not be; does not block."""
        return bool(select.select([self.channel], [], [], 0.0)[0])

    def take(self) -> Unnamed:
        """Return it once it is there; raises OSError if it is not in time."""
        with self.held:
            pid = _read_pid(self.channel)
            self.adopts.close()
            self.held.pop_all()
        return Unnamed(Forked(pid, *self.streams), self.channel)

    def close(self) -> None:
        """Do without it."""
        self.held.close()


@final
class ForkServer:
    """Starts processes by having them forked. A context manager: leaving it ends the fork server's process."""

    def __init__(self, environment: Mapping[str, str], run_dir: Path, module: str, script: Path) -> None:
        """Plan it; `environment` is from `fork_server_environment`. `module` and what `script` needs are preloaded."""
        command = (sys.executable, "-m", "paceline.launch.forkserver.child", str(run_dir), module, str(script))
        self.launch = Launch(role="fork-server", name="fork server", rank=0, command=command, environment=environment)
        # Whole messages, and the end of either side is seen by the other.
        self._requests, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.setblocking(False)
        self._ready = False
        self._spares: list[Unnamed] = []  # forked ahead, to take orders
        self._coming: _Coming | None = None  # another one, which was asked for

    def __enter__(self) -> Self:
        """Return this fork server."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let its process end."""
        self._requests.close()
        self._theirs.close()
        for spare in self._spares:
            spare.close()
        if self._coming is not None:
            self._coming.close()

    def start_server(self, launch: Launch) -> Process:
        """Start its process, as `self.launch` says; does not wait until it is ready."""
        self._since_start = Stopwatch()
        with self._theirs:
            return start_process(launch, stdin=self._theirs.fileno())

    def settled(self) -> bool:
        """Return whether it is ready, or has failed to be in time; does not block."""
        try:
            self._ready = self._requests.recv(len(READY)) == READY
        except BlockingIOError:
            return self._since_start.elapsed_s() >= READY_TIMEOUT_S
        except ConnectionError:
            return True
        return True

    def start(self, launch: Launch) -> Process:
        """Have a process forked, unless there is one already; start it afresh when that fails."""
        while launch.takes_orders and (self._spares or self._coming):
            with suppress(OSError):  # it was killed
                return (self._spares.pop() if self._spares else self._take_coming()).become(launch)
        if self._ready:
            try:
                return self._ask(takes_orders=launch.takes_orders).take().become(launch)
            except OSError:  # it was killed, does not answer, or the machine is short of something
                self._ready = False
        return start_process(launch)

    def prepare_spare(self) -> None:
        """Have a process forked ahead, for the next one that takes orders, unless there are enough; does not block.

        Call it again to find whether it is there.
        """
        if not self._ready:
            return
        try:
            if self._coming is not None and self._coming.is_here():
                self._spares.append(self._take_coming())
            if self._coming is None and len(self._spares) < NUM_SPARES:
                self._coming = self._ask(takes_orders=True)
        except OSError:  # as in `start`
            self._ready = False

    def _take_coming(self) -> Unnamed:
        coming, self._coming = self._coming, None
        if coming is None:
            raise ProtocolBug("no process was asked for")
        try:
            return coming.take()
        except OSError:  # as in `start`
            self._ready = False
            raise

    def _ask(self, *, takes_orders: bool) -> _Coming:
        """Ask for a process; raises OSError."""
        with ExitStack() as given, ExitStack() as kept:
            channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            kept.enter_context(channel)
            given.enter_context(theirs)
            if takes_orders:
                orders, stdin = _pipe(given, kept)
            else:
                orders, stdin = given.enter_context(open(os.devnull, "rb")), None
            stdout, out = _pipe(kept, given)
            stderr, err = _pipe(kept, given)
            self._requests.settimeout(FORK_TIMEOUT_S)
            channel.settimeout(FORK_TIMEOUT_S)
            adopts = kept.enter_context(ExitStack())
            adopts.enter_context(adopting())
            socket.send_fds(self._requests, [FORK], [file.fileno() for file in (orders, out, err, theirs)])
            # With `given`, our copies of its ends are closed, so that the channel ends with the fork server.
            return _Coming(channel, (stdin, stdout, stderr), adopts, kept.pop_all())


def _pipe(readers: ExitStack, writers: ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return (
        readers.enter_context(open(reader, "rb", buffering=0)),
        writers.enter_context(open(writer, "wb", buffering=0)),
    )


def _read_pid(channel: socket.socket) -> int:
    pid = channel.recv(32)
    if not pid:
        raise ConnectionResetError("the fork server has ended")
    return int(pid)
