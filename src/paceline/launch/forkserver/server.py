"""The launcher's end of the fork server: a process that has imported torch, and forks the processes of the job.

Starting Python and importing torch takes seconds of a core, and every process of a job would do it. The fork server
does it once. A forked process is a child of the launcher, and differs from one started afresh in its start only.
When the fork server fails, processes are started afresh.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, Self, final

from paceline.launch.child import Launch, Process, pin, start_process
from paceline.launch.forkserver import FORK_TIMEOUT_S, GO, READY
from paceline.launch.forkserver.subreaper import adopting
from paceline.stopwatch import Stopwatch

READY_TIMEOUT_S: Final = 120.0  # each process would import torch by itself then, on a machine that is busy already


@final
@dataclass(frozen=True, slots=True)
class Forked:
    """A process that the fork server has forked; a child of this process."""

    pid: int
    stdin: IO[bytes] | None
    stdout: IO[bytes]
    stderr: IO[bytes]

    def wait(self) -> int:
        """Block until it has ended, and return its exit code (negative: the signal that killed it)."""
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


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

    def __enter__(self) -> Self:
        """Return this fork server."""
        return self

    def __exit__(self, *error: object) -> None:
        """Let its process end."""
        self._requests.close()
        self._theirs.close()

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
        """Have a process forked; start it afresh when that fails."""
        if self._ready:
            try:
                return self._fork(launch)
            except OSError:  # it was killed, does not answer, or the machine is short of something
                self._ready = False
        return start_process(launch)

    def _fork(self, launch: Launch) -> Forked:
        with ExitStack() as given, ExitStack() as kept:
            request = given.enter_context(open(os.memfd_create("request"), "wb"))  # of any size
            request.write(json.dumps({"command": launch.command, "environment": launch.variables}).encode())
            request.flush()
            channel, theirs = map(given.enter_context, socket.socketpair())
            if launch.takes_orders:
                orders, stdin = _pipe(given, kept)
            else:
                orders, stdin = given.enter_context(open(os.devnull, "rb")), None
            stdout, out = _pipe(kept, given)
            stderr, err = _pipe(kept, given)
            self._requests.settimeout(FORK_TIMEOUT_S)
            channel.settimeout(FORK_TIMEOUT_S)
            files = [file.fileno() for file in (request, orders, out, err, theirs)]
            with adopting():
                socket.send_fds(self._requests, [GO], files if launch.memory is None else [*files, launch.memory])
                theirs.close()  # so that the channel ends with the fork server
                pid = _read_pid(channel)
            pin(pid, launch.cores)
            channel.sendall(GO)
            kept.pop_all()
        return Forked(pid, stdin, stdout, stderr)


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
