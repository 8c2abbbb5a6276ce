"""A subscription: what is published under one name, as a reader sees it, which outlives the servers."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self, TypeAlias, final

from torch import Tensor, nn

from paceline.core.calls import checked, checked_late, shown
from paceline.errors import PeerError, Refused, UsageError
from paceline.serve.access import ClientCredentials, PathLike
from paceline.transport.deadline import Deadline, patience_s
from paceline.versions.contents import digest_of_version, shared_layout, tensors_of, word_bytes_of
from paceline.versions.link import Base, LeasedPart, PartMemory, ReaderLink, VersionNotThere, described, is_intact
from paceline.versions.links import NothingYet, ServerLinks
from paceline.versions.places import VersionPlaces, find_places
from paceline.versions.rows import SubscribedRows
from paceline.versions.swap import ModuleUpdates
from paceline.wire.versions import PublicationId, check_published_name

TIMEOUT_S: Final = 60.0
HeldParts: TypeAlias = list[tuple[LeasedPart, PartMemory]]  # of a version, by server


class TransferWatcher(Protocol):
    """Is told how the bytes of versions come to a subscription, by the thread that fetches them."""

    def begun(self, held: HeldParts) -> None:
        """Note that a version is being fetched, or its rest: there is memory for all of it, which is being filled."""
        ...

    def came(self) -> None:
        """Note that more bytes are here."""
        ...


@final
class Version(Mapping[str, Tensor]):
    """One version: tensors by name, which never change. A context manager: leaving it ends the lease.

    On one machine tensors are memory of the server, mapped and not copied; what is written to them stays in this
    process. They are valid without a lease, too, which only keeps the version for others, and for a later `pull`. A
    version that is dropped loses its lease with the next call of its subscription.

    Attributes:
        name: under which it is published.
        number: the clock of the worker that published it.
        series: which publisher it is from: two versions of one number and series are one. Those of a publisher that
            began later, by the clock of its machine, come later.
        absent: names of parameters that were published without their values, as no server holds them: frozen ones.
    """

    def __init__(
        self,
        parts: Sequence[LeasedPart],
        memories: Sequence[PartMemory],
        end_lease: Callable[[], None],
        note_dropped: Callable[[], None],
    ) -> None:
        """Make the tensors; raises PeerError for a layout that does not fit the bytes."""
        published = parts[0].head.id
        self.name: Final = published.name
        self.number: Final = published.number
        self.series: Final = published.series
        self._parts = parts
        self._memories = memories
        self._digest = ""
        layout = shared_layout(parts)
        self.absent: Final = frozenset(layout.absent)
        self._tensors = tensors_of(layout, parts, memories)
        self._end_lease = end_lease
        self._dropped = weakref.finalize(self, note_dropped)
        self._dropped.atexit = False

    def __repr__(self) -> str:
        return f"Version('{self.name}', {self.number}, {len(self)} tensors)"

    def __getitem__(self, name: str) -> Tensor:
        """Return the tensor of this name."""
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        """Return the names, in the order of the model."""
        return iter(self._tensors)

    def __len__(self) -> int:
        """Count the tensors."""
        return len(self._tensors)

    def __enter__(self) -> Self:
        """Return this version."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the lease."""
        self.close()

    @property
    def digest(self) -> str:
        """SHA-256 of all its bytes, in hexadecimal, equal for all readers.

        Of mapped bytes it is computed here, when it is first asked for: ask before you write to them.
        """
        if not self._digest:
            parts = [described(*each) for each in zip(self._parts, self._memories, strict=True)]
            self._digest = digest_of_version(parts)
        return self._digest

    @property
    def is_mapped(self) -> bool:
        """Whether the tensors are memory of the servers, which was not copied."""
        return all(memory.is_mapped for memory in self._memories)

    @property
    def received_bytes(self) -> int:
        """The bytes that came over a network for it: after the first version, mostly only what has changed."""
        return sum(memory.received_bytes for memory in self._memories)

    @property
    def id(self) -> PublicationId:
        """Its name on the wire."""
        return self._parts[0].head.id

    def held_parts(self) -> HeldParts:
        """Return what each server says of its part, and the bytes of it; by rank, for a relay."""
        return list(zip(self._parts, self._memories, strict=True))

    def verify(self) -> bool:
        """Return whether all its bytes are those that were published.

        What came by a network was compared with its digests then, and is once more. Of what is mapped, which nothing
        else can change, this looks whether this process has written to it.
        """
        return all(is_intact(part, memory) for part, memory in zip(self._parts, self._memories, strict=True))

    def close(self) -> None:
        """End the lease: the servers need not keep the version. Its tensors stay. Idempotent.

        While another thread is in a call of the subscription the lease ends with that call, or with the next one.
        """
        if self._dropped.detach() is not None:
            self._end_lease()


