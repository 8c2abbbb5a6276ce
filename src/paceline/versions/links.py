"""The connections of one reader to all servers of a place, made anew where they are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Final, TypeVar, final

from paceline.errors import AuthenticationFailed, DeadlineExceeded, PacelineError, PeerError, Refused, UsageError
from paceline.transport.deadline import Deadline
from paceline.versions.link import Gone, ReaderLink
from paceline.versions.places import VersionPlaces

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_Result = TypeVar("_Result")


class NothingYet(DeadlineExceeded):
    """Servers have answered until the deadline, and do not have what is waited for."""


@final
class ServerLinks:
    """Connections to all servers of a place, or of the next one where that is lost.

    Threads may share them: one makes a call, the others wait for it, until their deadline.

    Args:
        name: of what is read there, for messages.
        places: where that is.

    Attributes:
        problem: why the last try of a call failed, or why the place may lack newer versions; else empty.
    """

    def __init__(self, name: str, places: VersionPlaces) -> None:
        self.links: list[ReaderLink] = []  # by server; none where they are not connected
        self.life = 0  # counts connections to all servers: leases end with theirs
        self.lock: Final = threading.RLock()
        self.problem = ""
        self._name = name
        self._places = places
        self._turn = 0  # of the place that is connected, or is tried next
        self._closing = threading.Event()
        self._waits_for = ""  # what the call that has the lock waits for

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    @property
    def has_others(self) -> bool:
        """Whether there is another place than the one that is connected."""
        return len(self._places.finders) > 1

    def repeat(self, once: Callable[[Deadline], _Result], deadline: Deadline, what: str = "an answer") -> _Result:
        """Return what `once` returns; after a failure it is called again, at the next place, until the deadline.

        Raises:
            UsageError: this is closed.
            Gone: what is asked for is at no place, and will not be.
            AuthenticationFailed: the servers of the only place do not let this reader in.
            DeadlineExceeded: `what` did not come in time; the message says why.
        """
        pause_s, num_gone = _FIRST_PAUSE_S, 0
        while True:
            with self._held(deadline, what):
                try:
                    found = once(deadline)
                except NothingYet as error:
                    problem: Exception = error
                except AuthenticationFailed as error:
                    self._go_on(error)
                    if not self.has_others:
                        raise
                    problem = error
                except Refused as error:
                    num_gone += isinstance(error, Gone)
                    if num_gone == len(self._places.finders):
                        raise
                    self.problem = str(error)
                    if self.has_others:
                        self._go_on(error)
                    problem = error
                except (PeerError, UsageError) as error:
                    self._go_on(error)
                    problem = error
                else:
                    self.problem = ""
                    return found
            self._closing.wait(min(pause_s, deadline.remaining_s()))
            if not deadline.remaining_s() and not self._closing.is_set():
                if isinstance(problem, Refused):
                    raise problem
                raise DeadlineExceeded(
                    f"waited for {what} of '{self._name}' at {self._places.name}, which did not come in time: {problem}"
                ) from problem
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @contextmanager
    def _held(self, deadline: Deadline, what: str) -> Generator[None]:
        """Have the connections for one try; raises as `repeat` where another call has them, or this is closed."""
        if not self.lock.acquire(timeout=deadline.remaining_s()):
            raise DeadlineExceeded(
                f"waited for {what} of '{self._name}' at {self._places.name}, behind a call of another thread that "
                f"waits for {self._waits_for}: threads that wait at once need a subscription each"
            )
        try:
            if self._closing.is_set():  # behind the lock: `close` ends what has it, and others may have waited for it
                raise UsageError(f"the subscription to '{self._name}' is closed")
            self._waits_for = what
            yield
        finally:
            self.lock.release()

    def connected(self, deadline: Deadline) -> list[ReaderLink]:
        """Return connections to all servers, which are made where there are none; raises PeerError."""
        if not self.links:
            servers = self._places.finders[self._turn % len(self._places.finders)]()
            compress = self._places.compress
            made = [ReaderLink(servers, 0, deadline.remaining_s(), compress=compress)]
            try:
                for server in range(1, made[0].num_servers):
                    made.append(ReaderLink(servers, server, deadline.remaining_s(), compress=compress))
            except PeerError:
                for link in made:
                    link.close()
                raise
            self.links, self.life = made, self.life + 1
        for link in self.links:
            link.deadline = deadline
        return self.links

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until this is closed, for a while at most."""
        self._closing.wait(timeout_s)

    def drop(self) -> None:
        """End all connections; the next call makes others."""
        links, self.links = self.links, []
        for link in links:
            link.close()

    def _go_on(self, problem: PacelineError) -> None:
        """End all connections because of a problem; the next call makes others, to the next place."""
        self.drop()
        self.problem = str(problem)
        self._turn += 1

    def close(self) -> None:
        """End all connections, and calls that wait. Idempotent."""
        self._closing.set()
        for link in self.links:  # first, as a call in another thread may wait for an answer
            link.close()
        with self.lock:
            self.drop()
