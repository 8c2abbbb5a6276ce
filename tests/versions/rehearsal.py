"""Readers, relays and servers of versions in one thread, with drawn faults: the real code at both ends of each line.

A line carries frames at once, or is cut, or damages bytes, or has the other end killed. `ReaderHistory` checks what
readers get against what was published, and shares no code with what it checks.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from paceline.errors import ConnectionLost, DeadlineExceeded, PacelineError, PeerError
from paceline.server.readers import Published, _Reading
from paceline.server.versions import PublishedVersion
from paceline.transport.base import EMPTY, NO_IDENTITY, Frame
from paceline.versions.places import PublishingServers, VersionPlaces
from paceline.versions.relay import RelaySettings, VersionRelay
from paceline.versions.subscription import Version, VersionSubscription
from paceline.wire import versions as wire
from paceline.wire.versions import (
    DeltaFetched,
    FetchBytes,
    FetchDelta,
    FindVersions,
    PublicationId,
    PublishedPart,
    PublishedTensor,
    VersionHead,
    VersionLayout,
    chunk_digests,
    digest_of,
)

NAME = "w"
CHUNK_BYTES, PIECE_BYTES = 64, 256
KEEP, LEASED = 2, 1
NUM_ACTIONS, NUM_READERS = 60, 4
CALM_TRIES = 50
TENSORS = {"a.0": ("a", 0, 150), "a.1": ("a", 150, 151), "b": ("b", 0, 97)}  # table, first element, elements
TABLES = {"a": (np.dtype("<f4"), 301), "b": (np.dtype("u1"), 97)}
DTYPES = {"a": "float32", "b": "uint8"}


class WrongReadError(AssertionError):
    """A reader got what it must not; the message says which promise is broken."""


@dataclass
class ReaderHistory:
    """What was published and what readers got; raises WrongReadError."""

    published: dict[tuple[str, int], dict[str, bytes]] = field(default_factory=dict)
    digests: dict[tuple[str, int], str] = field(default_factory=dict)
    newest: dict[int, tuple[str, int]] = field(default_factory=dict)  # by reader
    num_reads: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])  # of what was to happen

    def read(self, reader: int, version: Version, *, is_newer: bool) -> None:
        """Check one version that a reader got; `is_newer`: it has asked for a newer one than before."""
        key = version.series, version.number
        self.num_reads += 1
        for name, (table, start, numel) in TENSORS.items():
            width = TABLES[table][0].itemsize
            expected = self.published[key][table][start * width : (start + numel) * width]
            if version[name].numpy().tobytes() != expected:
                raise WrongReadError(f"R1: version {key} has other bytes in '{name}' than were published")
        if self.digests.setdefault(key, version.digest) != version.digest:
            raise WrongReadError(f"R2: version {key} has two digests")
        newest = self.newest.get(reader, ("", -1))
        if key <= newest if is_newer else key < newest:
            raise WrongReadError(f"R3: reader {reader} got version {key} after {newest}")

    def took(self, reader: int, version: Version) -> None:
        self.newest[reader] = version.series, version.number

    def kept(self, where: str, versions: list[PublishedVersion], keep: int, max_leased: int) -> None:
        """Check what a relay or server holds of a name."""
        num_versions = sum(each.coming is None for each in versions)
        whole = [each for each in versions if each.coming is None]
        num_leased = sum(each.num_leases > 0 for each in whole[:-keep])
        if len(versions) > num_versions + 1:
            raise WrongReadError(f"R8: {len(versions) - num_versions} versions come to {where} at once")
        if num_leased > max_leased or num_versions > keep + num_leased:
            raise WrongReadError(f"R5: {where} holds {num_versions} versions, {num_leased} of them leased")

    def came(self, where: str, made: PublicationId, parts: list[list[PublishedVersion]]) -> None:
        """Check that a relay has a version that has come to it, whole."""
        for versions in parts:
            if not any(each.head.id == made and each.coming is None for each in versions):
                raise WrongReadError(f"R9: {where} has taken {made} and does not have all of it")

    def leased(self, where: str, leased: set[PublicationId], there: set[PublicationId]) -> None:
        """Check that what readers hold is still there."""
        if leased - there:
            raise WrongReadError(f"R7: {where} has dropped {leased - there}, which a reader holds")

    def ended(self, where: str, num_leases: int) -> None:
        """Check what is leased when no reader is there any more."""
        if num_leases:
            raise WrongReadError(f"R6: {where} has {num_leases} leases of readers that have gone")


class ServerEnd:
    """The end of a line at a server or relay."""

    peer_identity, peer, identity = NO_IDENTITY, "a reader", b""

    def __init__(self) -> None:
        self.requests: deque[bytes] = deque()
        self.answers: deque[Frame] = deque()

    def receive(self, **_: object) -> Frame:
        return Frame(self.requests.popleft(), EMPTY)

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        del timeout_s
        self.answers.append(Frame(header, memoryview(bytes(body))))


class ReaderEnd:
    """The end of a line at a reader: the other end answers within `send`."""

    peer_identity, peer, identity = NO_IDENTITY, "a server", b""

    def __init__(self, world: World, place: Place, parts: tuple[Published, ...]) -> None:
        self._world, self._place, self._parts = world, place, parts
        self._other = ServerEnd()
        self._reading: Any = _Reading(self._other, parts, threading.Event())  # pyright: ignore[reportArgumentType]
        self.is_open = True
        self._is_ending = False
        place.lines.append(self)

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        del body, timeout_s
        self._world.disturb(self)
        message = wire.decode(header)
        if isinstance(message, FindVersions) and message.wait_s > 0:
            self._world.happen()
            header = wire.encode(replace_wait(message))
        self._require_open()
        self._other.requests.append(header)
        wanted = self._reading._leased.get(message.id) if isinstance(message, FetchBytes | FetchDelta) else None
        what = "a whole version" if wanted is None or wanted.coming is None else "a version that comes"
        try:
            self._reading.answer_next()
        except ConnectionLost:  # what it said before is carried
            self._is_ending = True
            what = "no bytes of a version that comes no further"
        self._world.history.counts[what] += 1

    def receive(self, **_: object) -> Frame:
        self._world.disturb(self)
        self._require_open()
        return self._world.carried(self._other.answers.popleft())

    def leased(self) -> set[PublicationId]:
        """Return what is leased and was whole here, and has not been let go of."""
        leased = self._reading._leased.items()
        return {made for made, version in leased if version.coming is None and not version.is_let_go}

    def versions_there(self) -> set[PublicationId]:
        published = self._reading._versions._names.get(NAME)
        return set() if published is None else set(published.versions)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._reading.end()
            self._place.lines.remove(self)

    def is_served(self) -> bool:
        """Return whether the other end has not closed it."""
        if self._parts[0] not in self._place.parts or (self._is_ending and not self._other.answers):
            self.close()
        return self.is_open

    def _require_open(self) -> None:
        if not self.is_served():
            raise ConnectionLost("the line was cut")


def replace_wait(message: FindVersions) -> FindVersions:
    return replace(message, wait_s=0.0)


@dataclass
class Place:
    """A job or a relay, which can be killed: then its lines end, and it begins anew with nothing."""

    begin: Callable[[], Callable[[], tuple[Published, ...]]]  # returns what says which parts it has
    share_address: bool
    lines: list[ReaderEnd] = field(default_factory=list)
    _parts: Callable[[], tuple[Published, ...]] = tuple

    @property
    def parts(self) -> tuple[Published, ...]:
        return self._parts()

    def kill(self) -> None:
        for line in list(self.lines):
            line.close()
        self._parts = self.begin()


class World:
    """One seeded run: a job, three relays of which the third follows the first, and readers of lists of these."""

    maps_memory, name = False, "tcp"

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.history = ReaderHistory()
        self.is_calm = False
        self._is_happening = False
        self._calling = set[int]()  # readers in a call
        self._series = 0
        self._number = 0
        self._values = {table: np.zeros(numel, dtype) for table, (dtype, numel) in TABLES.items()}
        self._late: deque[tuple[int, PublishedVersion]] = deque()  # parts that a server has not finished
        self.job = Place(self._begin_job, share_address=False)
        self.job.kill()
        self.relays: list[tuple[VersionRelay, Place]] = []
        for upstream in (self.job, self.job, None):
            self._add_relay(upstream or self.relays[0][1])
        ways = [[self.job], *([place] for _, place in self.relays)]
        ways += [[self.relays[1][1], self.relays[0][1]], [self.relays[2][1], self.job]]
        self.ways = [self.rng.choice(ways) for _ in range(NUM_READERS)]  # by reader
        self.readers = [VersionSubscription(NAME, self._places(*way)) for way in self.ways]
        self.held: list[tuple[int, Version]] = []

    # -- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> ReaderHistory:
        """Act and read; then have no faults any more, and check that every reader comes to the newest version."""
        for _ in range(NUM_ACTIONS):
            self.happen()
            self._read(self.rng.randrange(NUM_READERS))
            self._check_kept()
        self.is_calm = True
        dead = self.relays[1][1]  # for good; readers with another place go on there
        dead.kill()
        self._publish()
        while self._late:
            self._finish_part()
        for reader in range(NUM_READERS):
            if self.ways[reader] != [dead]:
                self._come_to_newest(reader)
        for _, version in self.held:
            version.close()
        for each in self.readers:
            each.close()
        for relay, place in self.relays:
            self._check_ended(place)
            for followed in relay._followed.values():
                followed.subscription.close()
        self._check_ended(self.job)
        return self.history

    def happen(self) -> None:
        """Have something happen that no reader does, but not while something does."""
        if self._is_happening or self.is_calm:
            return
        self._is_happening = True
        try:
            what = self.rng.choices(
                (self._publish, self._finish_part, self._relay_one, self._kill_relay, self._kill_job, self._lose_place),
                (4, 8, 8, 1, 0.5, 0.5),
            )
            what[0]()
        finally:
            self._is_happening = False

    def disturb(self, line: ReaderEnd) -> None:
        """Perhaps cut a line, or have something happen, or another reader make a call, while it is used."""
        if self.is_calm:
            return
        chance = self.rng.random()
        if chance < 0.01:
            line.close()
        elif chance < 0.04:
            self.happen()
        elif chance < 0.08 and len(self._calling) < NUM_READERS:
            self._read(self.rng.choice(sorted(set(range(NUM_READERS)) - self._calling)))

    def carried(self, frame: Frame) -> Frame:
        """Return what arrives of a frame: perhaps with damaged bytes, or a delta of other words or another kind."""
        message = wire.decode(frame.header)
        is_delta = isinstance(message, DeltaFetched)
        self.history.counts["a compressed difference"] += is_delta and message.is_compressed
        if self.is_calm or self.rng.random() > 0.08:
            return frame
        if is_delta and message.num_words and self.rng.random() < 0.5:
            misleading = DeltaFetched(message.number, message.num_words - 1), DeltaFetched(message.number, None, True)
            return Frame(wire.encode(self.rng.choice(misleading)), frame.body)
        if not len(frame.body):
            return frame
        body = bytearray(frame.body)
        body[self.rng.randrange(len(body))] ^= 1 << self.rng.randrange(8)
        return Frame(frame.header, memoryview(body))

    # -- readers -----------------------------------------------------------------------------------------------------

    def _read(self, reader: int) -> None:
        """Make one call of a reader; it may fail, but not with a wrong version."""
        subscription = self.readers[reader]
        what = self.rng.choice(("latest", "wait", "pull", "drop"))
        if what == "drop":
            mine = [index for index, each in enumerate(self.held) if each[0] == reader]
            if mine:
                self.held.pop(self.rng.choice(mine))[1].close()
            return
        self._calling.add(reader)
        try:
            if what == "pull":
                version = subscription.pull(max(0, self._number - self.rng.randrange(3)), timeout_s=0.0)
            else:
                version = getattr(subscription, what)(timeout_s=0.0)
        except PacelineError:
            return
        finally:
            self._calling.remove(reader)
        if what == "pull":
            self.history.newest.pop(reader, None)  # which may go back
        self.history.read(reader, version, is_newer=what == "wait")
        self.history.took(reader, version)
        if self.rng.random() < 0.5:
            self.held.append((reader, version))
        else:
            version.close()

    def _come_to_newest(self, reader: int) -> None:
        for _, version in self.held:  # a server keeps so many versions for readers and no more
            version.close()
        self.held.clear()
        for _ in range(CALM_TRIES):
            self._relay_one(0)
            self._relay_one(2)
            with suppress(PacelineError):
                version = self.readers[reader].latest(timeout_s=0.0)
                self.history.read(reader, version, is_newer=False)
                version.close()
                if (version.series, version.number) == self._newest():
                    return
        raise WrongReadError(f"R4: reader {reader} does not come to version {self._newest()} without faults")

    def _newest(self) -> tuple[str, int]:
        return f"s{self._series:04}", self._number

    # -- what happens ------------------------------------------------------------------------------------------------

    def _begin_job(self) -> Callable[[], tuple[Published, ...]]:
        """Begin a job, or the servers of one anew, which have no versions."""
        if not self.rng.randrange(3):
            self._series += 1
            self._number = 0
        self._late.clear()
        parts = tuple(Published() for _ in range(self.rng.randint(1, 3)))
        return lambda: parts

    def _kill_job(self) -> None:
        self.job.kill()

    def _publish(self) -> None:
        """Change few or many values, and publish them; servers finish their parts at any time."""
        for values in self._values.values():
            share = self.rng.choice((0.01, 0.05, 0.9))
            at = [index for index in range(len(values)) if self.rng.random() < share]
            values[at] = [self.rng.randrange(200) for _ in at]
        self._number += 1
        made = PublicationId(NAME, *self._newest())
        self.history.published[self._newest()] = {table: each.tobytes() for table, each in self._values.items()}
        tensors = tuple(PublishedTensor(n, t, at, (num,), DTYPES[t]) for n, (t, at, num) in TENSORS.items())
        layout = wire.encode_layout(VersionLayout(tensors))
        num_servers = len(self.job.parts)
        for server in range(num_servers):
            parts, memories = [], []
            for table, values in self._values.items():
                start, stop = (len(values) * each // num_servers for each in (server, server + 1))
                memory = memoryview(values[start:stop].tobytes())
                parts.append(PublishedPart(table, start, memory.nbytes))
                memories.append(memory)
            digests = b"".join(each for memory in memories for each in chunk_digests(memory))
            head = VersionHead(made, digest_of(layout, digests), tuple(parts), len(layout))
            self._late.append((server, PublishedVersion(head, layout, tuple(memories), digests)))

    def _finish_part(self) -> None:
        """Have a server show the oldest part that it has not finished."""
        if self._late:
            server = self._late[self.rng.randrange(len(self._late))][0]
            found = next(each for each in self._late if each[0] == server)
            self._late.remove(found)
            self.job.parts[server].versions.show(found[1], KEEP)

    def _add_relay(self, upstream: Place) -> None:
        settings = RelaySettings((NAME,), KEEP, LEASED, "default")

        def begin() -> Callable[[], tuple[Published, ...]]:
            relay = VersionRelay(None, self._places(upstream, role="relay"), settings, lambda *_: None)  # pyright: ignore[reportArgumentType]
            if index < len(self.relays):
                for followed in self.relays[index][0]._followed.values():
                    followed.subscription.close()
                self.relays[index] = relay, place
            else:
                self.relays.append((relay, place))
            return relay._parts

        index = len(self.relays)
        place = Place(begin, share_address=True)
        place.kill()

    def _kill_relay(self) -> None:
        self.rng.choice(self.relays)[1].kill()

    def _relay_one(self, index: int | None = None) -> None:
        """Have a relay take the newest version."""
        relay, _ = self.relays[self.rng.randrange(len(self.relays)) if index is None else index]
        with suppress(DeadlineExceeded, PeerError), relay._followed[NAME].subscription.wait(timeout_s=0.0) as version:
            relay.show(version.held_parts())
            self.history.came(f"relay {index}", version.id, [held_by(part) for part in relay._parts()])

    def _lose_place(self) -> None:
        """Have a relay take the place that it reads for lost."""
        self.rng.choice(self.relays)[0]._withdraw(NAME)

    # -- lines -------------------------------------------------------------------------------------------------------

    def _places(self, *places: Place, role: str = "reader") -> VersionPlaces:
        finders = tuple(self._finder(place, role) for place in places)
        return VersionPlaces("a place", finders, compress=self.rng.random() < 0.5)

    def _finder(self, place: Place, role: str) -> Callable[[], PublishingServers]:
        def find() -> PublishingServers:
            addresses = ("0",) if place.share_address else tuple(map(str, range(len(place.parts))))
            line = Lines(self, place)
            return PublishingServers(line, addresses, 0, role, place.share_address)  # pyright: ignore[reportArgumentType]

        return find

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check_kept(self) -> None:
        for index, (_, place) in enumerate(self.relays):
            for part in place.parts:
                self.history.kept(f"relay {index}", held_by(part), KEEP, LEASED)
            self._check_leased(place)
        self._check_leased(self.job)
        for part in self.job.parts:
            self.history.kept("a server", held_by(part), KEEP, wire.MAX_LEASED)

    def _check_leased(self, place: Place) -> None:
        for line in list(place.lines):
            if line.is_served():
                self.history.leased("a place", line.leased(), line.versions_there())

    def _check_ended(self, place: Place) -> None:
        for line in list(place.lines):
            line.close()
        for part in place.parts:
            self.history.ended("a place", sum(each.num_leases for each in held_by(part)))


def held_by(part: Published) -> list[PublishedVersion]:
    """Return the versions that are held."""
    published = part.versions._names.get(NAME)
    return [] if published is None else list(published.versions.values())


@dataclass(frozen=True, slots=True)
class Lines:
    """A transport to one place."""

    world: World
    place: Place
    maps_memory: bool = False
    name: str = "tcp"

    def connect(self, address: str, _identity: bytes, *, timeout_s: float) -> ReaderEnd:
        del timeout_s
        server = int(address)
        if server >= len(self.place.parts):
            raise PeerError("nothing listens there")
        parts = self.place.parts if self.place.share_address else (self.place.parts[server],)
        return ReaderEnd(self.world, self.place, parts)


@contextmanager
def small_and_quick() -> Iterator[None]:
    """Have chunks of few bytes, and no pauses between tries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.wire.versions.CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr("paceline.versions.link.CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr("paceline.versions.link._PIECE_BYTES", PIECE_BYTES)
        patch.setattr("paceline.versions.link._AHEAD_BYTES", 3 * PIECE_BYTES)
        patch.setattr("paceline.versions.links._FIRST_PAUSE_S", 0.0)
        patch.setattr("paceline.server.versions.ARRIVAL_S", 0.0)
        yield