@dataclass(slots=True)
class _Unfinished:
    """What has come of a version before its servers were lost: another connection goes on from there."""

    digest: str
    memories: list[PartMemory]


_Lease: TypeAlias = tuple[PublicationId, int]  # with the connections that it is held over
_NONE: Final = ("", -1)  # before the place of any version


def _place(version: PublicationId) -> tuple[str, int]:
    """Return the place of a version in the order of publication."""
    return version.series, version.number


@final
class VersionSubscription:
    """What is published under one name: see `paceline.subscribe`. A context manager.

    Threads may share it: one makes a call, the others wait for it, until their deadline.

    Every call connects anew where the connection is lost, until its deadline: servers may be replaced, a job may end
    and another one begin in its place.
    """

    def __init__(self, name: str, places: VersionPlaces, watcher: TransferWatcher | None = None) -> None:
        """Begin without connections. `watcher`: of what comes over a network, and is not mapped."""
        self.name: Final = name
        self._places = places
        self._watcher = watcher
        self._servers = ServerLinks(name, places)
        self._unfinished: dict[PublicationId, _Unfinished] = {}
        self._newest: PublicationId | None = None  # that was taken
        self._bases = list[Base]()  # by server: of the version that came last over a network, for the next
        self._leases: Counter[_Lease] = Counter()  # how many versions hold each
        # Leases that end with the next call: of versions that were dropped, where any thread may add one, as the
        # garbage collector runs in it, and of versions that were closed while another thread was in a call.
        self._dropped: deque[_Lease] = deque()

    def __repr__(self) -> str:
        return f"VersionSubscription('{self.name}' of {self._places.name})"

    def __enter__(self) -> Self:
        """Return this subscription."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End it."""
        self.close()

    @property
    def problem(self) -> str:
        """Why a call that waits has no version: its place, or the place that one reads, is lost; else empty."""
        return self._servers.problem

    # -- the user's calls --------------------------------------------------------------------------------------------

    @checked_late
    def versions(self, *, timeout_s: float = TIMEOUT_S) -> list[int]:
        """Return the numbers of the versions that all servers have, the newest last."""
        found = self._servers.repeat(self._everywhere, Deadline.after(patience_s(timeout_s)))
        return [each.number for each in found]

    @checked_late
    def latest(self, *, timeout_s: float = TIMEOUT_S) -> Version:
        """Return the newest version; blocks until there is one, and its bytes are here.

        It is never older than what this subscription has returned last, whichever place it comes from.

        Raises:
            DeadlineExceeded: there is none in time, or no server.
            AuthenticationFailed: the servers do not let this reader in.
        """
        return self._take(lambda _: True, Deadline.after(patience_s(timeout_s)), "a version")

    @checked
    def pull(self, number: int, *, timeout_s: float = TIMEOUT_S) -> Version:
        """Return the version of this number; blocks until its bytes are here.

        Raises:
            VersionNotThere: there is no such version, or no longer; the message says which there are.
            DeadlineExceeded: its bytes did not come in time.
        """

        def once(deadline: Deadline) -> Version:
            found = self._everywhere(deadline)
            wanted = next((each for each in reversed(found) if each.number == number), None)
            if wanted is None:
                there = ", ".join(str(each.number) for each in found) or "none"
                raise VersionNotThere(
                    f"there is no version {number} of '{self.name}' at {self._places.name}, but {there}"
                )
            return self._fetch(wanted)

        return self._servers.repeat(once, Deadline.after(patience_s(timeout_s)))

    @checked
    def wait(self, number: int | None = None, *, timeout_s: float = TIMEOUT_S) -> Version:
        """Wait for a version of this number or a higher one, and return the newest.

        Without a number: wait for one that is newer than what this subscription has returned last, which may be the
        first one of a job that began anew. Raises as `latest` does.
        """
        last = self._newest

        def wanted(found: PublicationId) -> bool:
            if number is not None:
                return found.number >= number
            return last is None or _place(found) > _place(last)

        what = "another version" if number is None else f"version {number} or a newer one"
        return self._take(wanted, Deadline.after(patience_s(timeout_s)), what)

    def close(self) -> None:
        """End all leases and connections, and calls that wait. The tensors of versions stay. Idempotent."""
        self._servers.close()
        with self._servers.lock:
            self._unfinished.clear()
            self._bases.clear()

    @checked_late
    def into(self, module: nn.Module, *, timeout_s: float = TIMEOUT_S) -> ModuleUpdates:
        """Keep a module at the newest version: blocks for the first one, then swaps weights between forward passes.

        A thread fetches each new version beside the forward passes; when all of it is here, the next forward begins
        with its weights, and a forward that runs ends with those that it began with. The result is a context manager,
        whose `number` says which version the module has; closing it leaves the module with the weights that it has.

        Raises:
            UsageError: the module has parameters that the version has not, or of another shape.
            DeadlineExceeded: there is no version in time.
        """
        if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance] - scripts are not typed
            raise UsageError(f"into: {shown(module)} has no weights to swap, expected a module.")
        own = VersionSubscription(self.name, self._places)
        return ModuleUpdates(module, own, timeout_s)

    @checked
    def table(self, name: str, *, follow: bool = True, timeout_s: float = TIMEOUT_S) -> SubscribedRows:
        """Return the row table of this name, as a reader sees it: `pull`, `changes`. Blocks until the table is there.

        It has connections of its own, and is closed by itself: it is a context manager.

        Args:
            name: as the job declares it; a row table need not be published.
            follow: keep its rows up to date; else they change only when `SubscribedRows.advance` says to which clock.
            timeout_s: how long to wait for the table.

        Raises:
            UsageError: the table has a shape, and no rows.
            Refused: there is no such table in time.
            DeadlineExceeded: there is no server in time.
        """
        if not name.isprintable():
            raise UsageError(f"subscribe: a table is named {name[:60]!r}, which has characters that cannot be printed.")

        def links() -> ServerLinks:
            return ServerLinks(name, self._places)

        return SubscribedRows(name, links, Deadline.after(patience_s(timeout_s)), follow=follow)

    # -- one try -----------------------------------------------------------------------------------------------------

    def _take(self, is_wanted: Callable[[PublicationId], bool], deadline: Deadline, what: str) -> Version:
        """Return the newest version that is wanted; waits for it."""

        def once(deadline: Deadline) -> Version:
            try:
                return self._take_once(is_wanted, deadline)
            except (NothingYet, Refused):
                for link in self._servers.links:
                    link.end_hold()
                raise

        return self._servers.repeat(once, deadline, what)

    def _take_once(self, is_wanted: Callable[[PublicationId], bool], deadline: Deadline) -> Version:
        """Have each server hold its newest version meanwhile; after NothingYet and Refused it still does."""
        links, lists = list[ReaderLink](), list[tuple[PublicationId, ...]]()
        while True:
            if self._connected(deadline) is not links:
                links = self._servers.links
                lists = [link.find(self.name, (), 0.0, hold=True) for link in links]
            problem = next((link.problem for link in links if link.problem), "")
            not_older = self._not_older(lists[0])
            if lists[0] and not not_older:
                problem = problem or self._all_earlier(lists[0])
            wanted = [each for each in not_older if is_wanted(each)]
            whole = [each for each in wanted if all(each in found for found in lists)]
            if whole:
                try:
                    return self._fetch(whole[-1])
                except VersionNotThere as error:
                    if not deadline.remaining_s():
                        raise NothingYet(f"versions are dropped before they are taken: {error}") from error
                    links = []  # it was dropped meanwhile, so a newer one is there: ask anew
                    continue
            self._servers.problem = problem
            if problem and self._servers.has_others:
                raise PeerError(problem)
            if self._servers.is_closed or not deadline.remaining_s():
                numbers, rest = [each.number for each in lists[0]], problem and f". {problem}"
                if not numbers:
                    raise NothingYet(f"there is none yet; none is published under this name{rest}")
                raise NothingYet(f"there is none yet; there are {numbers}{rest}")
            lists = self._wait_change(lists, is_wanted, deadline)

    def _not_older(self, found: tuple[PublicationId, ...]) -> list[PublicationId]:
        """Return what was not published before the version that was taken last, as by an earlier publisher."""
        return [each for each in found if self._newest is None or _place(each) >= _place(self._newest)]

    def _all_earlier(self, found: tuple[PublicationId, ...]) -> str:
        """Return why no version of these is taken."""
        assert self._newest is not None, "a first version is never older"
        return (
            f"{self._places.name} has versions of an earlier publisher only, up to {found[-1].number}, and version "
            f"{self._newest.number} came last: a relay that is behind, or a publisher that began on a machine "
            "whose clock is behind"
        )

    def _wait_change(
        self, lists: list[tuple[PublicationId, ...]], is_wanted: Callable[[PublicationId], bool], deadline: Deadline
    ) -> list[tuple[PublicationId, ...]]:
        """Wait for the server that is behind the others, or the first of them, to have another version.

        Return the lists with its versions. One that is ahead holds its newest meanwhile, for the others to come to, and
        to wait for its next version would be to miss each of theirs.
        """
        newest = [
            max((_place(each) for each in self._not_older(found) if is_wanted(each)), default=_NONE) for found in lists
        ]
        late = newest.index(min(newest))
        found = self._servers.links[late].find(self.name, lists[late], deadline.remaining_s(), hold=True)
        return [*lists[:late], found, *lists[late + 1 :]]

    def _everywhere(self, deadline: Deadline) -> list[PublicationId]:
        """Return the versions that all servers have, the newest last."""
        lists = [link.find(self.name, (), 0.0) for link in self._connected(deadline)]
        return [each for each in lists[0] if all(each in found for found in lists)]

    def _fetch(self, wanted: PublicationId) -> Version:
        """Lease a version on all servers, and fetch it."""
        links, life = self._servers.links, self._servers.life
        parts = list[LeasedPart]()
        try:
            for link in links:
                parts.append(link.lease(wanted))
        except Refused:
            for link, _ in zip(links, parts, strict=False):
                link.end_lease(wanted)
            raise
        digest = "" if any(link.maps for link in links) else digest_of_version(parts)
        unfinished = self._unfinished.get(wanted)
        if unfinished is None or not digest or unfinished.digest != digest:
            unfinished = _Unfinished(digest, [PartMemory() for _ in parts])
            self._unfinished = {wanted: unfinished}
        self._servers.problem = ""  # as all servers have answered
        self._transfer(links, parts, unfinished.memories)
        parts = [
            part if memory.is_mapped else described(part, memory)
            for part, memory in zip(parts, unfinished.memories, strict=True)
        ]
        self._unfinished.clear()
        self._newest = wanted
        if not all(memory.is_mapped for memory in unfinished.memories):
            word_bytes = word_bytes_of(shared_layout(parts))
            self._bases = [Base(*each, word_bytes) for each in zip(parts, unfinished.memories, strict=True)]
        lease, dropped = (wanted, life), self._dropped
        made = Version(parts, unfinished.memories, lambda: self._let_go(lease), lambda: dropped.append(lease))
        self._leases[lease] += 1
        return made

    def _transfer(
        self, links: Sequence[ReaderLink], parts: Sequence[LeasedPart], memories: Sequence[PartMemory]
    ) -> None:
        """Fetch what is not here yet of a version that is leased."""
        watcher = None if any(link.maps for link in links) else self._watcher
        bases = self._bases if len(self._bases) == len(links) else [None] * len(links)
        try:
            if watcher is not None:
                for part, memory in zip(parts, memories, strict=True):
                    memory.make_room(part)
                watcher.begun(list(zip(parts, memories, strict=True)))
            for link, part, memory, base in zip(links, parts, memories, bases, strict=True):
                link.fetch(part, memory, base, None if watcher is None else watcher.came)
        except BaseException:  # answers are still under way, and no caller has what is leased
            self._servers.drop()
            raise

    def _let_go(self, lease: _Lease) -> None:
        """Have a lease ended, without waiting for a call of another thread, which may last long."""
        self._dropped.append(lease)
        if self._servers.lock.acquire(blocking=False):
            try:
                self._end_dropped()
            finally:
                self._servers.lock.release()

    def _end_dropped(self) -> None:
        while self._dropped:
            self._end_lease(self._dropped.popleft())  # which may find that the connections are lost

    def _end_lease(self, lease: _Lease) -> None:
        """End the lease of one version that was returned; the servers are told with the last of a number."""
        with self._servers.lock:
            self._leases[lease] -= 1
            if self._leases[lease] > 0:
                return
            del self._leases[lease]
            version, life = lease
            if life == self._servers.life:
                try:
                    for link in self._servers.links:
                        link.end_lease(version)
                except PeerError:
                    self._servers.drop()  # and so its leases have ended

    def _connected(self, deadline: Deadline) -> list[ReaderLink]:
        """Return connections to all servers, once the leases of versions that were dropped are ended."""
        self._end_dropped()
        return self._servers.connected(deadline)


