"""Notices for the user of a process that runs: one line each, on stderr, or where the script sends its log.

Every notice is a record of `logging`, of the logger `paceline.<folder>` that it comes from, with a level and with the
rank of its worker as `rank`. Where the script configures logging, its handlers decide what becomes of it.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from inspect import currentframe
from typing import Final, final

CLOCK_ADVICE = "Call clock() once a step, after its pushes (optimizer.step() of paceline.distributed does)."
SHARD_ADVICE = (
    "did the script forget paceline.shard(loader), or draw the same random numbers on all workers "
    "(torch.manual_seed(seed + paceline.rank()))? Workers that train on the same samples learn no more than one of "
    "them."
)
NEWS: Final = logging.INFO  # what happens as it should
FAILURE: Final = logging.ERROR  # what ends a process
_NO_RANK: Final = "-"
_ROOT: Final = "paceline"


def tell(text: str, level: int = logging.WARNING) -> None:
    """Tell the user one line. A notice that cannot be written, as stderr is closed, is dropped.

    >>> tell("worker 1 is late")  # doctest: +SKIP
    paceline: worker 1 is late
    """
    logger = logging.getLogger(_folder_of_caller())
    rank = next((each.rank for each in logging.getLogger(_ROOT).handlers if isinstance(each, StderrHandler)), _NO_RANK)
    logger.log(level, "%s", for_terminal(" ".join(text.splitlines())), stacklevel=2, extra={"rank": rank})


def _folder_of_caller() -> str:
    """Return `paceline.<folder>` of the module that calls the caller of this; `paceline` for modules of others."""
    here = currentframe()
    teller = None if here is None else here.f_back
    caller = None if teller is None else teller.f_back
    module = "" if caller is None else str(caller.f_globals.get("__name__", ""))
    return ".".join(module.split(".")[:2]) if module.startswith(f"{_ROOT}.") else _ROOT


@final
class StderrHandler(logging.Handler):
    """Writes notices on stderr, unless the script has handlers of its own that get them.

    Attributes:
        rank: of the worker that this process is, or has been last; what records have as theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rank = _NO_RANK

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, in one write, because processes may share the stream."""
        if _others_handle(record.name) or sys.stderr is None:  # None under pythonw, or if a launcher has closed it
            return
        with suppress(OSError, ValueError):  # its reader is gone, or the script has closed it
            sys.stderr.write(f"paceline: {record.getMessage()}\n")
            sys.stderr.flush()


def set_rank(rank: int) -> None:
    """Have records of this process name this rank."""
    for handler in logging.getLogger(_ROOT).handlers:
        if isinstance(handler, StderrHandler):
            handler.rank = str(rank)


def _others_handle(name: str) -> bool:
    """Return whether a logger, or one above it that its records go on to, has a handler beside ours."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, StderrHandler) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def _attach() -> None:
    """Have our loggers write on stderr where nothing else is configured, and pass on news as well as warnings."""
    logger = logging.getLogger(_ROOT)
    logger.addHandler(StderrHandler())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


_attach()


def is_told(count: int) -> bool:
    """Return whether the n-th occurrence is reported: the 1st, 10th, 100th, and so on.

    >>> [count for count in range(1, 200) if is_told(count)]
    [1, 10, 100]
    """
    return str(count).rstrip("0") == "1"


def printable(text: str) -> str:
    r"""Return the text of another process without characters that control a terminal.

    >>> printable("worker 1 \x1b[2J")
    'worker 1 ?[2J'
    """
    return "".join(char if char.isprintable() else "?" for char in text)


def for_terminal(text: str) -> str:
    r"""Return a message, which may quote another process or a file, as `printable` does; lines and tabs stay.

    >>> for_terminal("worker 1:\n\t\x1b[2J")
    'worker 1:\n\t?[2J'
    """
    return "".join(char if char.isprintable() or char in "\n\t" else "?" for char in text)
