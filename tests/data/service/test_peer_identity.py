"""Certificates between workers and data servers: no process is taken for another, and a revoked one is out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from tests.data.service.feeders import Feeders, ask, hello, is_right, until
from tests.data.service.speaking import caller

from paceline.data.service.client import ReaderOptions
from paceline.data.service.messages import OpenSource
from paceline.errors import PeerError
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.transport import Credentials, TcpTransport

CREDENTIALS = Credentials(bytes(range(32)), "feeding")
HOLDERS = (Holder("worker", 0), Holder("worker", 1), Holder("data", 0), Holder("data", 1))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, authority = tmp_path_factory.mktemp("keys"), Authority.make(CREDENTIALS.job)
    for holder in HOLDERS:
        authority.issue(folder, holder)
    return folder


def carrier(keys: Path, holder: Holder) -> TcpTransport:
    return TcpTransport(CREDENTIALS, tls=tls_settings(keys, holder))


@contextmanager
def serving(keys: Path, holder: Holder) -> Iterator[Feeders]:
    """Run data server 0 with this certificate."""
    running = Feeders("tcp", keys, carrier(keys, holder))
    running.start(0)
    try:
        yield running
    finally:
        running.end(0)


@contextmanager
def seen_by(worker: int, running: Feeders, keys: Path) -> Iterator[Feeders]:
    """Yield the same data server, as one with this worker's certificate can reach it."""
    yield Feeders("tcp", keys, carrier(keys, Holder("worker", worker)), addresses=running.addresses)


def test_a_worker_is_fed_under_its_own_name_alone_and_until_it_is_revoked(keys: Path) -> None:
    with serving(keys, Holder("data", 0)) as running, seen_by(1, running, keys) as mine:
        with caller(mine, hello(0)) as rogue:
            rogue.say(OpenSource(0))
            assert rogue.is_cut_off()
        with closing(mine.new_reader(rank=1)) as reader, caller(mine, hello(1)) as other:
            assert is_right(reader.read(ask(0)), ask(0))
            other.opens()
            running.nodes[0].expel(frozenset({"worker-1"}))
            assert other.is_cut_off()


@pytest.mark.parametrize("holder", [Holder("worker", 1), Holder("data", 1)])
def test_a_worker_does_not_trust_another_than_the_data_server_that_it_called(holder: Holder, keys: Path) -> None:
    with (
        serving(keys, holder) as running,
        seen_by(0, running, keys) as mine,
        closing(mine.new_reader()) as reader,
    ):
        reader.expect([ask(0)])
        until(lambda: "certificate" in reader._states[0].problem)
        reader._options = ReaderOptions(timeout_s=0.1)
        with pytest.raises(PeerError, match=f"should be data server 0, but its certificate is for {holder}"):
            reader.read(ask(0))
