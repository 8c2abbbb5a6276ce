"""How a forked process ends: as Python does, without unloading what it shares where that would show nowhere.

At its end Python takes every module apart. In a forked process that writes to the pages which it shares with the
others, so that the kernel copies them first: four tenths of a second of a core for each worker.
"""

import atexit
import ctypes
import gc
import io
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from sysconfig import get_path
from typing import Final, final

_OWN_MODULES: Final = get_path("platstdlib")


@final
class QuickEnd:
    """Ends a forked process when all that Python calls at exit was called, unless something is left to Python's end."""

    def __init__(self) -> None:
        """Plan it; to be called before others register calls for the exit, as the first registered is called last."""
        self._code: int | None = None
        self._shared: set[str] = set()
        atexit.register(self._end)

    def prepare(self) -> None:
        """Note what all forked processes share; to be called before the first fork."""
        self._shared = _libraries()

    def run(self, program: Callable[[], None]) -> None:
        """Run the program of a process that was forked; raises what the program raises."""
        try:
            program()
        except SystemExit as ending:
            self._code = _exit_code(ending.code)
            raise
        except Exception:  # Python tells of it before the process ends
            self._code = 1
            raise
        self._code = 0

    def _end(self) -> None:
        # A library that the script has loaded may have something to do at the end, and so may an object.
        if self._code is None or not self._shared or _libraries() - self._shared or _something_ends(gc.get_objects()):
            return
        try:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            ctypes.CDLL(None).fflush(None)  # what libraries have written
        except (OSError, ValueError, AttributeError):  # full, closed, or none: Python knows what to do and to say
            return
        os._exit(self._code)


def _exit_code(code: object) -> int:
    """Return the exit code of a process that ends with this SystemExit."""
    return 0 if code is None else code & 0xFF if isinstance(code, int) else 1


def _libraries() -> set[str]:
    """Return the shared libraries of this process, also those that ctypes has loaded, without Python's own modules."""
    with suppress(OSError):
        mapped = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text(errors="replace").splitlines())
        files = {fields[5] for fields in mapped if len(fields) == 6 and "x" in fields[1] and fields[5].startswith("/")}
        return {file for file in files if not file.startswith(_OWN_MODULES)}
    return set()


def _something_ends(objects: Sequence[object]) -> bool:
    """Return whether there is an open file, or an object that does something when it ends; ours are done by now."""
    kinds = {kind for kind in set(map(type, objects)) if not _is_ours(kind) and _has_end(kind)}
    return any(type(each) in kinds and not (isinstance(each, io.IOBase) and each.closed) for each in objects)


def _has_end(kind: type) -> bool:
    return any("__del__" in vars(base) for base in kind.__mro__)


def _is_ours(kind: type) -> bool:
    return str(kind.__module__).startswith("paceline.") or issubclass(kind, socket.socket)  # the kernel closes sockets
