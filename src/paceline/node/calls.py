"""Requests of a worker that wait for their answer, repeated until it comes."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from paceline.errors import PacelineError


@dataclass(slots=True)
class _Call:
    server: int
    request: object
    body: memoryview
    due: float
    future: Future[memoryview] = field(default_factory=Future[memoryview])


@dataclass(slots=True)
class Calls:
    """Unanswered requests by number. Not thread-safe: used under the lock of the worker node."""

    send: Callable[[int, object, memoryview], None]
    retry_s: float
    _open: dict[int, _Call] = field(default_factory=dict[int, _Call])
    _next_number: int = 1

    def ask(self, server: int, make: Callable[[int], object], body: memoryview) -> Future[memoryview]:
        """Send the request that `make` builds around its number; the future ends with what comes back."""
        number, self._next_number = self._next_number, self._next_number + 1
        call = _Call(server, make(number), body, due=time.monotonic() + self.retry_s)
        self._open[number] = call
        self.send(server, call.request, body)
        return call.future

    def answered(self, number: int, body: memoryview) -> None:
        """End a call with what the server sent."""
        call = self._open.pop(number, None)
        if call is not None:
            call.future.set_result(body)

    def failed(self, number: int, error: PacelineError) -> None:
        """End a call with an error."""
        call = self._open.pop(number, None)
        if call is not None:
            call.future.set_exception(error)

    def abandon(self, error: PacelineError) -> None:
        """End all open calls with an error: nothing will come any more."""
        for number in list(self._open):
            self.failed(number, error)

    def repeat(self, server: int) -> None:
        """Send again what this server has not answered: its connection is new."""
        for call in list(self._open.values()):
            if call.server == server:
                self.send(server, call.request, call.body)

    def repeat_due(self) -> None:
        """Send again what has waited for a while."""
        now = time.monotonic()
        for call in list(self._open.values()):
            if call.due <= now:
                call.due = now + 2 * self.retry_s
                self.send(call.server, call.request, call.body)
