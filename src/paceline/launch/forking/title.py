"""What `ps` and /proc say about a process that was forked: the command and the environment it would have been given.

Linux keeps where both lie in memory, and a process may say that they lie elsewhere. Where that is not allowed, a forked
process is listed under the command of the one that forked it, which does no harm.
"""

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

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


def show_as(command: Sequence[str], environment: Mapping[str, str]) -> None:
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
