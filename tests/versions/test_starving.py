"""A reader takes a version though servers drop each for the next: it waits where one is missing, until its deadline."""

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
    """Servers that keep one version each; of `ahead`, each version comes a step before the others have it."""

    ahead: int
    drops_leased: bool = False
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

    def ids(self, server: int) -> tuple[PublicationId, ...]:
        return (PublicationId("w", "one", self.shown[server]),)


class Link:
    """What a reader knows of one of these servers, without a line."""

    maps = False
    problem = ""

    def __init__(self, publishing: Publishing, server: int) -> None:
        self.publishing = publishing
        self.server = server
        self.num_servers = len(ADDRESSES)
        self.deadline = Deadline.after(0.0)

    def find(self, _: str, known: tuple[PublicationId, ...], wait_s: float) -> tuple[PublicationId, ...]:
        while wait_s and self.publishing.ids(self.server) == known:
            self.publishing.step()
        return self.publishing.ids(self.server)

    def lease(self, wanted: PublicationId) -> LeasedPart:
        if self.publishing.drops_leased:  # on all servers, so that there is always one to take
            self.publishing.step()
            self.publishing.step()
            raise VersionNotThere(f"version {wanted.number} is not here")
        head = VersionHead(wanted, digest_of(LAYOUT, b""), (), len(LAYOUT))
        return LeasedPart(head, memoryview(LAYOUT), memoryview(b""))

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


def test_a_reader_whose_versions_are_always_dropped_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    publishing = Publishing(ahead=1, drops_leased=True)
    publishing.step()
    with (
        reader_of(publishing, monkeypatch) as reader,
        pytest.raises(DeadlineExceeded, match="versions are dropped before they are taken: version 1 is not here"),
    ):
        reader.latest(timeout_s=0.0)
