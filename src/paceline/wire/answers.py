"""Decoding of a server's answer, with an error message that names the server and the request."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.errors import PeerError
from paceline.wire.malformed import MISHAPS, story

T = TypeVar("T")


def read_answer_of(server: int, what: str, read: Callable[[memoryview], T], body: memoryview) -> T:
    """Return `read(body)`, where `body` is the answer of a server.

    Raises:
        PeerError: `read` failed; the message names the server and `what` was requested.

    Example:
        >>> read_answer_of(0, "its clock", lambda body: int(bytes(body)), memoryview(b"7"))
        7
    """
    try:
        return read(body)
    except MISHAPS as error:
        raise PeerError(
            f"server {server} gave an invalid answer of {body.nbytes} bytes when asked for {what}: "
            f"{story(error)}. Do both run the same version?"
        ) from error
