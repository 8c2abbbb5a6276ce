"""Pauses at random wherever a thread has woken another one: `python -m pytest -p tests.delays`.

A test that looks at what another thread does next, without waiting for it, passes nearly always on an idle machine.
Here threads stop for up to 60 ms after they send, set an event, finish a future, or begin and end.
"""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import wraps
from typing import Any

WAKING = {
    threading.Event: ("set",),
    Future: ("set_result", "set_exception"),
    socket.socket: ("send", "sendall", "sendmsg", "shutdown", "close"),
}
OFTEN, SELDOM = 0.3, 0.03
LONGEST_S = 0.06

chance = random.Random()
never = threading.Event()


def pause(probability: float) -> None:
    if chance.random() < probability:
        never.wait(chance.random() * LONGEST_S)


def pausing(call: Callable[..., Any], probability: float) -> Callable[..., Any]:
    @wraps(call)
    def paused(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        finally:
            pause(probability)

    return paused


def pytest_configure() -> None:
    for owner, names in WAKING.items():
        for name in names:
            setattr(owner, name, pausing(getattr(owner, name), SELDOM))
    run = threading.Thread.run

    def late_run(thread: threading.Thread) -> None:
        pause(OFTEN)
        run(thread)

    threading.Thread.run = pausing(late_run, OFTEN)
