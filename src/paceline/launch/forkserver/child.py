"""The fork server: `python -m paceline.launch.forkserver.child RUN_DIR PRELOADED SCRIPT`.

Standard input is a socket from the launcher. Each message asks for one process; a file with its command and environment
follows on a channel of its own. It runs as `python -m MODULE` would: with its own streams, environment, arguments,
import path, session and random state. PRELOADED is the module that is imported before the first fork. RUN_DIR only
shows in a list of processes.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, TypedDict

import msgspec

from paceline.errors import EXIT_KILLED
from paceline.job.environment import find_launcher, import_folders, memory_variable, replace_all
from paceline.launch.entry import die_with_launcher
from paceline.launch.forkserver import FORK, FORK_TIMEOUT_S, GO, READY
from paceline.launch.forkserver.ending import QuickEnd
from paceline.launch.forkserver.subreaper import wait_adopted
from paceline.launch.script import may_make_optimizers

PR_SET_MM: Final = 35
PR_SET_MM_MAP: Final = 14
UNCHANGED: Final = 0xFFFF_FFFF  # instead of a descriptor: keep the link to the executable

STAT: Final = Path("/proc/self/stat")
# The numbers of fields of /proc/self/stat, as proc(5) counts them.
STAT_FIELDS: Final = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
}


class _MemoryMap(ctypes.Structure):
    """The kernel's `struct prctl_mm_map`."""

    _fields_ = [
        ("start_code", ctypes.c_uint64),
        ("end_code", ctypes.c_uint64),
        ("start_data", ctypes.c_uint64),
        ("end_data", ctypes.c_uint64),
        ("start_brk", ctypes.c_uint64),
        ("brk", ctypes.c_uint64),
        ("start_stack", ctypes.c_uint64),
        ("arg_start", ctypes.c_uint64),
        ("arg_end", ctypes.c_uint64),
        ("env_start", ctypes.c_uint64),
        ("env_end", ctypes.c_uint64),
        ("auxv", ctypes.c_void_p),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def set_process_title(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have this process listed with this command and environment, where there is a /proc."""
    layout_now = _layout_now()
    if not layout_now:
        return
    words = _joined(command)
    text = words + _joined(f"{name}={value}" for name, value in environment.items())
    libc = ctypes.CDLL(None)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    start = libc.malloc(ctypes.c_size_t(len(text)))  # never freed: it is read for as long as the process lives
    ctypes.memmove(start, text, len(text))
    middle, end = start + len(words), start + len(text)
    places = {"arg_start": start, "arg_end": middle, "env_start": middle, "env_end": end, "brk": libc.sbrk(0)}
    layout = _MemoryMap(**layout_now, **places, exe_fd=UNCHANGED)
    libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(layout), ctypes.c_ulong(ctypes.sizeof(layout)), 0)


def _layout_now() -> dict[str, int]:
    # The name of the program is in brackets and may hold anything, so count behind it: from the third field on.
    try:
        fields = STAT.read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return {}
    return {name: int(fields[number - 3]) for name, number in STAT_FIELDS.items()}


def _joined(words: Iterable[str]) -> bytes:
    return b"".join(os.fsencode(word) + b"\0" for word in words)


NUM_STREAMS: Final = 3


class ProgramRequest(TypedDict):
    """What a process is to become: `command` is (executable, "-m", module, *arguments)."""

    command: list[str]
    environment: dict[str, str]


class ForkedProcess(msgspec.Struct, frozen=True):
    """A process that was just forked, and is told by the launcher what it is to become; maybe much later."""

    streams: tuple[int, ...]  # the descriptors that become standard input, output and error
    channel: socket.socket  # to the launcher

    def run_command(self) -> None:
        """Become the process that is asked for, and run its module to the end; raises what the module raises."""
        os.setsid()
        for number, stream in enumerate(self.streams):
            os.dup2(stream, number)
            os.close(stream)
        asked, memory = self._wait_asked()
        command, environment = asked["command"], asked["environment"]
        sys.path[:] = import_path(import_folders(environment))
        replace_all({**environment, **memory_variable(memory)})
        set_process_title(command, environment)
        sys.orig_argv[:] = command
        _, option, module, *arguments = command
        sys.argv[:] = [option, *arguments]
        reseed()
        sys.modules.pop(module, None)  # imported ahead by others; runpy warns of a module that then runs as __main__
        runpy.run_module(module, run_name="__main__", alter_sys=True)

    def _wait_asked(self) -> tuple[ProgramRequest, int | None]:
        """Block until the launcher has this process for its child, and return what it is to become and its memory.

        When the launcher does not want it, or is gone, the process ends here, having done nothing.
        """
        launcher = find_launcher()
        if launcher is None or not wait_adopted(launcher, self.channel, FORK_TIMEOUT_S):
            os._exit(EXIT_KILLED)
        with self.channel:
            descriptors = list[int]()
            with suppress(OSError):  # the launcher has given up on this process, or is gone
                self.channel.sendall(str(os.getpid()).encode())
                _, descriptors, _, _ = socket.recv_fds(self.channel, len(GO), 2)
        if not descriptors:
            os._exit(EXIT_KILLED)
        request, *memory = descriptors
        with open(request, "rb") as file:
            file.seek(0)  # the launcher has written it with the same position
            return json.load(file), memory[0] if memory else None


def main() -> None:
    """Fork processes until the launcher wants no more; returns in each of them when it has run its module."""
    die_with_launcher()
    ending = QuickEnd()
    with socket.socket(fileno=os.dup(sys.stdin.fileno())) as requests:
        preload(sys.argv[-2], Path(sys.argv[-1]))
        ending.prepare()
        if not may_fork():
            return
        requests.sendall(READY)
        forked = serve_requests(requests)
    ending.run(lambda: None if forked is None else forked.run_command())


def preload(module: str, script: Path) -> None:
    """Import what workers and servers do, from where a script would: its folder is on PYTHONPATH, ours is left out."""
    if not sys.flags.safe_path:
        del sys.path[0]
    gc.disable()  # imports leave little garbage, and to look for it takes a fifth of their time
    import torch

    importlib.import_module(module)
    if may_make_optimizers(script):
        torch.optim.SGD([torch.zeros(1)], lr=0.1)  # the first optimizer imports as much again
    gc.freeze()  # so that collections do not touch, and thereby copy, what all processes share
    gc.enable()


def may_fork() -> bool:
    """Return whether a fork is safe: no thread was started, and no device opened."""
    import torch

    return threading.active_count() == 1 and not (torch.cuda.is_initialized() or torch.xpu.is_initialized())


def serve_requests(requests: socket.socket) -> ForkedProcess | None:
    """Block, forking a process for each request; returns in each of these, and None once no more is asked for."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, len(FORK), NUM_STREAMS + 1)
        if not message:
            return None
        try:
            is_forked = _fork_orphan()
        except OSError:  # no process can be started: the launcher hears of it as the channel ends
            is_forked = False
        if is_forked:
            *streams, channel = descriptors
            return ForkedProcess(tuple(streams), socket.socket(fileno=channel))
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
        try:
            if os.fork():
                os._exit(0)
        except OSError:
            os._exit(EXIT_KILLED)
        return True


def import_path(folders: list[str]) -> list[str]:
    """Return `sys.path` as `python -m` makes it, with these folders from the environment instead of our own."""
    here = [] if sys.flags.safe_path else [os.getcwd()]
    ours = import_folders()
    return here + list(dict.fromkeys(folders + [entry for entry in sys.path if entry not in ours]))


def reseed() -> None:
    """Give this process its own random state; Python's own `random` reseeds itself."""
    import numpy
    import torch

    numpy.random.seed()
    torch.default_generator.seed()


if __name__ == "__main__":
    main()
