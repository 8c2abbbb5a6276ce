"""A reader takes a version though servers drop each for the next: they hold it, and it waits where one is missing."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from paceline.errors import DeadlineExceeded
from paceline.transport.deadline import Deadline
from paceline.transport.tcp import TcpTransport
from paceline.versions import links
from paceline.versions.link import Base, LeasedPart, PartMemory, VersionNotThere
from paceline.versions.places import PublishingServers, VersionPlaces
from paceline.versions.subscription import VersionSubscription
from paceline.wire.versions import PublicationId, VersionHead, VersionLayout, digest_of, encode_layout

ADDRESSES = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
MOST_STEPS = 20  # by then a reader that can take a version has one
LAYOUT = encode_layout(VersionLayout(()))


@dataclass(slots=True)
class Publishing:
    """Servers that keep one version each; of `ahead`, each version comes a step before the others have it.

    `steps_before_lease`: that are made while a reader asks for a lease. `holds`: what a reader wants held is.
    """

    ahead: int
    steps_before_lease: int = 0
    holds: bool = True
    num_steps: int = 0
    shown: list[int] = field(default_factory=lambda: [0 for _ in ADDRESSES])

    def __post_init__(self) -> None:
        self.shown[self.ahead] = 1

    def step(self) -> None:
        self.num_steps += 1
        assert self.num_steps < MOST_STEPS, f"a reader has no version after {MOST_STEPS} of them"
        newest = self.shown[self.ahead]
        if min(self.shown) < newest:
            self.shown = [newest for _ in ADDRESSES]
        else:
            self.shown[self.ahead] += 1

    def newest(self, server: int) -> PublicationId:
        return PublicationId("w", "one", self.shown[server])


class Link:
    """What a reader knows of one of these servers, without a line."""

    maps = False
    problem = ""

    def __init__(self, publishing: Publishing, server: int) -> None:
        self.publishing = publishing
        self.server = server
        self.num_servers = len(ADDRESSES)
        self.deadline = Deadline.after(0.0)
        self.held: PublicationId | None = None

    def find(
        self, _: str, known: tuple[PublicationId, ...], wait_s: float, *, hold: bool = False
    ) -> tuple[PublicationId, ...]:
        self.held = None
        while wait_s and self.publishing.newest(self.server) in known:
            self.publishing.step()
        found = self.publishing.newest(self.server)
        self.held = found if hold and self.publishing.holds and found not in known else None
        return (found,)

    def lease(self, wanted: PublicationId) -> LeasedPart:
        for _ in range(self.publishing.steps_before_lease):
            self.publishing.step()
        if wanted not in (self.held, self.publishing.newest(self.server)):
            raise VersionNotThere(f"version {wanted.number} is not here")
        self.held = None
        head = VersionHead(wanted, digest_of(LAYOUT, b""), (), len(LAYOUT))
        return LeasedPart(head, memoryview(LAYOUT), memoryview(b""))

    def end_hold(self) -> None:
        self.held = None

    def end_lease(self, version: PublicationId) -> None:
        pass

    def fetch(self, leased: LeasedPart, into: PartMemory, base: Base | None, came: object) -> None:
        pass

    def close(self) -> None:
        pass


def reader_of(publishing: Publishing, monkeypatch: pytest.MonkeyPatch) -> VersionSubscription:
    monkeypatch.setattr(links, "ReaderLink", lambda _, server, __, **___: Link(publishing, server))
    servers = PublishingServers(TcpTransport(b""), ADDRESSES)
    return VersionSubscription("w", VersionPlaces("the test", (lambda: servers,)))


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_server_that_is_always_ahead_keeps_no_version_from_a_reader(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reader_of(Publishing(ahead), monkeypatch) as reader:
        assert [reader.wait(timeout_s=60.0).number for _ in range(3)] == [1, 2, 3]


def test_versions_that_come_faster_than_a_reader_asks_are_held_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with reader_of(Publishing(ahead=0, steps_before_lease=2), monkeypatch) as reader:
        numbers = [reader.wait(timeout_s=60.0).number for _ in range(3)]
    assert numbers == sorted(set(numbers))


def test_a_reader_whose_versions_are_always_dropped_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    publishing = Publishing(ahead=1, steps_before_lease=2, holds=False)
    publishing.step()
    with (
        reader_of(publishing, monkeypatch) as reader,
        pytest.raises(DeadlineExceeded, match="versions are dropped before they are taken: version 1 is not here"),
    ):
        reader.latest(timeout_s=0.0)
