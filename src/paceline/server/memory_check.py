"""Memory checks before a large allocation: the kernel kills a process that exceeds its memory."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Final

from paceline.errors import UsageError

MAX_TABLES: Final = 4096
_ALWAYS_FINE_BYTES: Final = 64 << 20  # smaller allocations are not checked
_CGROUP: Final = Path("/sys/fs/cgroup")


def require_few_tables(table: str, num_tables: int, where: str) -> None:
    """Raise UsageError if there is no room for one table more than these."""
    if num_tables >= MAX_TABLES:
        raise UsageError(f"{where} cannot hold table '{table}': it has {num_tables} tables, at most {MAX_TABLES}")


def require_room(table: str, size_bytes: int, where: str, held_bytes: int) -> None:
    """Raise UsageError if a table of this size does not fit beside the tables that exist, `held_bytes` in all."""
    if size_bytes + held_bytes > _ALWAYS_FINE_BYTES and size_bytes > (room_bytes := _room_bytes()):
        raise UsageError(
            f"{where} cannot hold table '{table}': it needs {size_bytes} bytes and {room_bytes} are free. Use more "
            "servers, or machines with more memory."
        )


def has_plenty(size_bytes: int) -> bool:
    """Return whether so much memory may be taken for the sake of speed: a quarter of what is free, at most."""
    return size_bytes <= _ALWAYS_FINE_BYTES or size_bytes <= _room_bytes() // 4


def require_memory(what: str, size_bytes: int) -> None:
    """Raise UsageError if there is too little free memory for something that a worker requests."""
    if size_bytes > _ALWAYS_FINE_BYTES and size_bytes > (room_bytes := _room_bytes()):
        raise UsageError(f"there is no room for {what}: it needs {size_bytes} bytes and {room_bytes} are free")


def _room_bytes() -> int:
    """Return the free memory of the machine, or the limit of this process's cgroup if that is smaller."""
    import psutil

    return min(psutil.virtual_memory().available, _allowed_bytes())


@cache
def _allowed_bytes() -> int:
    """Return the memory limit of this process's cgroup. Its current use includes cached files."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
        text = (_CGROUP / own / "memory.max").read_text().strip()
    except (OSError, StopIteration):
        return sys.maxsize
    return int(text) if text.isdigit() else sys.maxsize
