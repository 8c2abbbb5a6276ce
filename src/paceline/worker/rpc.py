"""Requests of a worker that wait for their answer, repeated until it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from paceline.errors import PacelineError
from paceline.transport.base import EMPTY
from paceline.worker.lock import WorkerLock
from paceline.worker.waits import About


@dataclass(slots=True)
class _Call:
    server: int
    request: object
    body: memoryview
    due: float
    future: Future[memoryview] = field(default_factory=Future[memoryview])


@dataclass(slots=True)
class Rpc:
    """Unanswered requests by number. What does not block is used under the lock of the worker node."""

    send: Callable[[int, object, memoryview], None]
    waiting: WorkerLock
    num_servers: int
    retry_s: float
    _open: dict[int, _Call] = field(default_factory=dict[int, _Call])
    _next_number: int = 1

    def ask_all(
        self,
        make: Callable[[int], object],
        what: str,
        bodies: Sequence[memoryview] | None = None,
        servers: Sequence[int] | None = None,
        about: About = About(),  # noqa: B008 - it is frozen
    ) -> list[memoryview]:
        """Send a request to every server, or to some, and return what each sent back; blocks until all have."""
        with self.waiting.changed:
            self.waiting.check()
            wanted = range(self.num_servers) if servers is None else servers
            asked = [self._ask(server, make, bodies[server] if bodies else EMPTY) for server in wanted]
        return [self.answer(future, what, about) for future in asked]

    def ask(self, server: int, make: Callable[[int], object], what: str) -> memoryview:
        """Send a request to one server and return what it sent back; blocks until it has."""
        return self.answer(self.begin(server, make), what)

    def begin(self, server: int, make: Callable[[int], object]) -> Future[memoryview]:
        """Send a request to one server, for `answer` to wait for. Does not block."""
        with self.waiting.changed:
            self.waiting.check()
            return self._ask(server, make, EMPTY)

    def answer(self, future: Future[memoryview], what: str, about: About = About()) -> memoryview:  # noqa: B008
        """Return what a server sent back; blocks until it has."""
        with self.waiting.changed:
            self.waiting.wait(future.done, what, about)
        return future.result(timeout=0)

    def _ask(self, server: int, make: Callable[[int], object], body: memoryview) -> Future[memoryview]:
        """Send the request that `make` builds around its number; the future ends with what comes back."""
        number, self._next_number = self._next_number, self._next_number + 1
        call = _Call(server, make(number), body, due=time.monotonic() + self.retry_s)
        self._open[number] = call
        self.send(server, call.request, body)
        return call.future

    def settled(self, number: int) -> int:
        """Return a number below which all requests are answered, to be told with the request of this number."""
        return min([number, *self._open])

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
