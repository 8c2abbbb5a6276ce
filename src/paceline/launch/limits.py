"""Limits of the machine and of the shell that are too low: checked before a start, or explained when one is hit."""

import errno
import resource
from collections.abc import Mapping
from typing import Final

from paceline.errors import UsageError

MIB: Final = 1 << 20
# What each process needs to import torch, and what a launcher needs for itself and each process that it starts.
LEAST_ADDRESS_BYTES: Final = 1024 * MIB
FILES_OF_LAUNCHER: Final = 24
FILES_OF_PROCESS: Final = 5
MANY_FILES: Final = 1 << 20

_DISK: Final = "free some space, or name another folder (TMPDIR, --run-dir, PACELINE_RUN_DIR, --state, --views)"
_REMEDIES: Final[Mapping[int, str]] = {
    errno.EMFILE: "raise the limit in the shell that starts it, `ulimit -n 4096`",
    errno.ENFILE: "the whole machine has no more: end other programs, or raise fs.file-max",
    errno.EAGAIN: "the limit of processes and threads is reached: raise it, `ulimit -u`, or start fewer workers",
    errno.ENOMEM: "start fewer processes, or raise the limit in the shell that starts it, `ulimit -v unlimited`",
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EROFS: _DISK,
    errno.EFBIG: "raise the limit of file sizes in the shell that starts it, `ulimit -f unlimited`",
    errno.EACCES: "check who owns it and what its mode allows",
    errno.EPERM: "check who owns it and what its mode allows",
}


def check_limits(num_processes: int) -> None:
    """Raise UsageError where the limits of the shell let no job of so many processes run."""
    needed = FILES_OF_LAUNCHER + FILES_OF_PROCESS * num_processes
    for limit, least, text in (
        (resource.RLIMIT_FSIZE, 1, "no file can be written (`ulimit -f` is {found}): raise it, `ulimit -f unlimited`"),
        (
            resource.RLIMIT_AS,
            LEAST_ADDRESS_BYTES,
            "`ulimit -v` allows each process {found} bytes of addresses, and torch alone needs {least}: raise it, "
            "`ulimit -v unlimited`",
        ),
        (
            resource.RLIMIT_NOFILE,
            needed,
            "`ulimit -n` allows {found} open files, and a launcher of {num} processes needs {least}: raise it, "
            "`ulimit -n {least}`, or start fewer processes",
        ),
    ):
        found, _ = resource.getrlimit(limit)
        if found != resource.RLIM_INFINITY and found < least:
            raise UsageError(text.format(found=found, least=least, num=num_processes))


def files_left(num_processes: int) -> int:
    """Return how many files a launcher of so many processes may open beside what it needs for them."""
    found, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MANY_FILES if found == resource.RLIM_INFINITY else found
    return max(0, most - FILES_OF_LAUNCHER - FILES_OF_PROCESS * num_processes)


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that the machine or its limits are at fault, rather than the code."""
    return isinstance(error, OSError | MemoryError) or "can't start new thread" in str(error)


def explain(error: BaseException) -> str:
    """Return in one sentence what is too little, and what to do."""
    if isinstance(error, MemoryError):
        return f"out of memory: {_REMEDIES[errno.ENOMEM]}"
    if not isinstance(error, OSError):
        return f"{error}: {_REMEDIES[errno.EAGAIN]}"
    where = f"{error.filename}: " if error.filename else ""
    what = error.strerror or str(error) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0)
    return f"{where}{what}" + (f"; {remedy}" if remedy else "")
