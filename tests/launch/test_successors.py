"""When another process goes on in the place of a server, and when it is given up."""

import socket
from collections.abc import Iterator

import pytest

from paceline.core.events import Timeout
from paceline.launch.child import Launch
from paceline.launch.successors import MAX_FRUITLESS, NUM_ENTRIES, Successors
from paceline.server.journal import LISTENER, Journal
from paceline.transport.lasting_memory import LastingMemory

TIMEOUT_S = 60.0


@pytest.fixture
def successors() -> Iterator[Successors]:
    with Successors(2) as successors:
        yield successors


def live(successors: Successors, rank: int, num_entries: int, *, serves: bool = True, cold: str = "") -> None:
    """Do what one life of a server does with its memory."""
    journal = Journal(LastingMemory.connect(successors._holders[rank].theirs))
    if journal.is_new:
        journal.write_snapshot(b"")
    else:
        journal.read()
        journal.append(Timeout(), 0.0)
        if serves:
            journal.note_resumed()
    for _ in range(num_entries):
        journal.append(Timeout(), 0.0)
    if cold:
        journal.close(cold)


def test_a_server_that_has_served_goes_on_however_often_it_is_killed(successors: Successors) -> None:
    for _ in range(3 * MAX_FRUITLESS):
        live(successors, 0, NUM_ENTRIES)
        assert successors.objection(0) == ""


@pytest.mark.parametrize("serves", [True, False])
def test_a_server_that_dies_again_and_again_before_it_has_done_anything_is_given_up(
    serves: bool, successors: Successors
) -> None:
    live(successors, 0, NUM_ENTRIES)
    for _ in range(MAX_FRUITLESS):
        assert successors.objection(0) == ""
        live(successors, 0, 0, serves=serves)
    assert "5 times in a row before it had done anything more" in successors.objection(0)


def test_a_life_that_serves_clears_the_failures_before(successors: Successors) -> None:
    live(successors, 0, NUM_ENTRIES)
    for _ in range(3):
        for _ in range(MAX_FRUITLESS - 1):
            assert successors.objection(0) == ""
            live(successors, 0, 0)
        assert successors.objection(0) == ""
        live(successors, 0, NUM_ENTRIES)
    assert successors.objection(0) == ""


def test_a_server_that_cannot_be_kept_says_why_and_one_that_never_served_is_lost(successors: Successors) -> None:
    live(successors, 0, NUM_ENTRIES, cold="table 'w' has a rule with a state of its own")
    assert successors.objection(0) == "table 'w' has a rule with a state of its own"
    assert successors.objection(1) == "it had not begun to serve"


def test_clients_that_wait_for_a_server_that_is_given_up_are_told_at_once(successors: Successors) -> None:
    with socket.socket() as listening, socket.socket() as client:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        memory = LastingMemory.connect(successors._holders[0].theirs)
        memory.keep(LISTENER, listening.fileno())
        address = listening.getsockname()
        del memory  # as if its process had died
        listening.close()
        client.settimeout(TIMEOUT_S)
        client.connect(address)
        assert successors.objection(0) == "it had not begun to serve"
        with pytest.raises(ConnectionResetError):
            client.recv(1)


def test_every_server_reaches_memory_of_its_own_and_workers_none(successors: Successors) -> None:
    launches = [
        Launch(role=role, name=f"{role} {rank}", rank=rank, command=(), environment={})
        for role in ("server", "worker")
        for rank in range(2)
    ]
    memories = [launch.memory for launch in successors.equip(launches)]
    assert len({*memories[:2]} - {None}) == 2
    assert memories[2:] == [None, None]
