"""Starts `paceline run` without its imports: the launcher and its fork server are forked from one that has torch.

A job spends most of its start on imports of torch. Here a process does them once for all tests of this process, and
each job's launcher is forked from it, as workers are forked in a job; what workers and servers run in is the same. The
start of a launcher by the shell, and that of a fork server by the launcher, have tests of their own: those in
`tests/launch/forkserver`, and all that say `sys.executable`.

`python -m tests.launch.warm run ...` is such a launcher: its stderr goes where its stdout goes, and this
folder's parent is on its import path.
"""

import atexit
import json
import os
import runpy
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import cache
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import IO

import psutil
from tests.tidy.tree import ROOT

import paceline.api.preloaded as preloaded  # what a fork server has imported, too
from paceline import cli
from paceline.job.environment import child_environment, fork_server_environment, import_folders, replace_all
from paceline.launch.child import Launch, Process, start_process
from paceline.launch.forkserver import server as forkserver
from paceline.launch.forkserver.child import import_path, set_process_title
from paceline.launch.forkserver.server import Forked, ForkServer

__all__ = ["preloaded", "start_launcher"]

READY_WITHIN_S = 200.0
MESSAGE_BYTES = 1 << 17


def start_launcher(*arguments: str, environment: Mapping[str, str]) -> tuple[psutil.Process, IO[str]]:
    """Start `paceline` with these arguments; return its process, a child of this one, and what it writes."""
    started = start_module(__name__, *arguments, environment=environment)
    started.stderr.close()
    return psutil.Process(started.pid), TextIOWrapper(BufferedReader(started.stdout))


def run_job(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `paceline run` with these arguments to its end, whose `stdout` is all that was said."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    process, said = start_launcher("run", "--quiet", "--no-progress", *map(str, arguments), environment=variables)
    try:
        with said:
            told = said.read()  # for as long as pytest lets a test take
        return subprocess.CompletedProcess(arguments, process.wait() or 0, told, "")
    finally:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def start_module(module: str, *arguments: str, environment: Mapping[str, str]) -> Forked:
    """Start `python -m module` with these arguments, as a child of this process."""
    command = (sys.executable, "-m", module, *arguments)
    launch = Launch(role="worker", name="a test's process", rank=0, command=command, environment=environment)
    import pytest  # not into the process that others are forked from

    warm = _warm_process()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(forkserver, "FORK_TIMEOUT_S", READY_WITHIN_S)
        started = warm.start(launch)
    assert isinstance(started, Forked), "the process that others are forked from is gone"
    return started


@cache
def _warm_process() -> ForkServer:
    """Return the process that launchers are forked from; it ends with this one."""
    assert threading.current_thread() is threading.main_thread(), "it would end with the thread that started it"
    environment = {**child_environment(1, 1), "OMP_NUM_THREADS": "1"}
    open_process = ExitStack()
    warm = open_process.enter_context(
        ForkServer(fork_server_environment(environment, ROOT), Path("warm"), __name__, Path("unknown"))
    )
    process = warm.start_server(warm.launch)
    assert isinstance(process, subprocess.Popen)
    assert process.stdout is not None
    deadline_s = time.monotonic() + READY_WITHIN_S
    while not warm.settled():
        select.select([process.stdout], [], [], 0.01)
        assert time.monotonic() < deadline_s, "no launcher can be forked: the process with torch is not ready"

    def end() -> None:
        open_process.close()
        process.communicate()

    atexit.register(end)
    return warm


def main() -> None:
    os.dup2(1, 2)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        become_fork_server(theirs)
        return
    theirs.close()

    def start(launch: Launch, stdin: int | None = None) -> Process:
        return start_process(launch, stdin) if launch.role != "fork-server" else tell(ours, pid, launch, stdin)

    forkserver.start_process = start
    cli.main()


def tell(channel: socket.socket, pid: int, launch: Launch, stdin: int | None) -> Forked:
    """Have the process that waits become this fork server."""
    assert stdin is not None
    asked = json.dumps({"command": launch.command, "environment": launch.variables}).encode()
    assert len(asked) <= MESSAGE_BYTES
    (stdout, out), (stderr, err) = os.pipe(), os.pipe()
    socket.send_fds(channel, [asked], [stdin, out, err])
    channel.close()
    os.close(out)
    os.close(err)
    return Forked(pid, None, open(stdout, "rb", buffering=0), open(stderr, "rb", buffering=0))


def become_fork_server(channel: socket.socket) -> None:
    """Wait to be told what to be, and be it; returns when the launcher ends without need of a fork server."""
    set_process_title((sys.executable, "-m", __name__, "waits"), {})
    with channel:
        message, streams, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 3)
    if not message:
        return
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    asked = json.loads(message)
    _, _, module, *arguments = asked["command"]
    sys.path[:] = import_path(import_folders(asked["environment"]))
    replace_all(asked["environment"])
    set_process_title(asked["command"], asked["environment"])
    sys.argv[:] = ["-m", *arguments]
    del sys.modules[module]  # as where a process is forked
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
