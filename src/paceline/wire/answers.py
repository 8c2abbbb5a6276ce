"""What servers answer to a worker, read with care: one that is malformed is told as what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.errors import PeerError
from paceline.wire.malformed import MISHAPS, story

T = TypeVar("T")


def read_answer_of(server: int, what: str, read: Callable[[memoryview], T], body: memoryview) -> T:
    """Return what `read` makes of the answer of a server.

    Raises:
        PeerError: it makes nothing of it; the message names the server and what was asked of it.

    Example:
        >>> read_answer_of(0, "its clock", lambda body: int(bytes(body)), memoryview(b"7"))
        7
    """
    try:
        return read(body)
    except MISHAPS as error:
        raise PeerError(
            f"server {server} gave an answer of {body.nbytes} bytes that is none, when asked for {what}: "
            f"{story(error)}. Do both run the same version?"
        ) from error
