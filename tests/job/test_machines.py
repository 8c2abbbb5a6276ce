"""Which addresses a machine has, and which of them others are told."""

import threading
import time

import pytest

from paceline.errors import UsageError
from paceline.job import machines
from paceline.job.machines import (
    Machine,
    address_for_others,
    address_towards,
    check_family,
    look_up,
    own_address,
    own_addresses,
    this_machine,
)

ELSEWHERE = "198.51.100.7"  # of a network for examples


@pytest.fixture
def address() -> str:
    """An address of this machine that leads further than to itself."""
    if not own_addresses():
        pytest.skip("this machine has no address but those of loopback")
    return own_addresses()[0]


def test_a_machine_is_its_name_and_its_kernels_start() -> None:
    assert this_machine() == this_machine()
    assert this_machine() != Machine(this_machine().name, "started at another time")
    assert str(Machine("node-3", "b7")) == "node-3"


def test_addresses_are_those_that_others_could_reach(address: str) -> None:
    assert look_up(address) == [address]
    assert own_address(address) == address
    assert address_for_others(address) == address
    assert not {"127.0.0.1", "::1"} & set(own_addresses())


def test_a_name_that_is_not_known_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no address is known for the host 'node-9\.invalid'"):
        look_up("node-9.invalid")
    with pytest.raises(UsageError, match=r"no address is known for the host 'a\.\.b'"):  # which is no name at all
        look_up("a..b")

    answer = threading.Event()
    monkeypatch.setattr(machines, "LOOKUP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(machines.socket, "getaddrinfo", lambda *_, **__: answer.wait(60.0) and [])
    began = time.monotonic()
    with pytest.raises(UsageError, match=r"'node-9', asked for 0\.05 s"):
        look_up("node-9")
    answer.set()
    assert time.monotonic() - began < 30.0


def test_one_network_names_an_address_of_each_machine(address: str) -> None:
    wide = "0.0.0.0/0" if "." in address else "::/0"

    assert own_address(f"{address}/24") == own_address(wide) == address
    with pytest.raises(UsageError, match=r"PACELINE_HOST is ten/8, expected a name, an address or a network"):
        own_address("ten/8")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", ELSEWHERE, f"{ELSEWHERE}/32"])
def test_an_address_that_is_not_of_this_machine_is_refused_with_those_that_are(host: str, address: str) -> None:
    with pytest.raises(UsageError, match=rf"PACELINE_HOST is {host}.* this machine has .*{address}"):
        own_address(host)


def test_where_nothing_leads_anywhere_the_user_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "_source", lambda _: None)
    monkeypatch.setattr(machines.socket, "gethostname", lambda: "localhost")

    with pytest.raises(UsageError, match=r"at which address do the other machines reach localhost\? .*PACELINE_HOST"):
        address_for_others(None)
    with pytest.raises(UsageError, match=rf"no way leads from localhost to {ELSEWHERE}, at which first is to be"):
        address_towards(ELSEWHERE, Machine("first"))


def test_all_addresses_of_a_job_are_of_one_family() -> None:
    check_family("192.0.2.1", ELSEWHERE, Machine("first"))

    with pytest.raises(UsageError, match=r"first is reached at 198.* Name one that is of version 4"):
        check_family("2001:db8::2", ELSEWHERE, Machine("first"))