@checked
def subscribe(
    source: object,
    *,
    name: str = "policy",
    compress: bool = False,
    token: PathLike | bytes | None = None,
    keys: PathLike | None = None,
    ca: PathLike | None = None,
    certificate: PathLike | None = None,
    key: PathLike | None = None,
) -> VersionSubscription:
    """Read what `paceline.publish` publishes, as a process that takes no part in training. Does not block.

    A reader finishes no clock, holds up no worker, and can write nothing. It may begin before the job does, and last
    longer: calls connect anew until their deadline.

    Args:
        source: where versions are published: the folder of a job (`paceline run --run-dir FOLDER`), the address of a
            namespace of a standalone server ("paceline://HOST:PORT/NAME"), that of a relay (`paceline relay`), or a
            session of this process; or a list of these: where one is lost, the next one is read.
        name: as it was published.
        compress: have what changes from version to version compressed on its way, which costs processor time at both
            ends: for lines of some hundred Mbit/s and less. Over shared memory it has no effect.
        token: for an address: the server's token, see `paceline.connect`; as are the others.
        keys: for an address: a folder with a certificate for `reader-0`, or for any process.
        ca: for an address, with `certificate` and `key`: of your own authority.
        certificate: path of this reader's certificate.
        key: path of this reader's private key.

    Raises:
        UsageError: the source is not valid, or arguments do not go together.

    Example:
        >>> import paceline
        >>> ps = paceline.init()
        >>> w = ps.table("read", shape=(2,), update=paceline.update.Add())
        >>> _ = paceline.publish(w, name="zeros")
        >>> with paceline.subscribe(ps, name="zeros") as reader:
        ...     reader.latest()["read"]
        tensor([0., 0.])
    """
    check_published_name(name)
    places = find_places(source, ClientCredentials(token, keys, ca, certificate, key), compress=compress)
    return VersionSubscription(name, places)
