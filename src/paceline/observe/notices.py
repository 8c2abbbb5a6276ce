"""Notices on stderr about a script that runs: one line each, each line once."""

from __future__ import annotations

import sys

CLOCK_ADVICE = "Call clock() once a step, after its pushes (optimizer.step() of paceline.distributed does)."
SHARD_ADVICE = (
    "did the script forget paceline.shard(loader)? Workers that train on the same samples learn no more than one of "
    "them."
)


def tell(text: str) -> None:
    """Write one line for the user, in one write, because processes may share the stream."""
    sys.stderr.write(f"paceline: {' '.join(text.splitlines())}\n")
    sys.stderr.flush()


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
