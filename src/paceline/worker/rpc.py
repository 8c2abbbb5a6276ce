"""Requests to servers outside the clock protocol, repeated until they are answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from paceline.errors import PacelineError, PeerError, UsageError
from paceline.transport.base import EMPTY
from paceline.wire.messages import decode, encode
from paceline.worker.waits import About, WorkerLock


@dataclass(slots=True)
class _Call:
    server: int
    request: object
    body: memoryview
    due: float
    future: Future[memoryview] = field(default_factory=Future[memoryview])


@dataclass(slots=True)
class Rpc:
    """Unanswered requests by number. Methods that do not block are called under the lock of the worker node."""

    send: Callable[[int, object, memoryview], None]
    lock: WorkerLock
    num_servers: int
    retry_s: float
    prepare: Callable[[], None] = lambda: None  # called before requests are made, without the lock; may block
    _open: dict[int, _Call] = field(default_factory=dict[int, _Call])
    _next_number: int = 1

    def call_all(
        self,
        make: Callable[[int], object],
        what: str,
        bodies: Sequence[memoryview] | None = None,
        servers: Sequence[int] | None = None,
        about: About = About(),
    ) -> list[memoryview]:
        """Send a request to all servers, or to `servers`, and return the bodies of the answers; blocks for them."""
        self.prepare()
        with self.lock.changed:
            self.lock.check()
            wanted = range(self.num_servers) if servers is None else servers
            asked = [self._send_call(server, make, bodies[server] if bodies else EMPTY) for server in wanted]
        return [self.wait_answer(future, what, about) for future in asked]

    def call(self, server: int, make: Callable[[int], object], what: str) -> memoryview:
        """Send a request to one server and return the body of its answer; blocks for it."""
        self.prepare()
        return self.wait_answer(self.start_call(server, make), what)

    def start_call(self, server: int, make: Callable[[int], object]) -> Future[memoryview]:
        """Send a request to one server, for `wait_answer` to wait for. Does not block."""
        with self.lock.changed:
            self.lock.check()
            return self._send_call(server, make, EMPTY)

    def wait_answer(self, future: Future[memoryview], what: str, about: About = About()) -> memoryview:
        """Return the body of an answer; blocks until it has arrived."""
        with self.lock.changed:
            self.lock.wait(future.done, what, about)
        return future.result(timeout=0)

    def _send_call(self, server: int, make: Callable[[int], object], body: memoryview) -> Future[memoryview]:
        """Send the request that `make` builds from its number; return the future of its answer."""
        number, self._next_number = self._next_number, self._next_number + 1
        call = _Call(server, _readable(make(number)), body, due=time.monotonic() + self.retry_s)
        self._open[number] = call
        self.send(server, call.request, body)
        return call.future

    def settled(self, number: int) -> int:
        """Return a number below which all requests are answered, to be sent with the request `number`."""
        return min([number, *self._open])

    def finish_call(self, number: int, body: memoryview) -> None:
        """End a call with the body of its answer."""
        call = self._open.pop(number, None)
        if call is not None:
            call.future.set_result(body)

    def fail_call(self, number: int, error: PacelineError) -> None:
        """End a call with an error."""
        call = self._open.pop(number, None)
        if call is not None:
            call.future.set_exception(error)

    def abandon(self, error: PacelineError) -> None:
        """End all open calls with an error."""
        for number in list(self._open):
            self.fail_call(number, error)

    def repeat(self, server: int) -> None:
        """Send all unanswered requests to this server again, over its new connection."""
        for call in list(self._open.values()):
            if call.server == server:
                self.send(server, call.request, call.body)

    def repeat_due(self) -> None:
        """Send again requests that have been unanswered for a while."""
        now = time.monotonic()
        for call in list(self._open.values()):
            if call.due <= now:
                call.due = now + 2 * self.retry_s
                self.send(call.server, call.request, call.body)


def _readable(request: object) -> object:
    """Return a request; raises UsageError for one that a server would take for a broken connection."""
    try:
        decode(encode(request))
    except PeerError as error:
        raise UsageError(f"a {type(request).__name__} cannot be sent: {error}") from error
    return request
