"""The connections of one reader to all servers of a place, made anew where they are lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, TypeVar, final

from paceline.errors import AuthenticationFailed, DeadlineExceeded, PeerError, Refused, UsageError
from paceline.transport.deadline import Deadline
from paceline.versions.link import Gone, ReaderLink
from paceline.versions.places import FindServers

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0
_Result = TypeVar("_Result")


@final
class ServerLinks:
    """Connections to all servers of a place. Threads may share them: one makes a call, the others wait for it.

    Args:
        name: of what is read there, for messages.
        place: where that is, for messages.
        find: returns the servers that are there now.
    """

    def __init__(self, name: str, place: str, find: FindServers) -> None:
        self.links: list[ReaderLink] = []  # by server; none where they are not connected
        self.life = 0  # counts connections to all servers: leases end with theirs
        self.lock: Final = threading.RLock()
        self._name = name
        self._place = place
        self._find = find
        self._closing = threading.Event()

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing.is_set()

    def repeat(self, once: Callable[[Deadline], _Result], deadline: Deadline, what: str = "an answer") -> _Result:
        """Return what `once` returns; after a lost connection it is called again, until the deadline.

        Raises:
            UsageError: this is closed.
            Gone: what is asked for is not there, and will not be.
            AuthenticationFailed: the servers do not let this reader in.
            DeadlineExceeded: `what` did not come in time; the message says why.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            if self._closing.is_set():
                raise UsageError(f"the subscription to '{self._name}' is closed")
            with self.lock:
                try:
                    return once(deadline)
                except AuthenticationFailed:
                    self.drop()
                    raise
                except Refused as error:
                    if isinstance(error, Gone) or not deadline.remaining_s():
                        raise
                    problem: Exception = error
                except (PeerError, UsageError) as error:
                    self.drop()
                    problem = error
            if not deadline.remaining_s():
                raise DeadlineExceeded(
                    f"waited for {what} of '{self._name}' at {self._place}, which did not come in time: {problem}"
                ) from problem
            self._closing.wait(min(pause_s, deadline.remaining_s()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def connected(self, deadline: Deadline) -> list[ReaderLink]:
        """Return connections to all servers, which are made where there are none; raises PeerError."""
        if not self.links:
            servers = self._find()
            made = list[ReaderLink]()
            try:
                for rank, address in enumerate(servers.addresses):
                    made.append(ReaderLink(servers.transport, address, rank, servers.rank, deadline.remaining_s()))
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

    def close(self) -> None:
        """End all connections, and calls that wait. Idempotent."""
        self._closing.set()
        for link in self.links:  # first, as a call in another thread may wait for an answer
            link.close()
        with self.lock:
            self.drop()
