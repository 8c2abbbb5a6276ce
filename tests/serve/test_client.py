"""The way to a server whose host has several addresses, or one that is not known yet."""

import time
from collections.abc import Iterator
from contextlib import closing
from unittest.mock import Mock

import pytest
from tests.transport.carriers import full_listener

import paceline
from paceline.errors import ConnectionLost, DeadlineExceeded, UsageError
from paceline.serve import client as calling
from paceline.serve.access import ServeUrl
from paceline.serve.client import NamespaceTransport
from paceline.serve.messages import EnterFrame
from paceline.transport import Credentials, TcpTransport

VISIT = EnterFrame("a", b"hello")
WHERE = ServeUrl("node-3", 7700, "a")
NOWHERE = "tcp://127.0.0.1:1"  # which refuses


@pytest.fixture
def tcp() -> TcpTransport:
    return TcpTransport(Credentials(bytes(range(32)), "calls"))


@pytest.fixture
def deaf() -> Iterator[str]:
    with full_listener() as address:
        yield f"tcp://{address}"


def test_an_address_that_drops_packets_leaves_time_to_the_next_one_which_is_remembered(
    tcp: TcpTransport, deaf: str
) -> None:
    with closing(tcp.listen("127.0.0.1:0")) as listener:
        line = NamespaceTransport(WHERE, tcp, lambda: (deaf, listener.address))

        with closing(line.open_connection(VISIT, timeout_s=2.0)) as connection:
            assert f"tcp://{connection.peer}" == listener.address
        began_s = time.monotonic()
        with closing(line.open_connection(VISIT, timeout_s=60.0)):
            assert time.monotonic() - began_s < 30.0, "the deaf one is tried first no more"


def test_where_no_address_leads_there_the_host_is_looked_up_again(tcp: TcpTransport, deaf: str) -> None:
    with closing(tcp.listen("127.0.0.1:0")) as listener:
        known = iter([(deaf,), (listener.address,)])
        line = NamespaceTransport(WHERE, tcp, lambda: next(known))

        with pytest.raises(DeadlineExceeded):
            line.open_connection(VISIT, timeout_s=0.1)
        line.open_connection(VISIT, timeout_s=30.0).close()


def test_servers_that_were_learned_are_tried_after_the_hosts_were_looked_up_again(
    tcp: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(tcp.listen("127.0.0.1:0")) as listener:
        line = NamespaceTransport(WHERE, tcp, lambda: (NOWHERE,))
        line.learn((NOWHERE, listener.address))

        monkeypatch.setattr(TcpTransport, "connect", Mock(side_effect=ConnectionLost("it is away")))
        with pytest.raises(ConnectionLost, match="it is away"):
            line.open_connection(VISIT, timeout_s=30.0)
        monkeypatch.undo()
        line.open_connection(VISIT, timeout_s=30.0).close()


def test_where_none_of_several_servers_answers_their_hosts_are_looked_up_again(tcp: TcpTransport) -> None:
    find, where = Mock(return_value=(NOWHERE,)), ServeUrl("node-3", 7700, "a", (("node-4", 7700),))
    line = NamespaceTransport(where, tcp, find)
    with pytest.raises(ConnectionLost, match="no server of paceline://node-3:7700,node-4:7700/a serves it now"):
        line.connect(str(where), b"hello", timeout_s=30.0)
    assert find.call_count == 2


def test_a_name_that_becomes_known_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "LOOKUP_PAUSE_S", 0.001)
    answers: list[list[str]] = [[], [], ["127.0.0.1"]]

    def look_up(host: str) -> list[str]:
        if not answers[0]:
            del answers[0]
            raise UsageError(f"no address is known for the host {host!r}")
        return answers[0]

    monkeypatch.setattr(calling, "look_up", look_up)
    with pytest.raises(paceline.errors.PeerError, match=r"cannot reach paceline://localhost:1/a: no listener"):
        paceline.connect("paceline://localhost:1/a", token=bytes(range(32)))
    assert answers == [["127.0.0.1"]]


def test_a_name_that_stays_unknown_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calling, "LOOKUP_PAUSE_S", 0.001)
    monkeypatch.setattr(calling, "CONNECT_TIMEOUT_S", 0.02)
    monkeypatch.setattr(calling, "look_up", Mock(side_effect=UsageError("no address is known for 'localhost'")))
    with pytest.raises(UsageError, match=r"no address is known for 'localhost' \(tried for 0\.02 s\)"):
        paceline.connect("paceline://localhost:1/a", token=bytes(range(32)))
