"""A worker that says whatever it may say, in any order and with any numbers, ends no server and stalls no other."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from tests.attacks.malformed import ME, RANK
from tests.attacks.rogue import Rogue
from tests.attacks.sessions import Talker
from tests.nodes.client import client, member, serve_table
from tests.nodes.cluster import Cluster, cluster

from paceline.core.messages import Fetched, Join, Pull, Sender
from paceline.errors import PeerError
from paceline.wire.messages import Hello, PullFrame

MESSAGES_A_CONNECTION = 40
CONNECTIONS_A_SERVER = 20


def talk(servers: Cluster, talker: Talker, connection: int) -> int:
    """Join and say many things, each when the one before was heard; return how many, until it is cut off."""
    with client(servers, Hello("worker", RANK, 0, 1, connection)) as peer:
        rogue = Rogue(peer, RANK)
        rogue.say(Join(ME))
        openings = [] if connection else talker.openings()
        for number in range(MESSAGES_A_CONNECTION):
            message, body = openings.pop() if openings else talker.say()
            with suppress(PeerError):
                rogue.say(message, body)
            if "cut" in rogue.hear():
                return number + 1
    return MESSAGES_A_CONNECTION


def attack(folder: Path, seed: int, num_messages: int) -> None:
    talker = Talker(seed)
    while num_messages > 0:
        with cluster("memory", folder, num_servers=1) as servers, member(servers, 0) as honest:
            serve_table(honest)
            for number in range(CONNECTIONS_A_SERVER):
                num_messages -= talk(servers, talker, number)
                honest.say(PullFrame(Pull(Sender(1, 0, 0), number + 1, "w", 0, 0), number))
                assert bytes(honest.hear(Fetched)[1]) == bytes(16)


@pytest.mark.parametrize("seed", range(2))
def test_whatever_a_worker_says_others_are_served(seed: int, tmp_path: Path) -> None:
    attack(tmp_path, seed, num_messages=2000)


@pytest.mark.campaign
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(100, 110))
def test_whatever_a_worker_says_at_length_others_are_served(seed: int, tmp_path: Path) -> None:
    attack(tmp_path, seed, num_messages=200_000)
