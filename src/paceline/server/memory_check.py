"""Whether a server has room for one more table, said before it is made: memory that is not there kills the process."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Final

from paceline.errors import UsageError

MAX_TABLES: Final = 4096
_ALWAYS_FINE_BYTES: Final = 64 << 20  # so much is not worth looking
_CGROUP: Final = Path("/sys/fs/cgroup")


def require_room(table: str, size_bytes: int, num_tables: int, where: str, held_bytes: int = 0) -> None:
    """Raise UsageError if a table of this size cannot be held beside what is there, tables of so many bytes."""
    if num_tables >= MAX_TABLES:
        raise UsageError(f"{where} cannot hold table '{table}': it has {num_tables} tables, at most {MAX_TABLES}")
    if size_bytes + held_bytes > _ALWAYS_FINE_BYTES and size_bytes > (room_bytes := _room_bytes()):
        raise UsageError(
            f"{where} cannot hold table '{table}': it needs {size_bytes} bytes and {room_bytes} are free. Use more "
            "servers, or machines with more memory."
        )


def require_memory(what: str, size_bytes: int) -> None:
    """Raise UsageError if so much memory cannot be had for something that a worker asks for."""
    if size_bytes > _ALWAYS_FINE_BYTES and size_bytes > (room_bytes := _room_bytes()):
        raise UsageError(f"there is no room for {what}: it needs {size_bytes} bytes and {room_bytes} are free")


def _room_bytes() -> int:
    """Return the memory that is free for this process: of the machine, or what its group is allowed of that."""
    import psutil

    return min(psutil.virtual_memory().available, _allowed_bytes())


@cache
def _allowed_bytes() -> int:
    """Return what the group of this process may have in all; what it has is cached files too, and says little."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        text = (_CGROUP / own / "memory.max").read_text().strip()
    except (OSError, StopIteration):
        return sys.maxsize
    return int(text) if text.isdigit() else sys.maxsize
