"""An address that leads nowhere is told as one, within the time that was given: which, how long, and what to do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.attacks.certificates import Certificates
from tests.transport.carriers import CREDENTIALS, full_listener

from paceline.errors import DeadlineExceeded, PeerError, UsageError
from paceline.job.credentials.holders import Holder
from paceline.transport import TcpTransport, TlsSettings

PLAIN = TcpTransport(CREDENTIALS)
# Set aside for documents: no machine has it.
UNUSED_ADDRESS = "203.0.113.7"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsSettings:
    folder: Path = tmp_path_factory.mktemp("certificates")
    return Certificates(folder).of(Holder("worker", 0))


@pytest.fixture
def deaf_address() -> Iterator[str]:
    with full_listener() as address:
        yield address


def test_a_server_that_cannot_be_reached_is_given_up_at_the_deadline(deaf_address: str) -> None:
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=rf"waited 0.3 s for {deaf_address} to take the connection"):
        PLAIN.connect(deaf_address, b"", timeout_s=0.3)
    assert 0.25 < time.monotonic() - began_s < 30.0
    with pytest.raises(DeadlineExceeded, match=r"waited 0\.1 s for"):
        PLAIN.connect(deaf_address, b"", timeout_s=0.09997900000808)


def test_an_address_of_the_other_family_leads_nowhere() -> None:
    with closing(PLAIN.listen("127.0.0.1:0")) as listener:
        port = listener.address.rpartition(":")[2]
        with pytest.raises(PeerError, match=rf"(no listener at|cannot connect to) \[::1\]:{port}"):
            PLAIN.connect(f"[::1]:{port}", b"", timeout_s=30)


def test_a_port_that_is_taken_is_told_with_the_process() -> None:
    with closing(PLAIN.listen("127.0.0.1:0")) as listener:
        taken = r"port \d+ of 127.0.0.1 is taken( by process \d+)?: choose another port, or 0"
        with pytest.raises(UsageError, match=taken):
            PLAIN.listen(listener.address)


def test_an_address_of_another_machine_cannot_be_listened_at(tls: TlsSettings) -> None:
    with pytest.raises(UsageError, match=f"this machine has no address {UNUSED_ADDRESS}"):
        TcpTransport(CREDENTIALS, tls=tls).listen(f"{UNUSED_ADDRESS}:0")


@pytest.mark.parametrize("place", [f"{UNUSED_ADDRESS}:1", "0.0.0.0:0", "[::]:0", "[2001:db8::7]:1"])
def test_beyond_this_machine_nothing_travels_in_the_clear(place: str) -> None:
    for act in (lambda: PLAIN.listen(place), lambda: PLAIN.connect(place, b"", timeout_s=30)):
        with pytest.raises(UsageError, match=r"is not a loopback address: .*TLS.*paceline keys make"):
            act()


@pytest.mark.parametrize("place", ["server.example:1", "127.0.0.1", "127.0.0.1:65536", "127.0.0.1:-1", "::1:80x", ""])
def test_what_is_no_address_is_named(place: str) -> None:
    with pytest.raises(UsageError, match=r"is not a TCP address|is not an IP address"):
        PLAIN.connect(place, b"", timeout_s=30)
