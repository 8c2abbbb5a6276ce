"""A relay: reads the versions of a place as one reader, and hands them on to any number of readers of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, final

import msgspec

from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.notices import NEWS, tell
from paceline.serve.messages import decode_enter_frame
from paceline.serve.namespace import NamespaceConnection
from paceline.server.feeds import RowFeeds
from paceline.server.readers import Published, ReaderService, refuse_reader
from paceline.server.versions import PublishedVersion, PublishedVersions
from paceline.transport.base import EMPTY, Connection, Listener
from paceline.versions.places import VersionPlaces
from paceline.versions.subscription import HeldParts, VersionSubscription
from paceline.wire.malformed import REQUEST_ERRORS, describe_error

TICK_S: Final = 0.25
LOST_AFTER_S: Final = 2.0  # without the place that it reads, a relay says so; until then it connects anew
_WAIT_S: Final = 600.0  # for one version; a relay that has none then waits again
_AGAIN_S: Final = 1.0  # after an error that is not a lost connection
_CLOSING_TIMEOUT_S: Final = 5.0
_NO_ROWS: Final = "a relay hands on versions and no rows: follow rows at the servers of the job themselves"


class RelaySettings(msgspec.Struct, frozen=True):
    """What a relay hands on, and how much of it stays in memory.

    Args:
        names: of what is published.
        keep: newest versions of each name that stay.
        max_leased: versions of each name that may stay because readers hold leases on them.
        namespace: which readers have to name in the address of the relay.
    """

    names: tuple[str, ...]
    keep: int
    max_leased: int
    namespace: str


@dataclass(slots=True)
class _Followed:
    """A name whose versions are taken from the place, and since when that fails; None while it does not."""

    subscription: VersionSubscription
    failing_since_s: float | None = None
    is_told: bool = False


@final
class VersionRelay:
    """Takes each version of a place once, and serves it to readers as the servers there do: the same bytes and digests.

    It leases a version at the place only while it fetches it, and holds `keep + max_leased` versions of a name at
    most, and one that is coming, whose bytes it hands on as they come. Where the place is lost it serves what it has,
    and says so.

    Args:
        listener: accepts the readers.
        places: where versions come from.
        settings: which, and how many stay.
        notice: is told when the place is lost, and when it is back.
    """

    def __init__(
        self,
        listener: Listener,
        places: VersionPlaces,
        settings: RelaySettings,
        notice: Callable[[str, int], None] = tell,
    ) -> None:
        """Begin without connections, and without versions."""
        self._listener = listener
        self._places = places
        self._settings = settings
        self._notice = notice
        self._followed: Final = {name: _Followed(VersionSubscription(name, places, self)) for name in settings.names}
        self._lock = threading.Lock()
        self._readers: ReaderService | None = None  # from the first version on
        self._expelled: Collection[str] = frozenset()
        self._stopping = threading.Event()

    def run(self) -> None:
        """Serve until `stop`; blocks. Closes the listener and all connections before it returns."""
        following = [
            threading.Thread(target=self._follow, args=(each.subscription,), name=f"paceline-relay {name}", daemon=True)
            for name, each in self._followed.items()
        ]
        for thread in following:
            thread.start()
        try:
            while not self._stopping.is_set():
                with suppress(DeadlineExceeded):
                    self._take(self._listener.accept(timeout_s=TICK_S))
                self._note_problems(time.monotonic())
        finally:
            self._stopping.set()
            self._listener.close()
            for each in self._followed.values():
                each.subscription.close()
            for thread in following:
                thread.join(_CLOSING_TIMEOUT_S)
            with self._lock:
                readers, self._readers = self._readers, None
            _close(readers)

    def stop(self) -> None:
        """End `run`; for any thread, and for handlers of signals."""
        self._stopping.set()

    def expel(self, names: Collection[str]) -> None:
        """End the readers whose certificate has one of these holders or serial numbers, and let no more of them in."""
        with self._lock:
            self._expelled = names
            if self._readers is not None:
                self._readers.expel(names)

    # -- readers -----------------------------------------------------------------------------------------------------

    def _take(self, connection: Connection) -> None:
        """Serve a reader, or say why it is not served."""
        try:
            entering = decode_enter_frame(connection.identity)
        except PeerError:
            connection.close()
            return
        with self._lock:
            readers = self._readers
        if entering.namespace != self._settings.namespace:
            refuse_reader(
                connection, f"this relay hands on '{self._settings.namespace}', and not '{entering.namespace[:80]}'"
            )
        elif readers is None:
            refuse_reader(connection, f"this relay of {self._places.name} has no version yet{self._why_none()}")
        elif not readers.take(NamespaceConnection(connection, entering)):
            refuse_reader(connection, "this is a relay, which readers alone may enter")

    def _why_none(self) -> str:
        problems = {each.subscription.problem for each in self._followed.values()}
        return "".join(f": {problem}" for problem in sorted(problems) if problem)

    def _problem_of(self, name: str) -> str:
        """Return why newer versions of a name may be missing here; raises UsageError for one that is not handed on."""
        followed = self._followed.get(name)
        if followed is None:
            names = ", ".join(f"'{each}'" for each in self._followed)
            raise UsageError(f"this relay hands on {names}, and not '{name}': start it with --name {name}")
        if not _is_lost(followed, time.monotonic()):
            return ""
        return f"a relay does not reach {self._places.name}: {followed.subscription.problem}"

    def _note_problems(self, now_s: float) -> None:
        """Note since when a place is lost, and tell once that it is, or that it is back."""
        for name, followed in self._followed.items():
            problem = followed.subscription.problem
            if not problem:
                followed.failing_since_s = None
            elif followed.failing_since_s is None:
                followed.failing_since_s = now_s
            is_lost = _is_lost(followed, now_s)
            if is_lost and not followed.is_told:
                tail = "readers keep what is here" if self._readers is not None else "there is nothing here yet"
                self._notice(f"'{name}' of {self._places.name} is not reached, {tail}: {problem}", NEWS)
                self._withdraw(name)
            elif followed.is_told and not is_lost:
                self._notice(f"'{name}' of {self._places.name} is reached again", NEWS)
            followed.is_told = is_lost

    # -- versions ----------------------------------------------------------------------------------------------------

    def _follow(self, subscription: VersionSubscription) -> None:
        """Take each newest version, and show it to readers; ends with `run`."""
        told = ""
        while not self._stopping.is_set():
            try:
                with subscription.wait(timeout_s=_WAIT_S) as version:
                    self.show(version.held_parts())
            except DeadlineExceeded:  # readers are told why
                self._withdraw(subscription.name)
            except REQUEST_ERRORS as error:  # also where memory is short: a thread that ended would tell nothing
                self._withdraw(subscription.name)
                if not self._stopping.wait(_AGAIN_S) and describe_error(error) != told:
                    told = describe_error(error)
                    self._notice(f"'{subscription.name}' of {self._places.name} is not handed on: {told}", NEWS)

    def begun(self, held: HeldParts) -> None:
        """Show a version whose bytes begin to come: readers get them one after the other, as this relay does."""
        self.show(held, is_coming=True)

    def came(self) -> None:
        """Have readers look whether the bytes that they wait for are here."""
        for published in self._parts():
            published.versions.wake()

    def show(self, held: HeldParts, *, is_coming: bool = False) -> None:
        """Show a version to readers. Where another number of servers has it than before, they connect anew."""
        with self._lock:
            readers, before = self._readers, None
            if readers is None or len(readers.parts) != len(held):
                before, readers = readers, self._serve(len(held))
        for published, (leased, memory) in zip(readers.parts, held, strict=True):
            memories = tuple(memory.memories.get(index, EMPTY) for index in range(len(leased.head.parts)))
            made = PublishedVersion(leased.head, bytes(leased.layout), memories, bytes(leased.digests))
            made.coming = memory.have if is_coming else None
            published.versions.show(made, self._settings.keep)
        _close(before)

    def _withdraw(self, name: str) -> None:
        """Show readers no more of a name than what is whole."""
        for published in self._parts():
            published.versions.withdraw(name)

    def _parts(self) -> tuple[Published, ...]:
        with self._lock:
            return () if self._readers is None else self._readers.parts

    def _serve(self, num_servers: int) -> ReaderService:
        """Begin to serve versions of so many servers; in the lock."""
        first, *others = [self._published() for _ in range(num_servers)]
        self._readers = ReaderService(first, others)
        self._readers.expel(self._expelled)
        return self._readers

    def _published(self) -> Published:
        versions = PublishedVersions(max_leased=self._settings.max_leased, problem_of=self._problem_of)
        return Published(versions, RowFeeds(_NO_ROWS))


def _is_lost(followed: _Followed, now_s: float) -> bool:
    since_s = followed.failing_since_s
    return since_s is not None and now_s - since_s >= LOST_AFTER_S


def _close(readers: ReaderService | None) -> None:
    """End readers, and drop what was published to them."""
    if readers is not None:
        readers.close()
        for part in readers.parts:
            part.versions.close()
