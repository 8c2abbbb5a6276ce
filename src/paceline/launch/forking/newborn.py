"""The entry of the nursery, and of all that it forks: `python -m paceline.launch.forking.newborn RUN_DIR SCRIPT`.

Standard input is a socket from the launcher. Each message asks for one process, which goes on as `python -m MODULE`
would: with its own streams, environment, arguments, import path, session and chance. The run directory is named only
to be seen in a list of processes.
"""

import gc
import importlib
import json
import os
import runpy
import socket
import sys
import threading
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from paceline.launch.environment import find_launcher, import_folders, replace_all
from paceline.launch.forking.adoption import wait_adopted
from paceline.launch.forking.foresight import may_make_optimizers
from paceline.launch.forking.title import show_as
from paceline.launch.lifeline import EXIT_CODE, die_with_launcher

READY: Final = b"ready"
GO: Final = b"go"
BIRTH_TIMEOUT_S: Final = 10.0
REQUEST_BYTES_MAX: Final = 1024 * 1024  # more than a socket takes as one message
NUM_STREAMS: Final = 3


@dataclass(frozen=True, slots=True)
class Birth:
    """What a process that was just forked is to become: `command` is (executable, "-m", module, *arguments)."""

    command: tuple[str, ...]
    environment: dict[str, str]
    streams: tuple[int, ...]  # the descriptors that become standard input, output and error
    channel: socket.socket  # to the launcher

    def grow_up(self) -> None:
        """Become that process, and run its module to the end; raises what the module raises."""
        os.setsid()
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        self._wait_go()
        sys.path[:] = import_path(import_folders(self.environment))
        replace_all(self.environment)
        show_as(self.command, self.environment)
        sys.orig_argv[:] = self.command
        _, option, module, *arguments = self.command
        sys.argv[:] = [option, *arguments]
        reseed()
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    def _wait_go(self) -> None:
        """Block until the launcher has this process for its child and wants it; else end here, having done nothing."""
        launcher = find_launcher()
        if launcher is None or not wait_adopted(launcher, self.channel, BIRTH_TIMEOUT_S):
            os._exit(EXIT_CODE)
        with self.channel:
            self.channel.settimeout(BIRTH_TIMEOUT_S)
            try:
                self.channel.sendall(str(os.getpid()).encode())
                wanted = self.channel.recv(len(GO)) == GO
            except OSError:  # the launcher has given up on this process, or is gone
                wanted = False
        if not wanted:
            os._exit(EXIT_CODE)


def main() -> None:
    """Fork processes until the launcher wants no more; returns in each of them when it has run its module."""
    die_with_launcher()
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as requests:
        import_ahead(Path(sys.argv[-1]))
        if not may_fork():
            return
        requests.sendall(READY)
        birth = wait_birth(requests)
    if birth is not None:
        birth.grow_up()


def import_ahead(script: Path) -> None:
    """Import what workers and servers do, from where a script would: its folder is on PYTHONPATH, ours is left out."""
    if not sys.flags.safe_path:
        del sys.path[0]
    import torch

    importlib.import_module("paceline.current")  # by name: it stands above us
    if may_make_optimizers(script):
        torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports as much again
    gc.collect()
    gc.freeze()  # so that collections do not touch, and thereby copy, what all processes share


def may_fork() -> bool:
    """Tell whether nothing was imported that a fork would break: threads, and open devices."""
    import torch

    return threading.active_count() == 1 and not (torch.cuda.is_initialized() or torch.xpu.is_initialized())


def wait_birth(requests: socket.socket) -> Birth | None:
    """Block, forking a process for each request; returns in each of these, and None once no more is asked for."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, REQUEST_BYTES_MAX, NUM_STREAMS + 1)
        if not message:
            return None
        if _fork_orphan():
            *streams, channel = descriptors
            asked = json.loads(message)
            return Birth(tuple(asked["command"]), asked["environment"], tuple(streams), socket.socket(fileno=channel))
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_orphan() -> bool:
    """Fork a process whose parent ends at once; True in that process."""
    # OpenBLAS ends its idle threads in a fork, but Python may still count them and warn.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            return False
        if os.fork():
            os._exit(0)
        return True


def import_path(folders: list[str]) -> list[str]:
    """Return `sys.path` as `python -m` makes it, with these folders from the environment instead of our own."""
    here = [] if sys.flags.safe_path else [os.getcwd()]
    ours = import_folders()
    return here + list(dict.fromkeys(folders + [entry for entry in sys.path if entry not in ours]))


def reseed() -> None:
    """Give this process chance of its own; Python's own `random` sees to that by itself."""
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()


if __name__ == "__main__":
    main()
