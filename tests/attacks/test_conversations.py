"""Conversations change no bit of what an honest worker reads, keep it waiting for no second, and fill no memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

import psutil
import pytest
from tests.attacks.conversations import Beside, Enter, Honest, converse
from tests.attacks.malformed import RANK
from tests.attacks.target import serving
from tests.attacks.test_malformed import server_process

from paceline.core.messages import Sender
from paceline.node.wire import Hello, encode
from paceline.transport import Transport

HONEST = Sender(1, 0, 0)
HONEST_WITHIN_S = 1.0  # for one round trip, or as many of its own on an idle server
TIMES_AS_SLOW = 50
ROOM_BYTES = 3 << 30  # of address space, beside what a server has at its start
GROWTH_BYTES = 1 << 30  # of memory in use, at any time


def undisturbed(num_steps: int) -> Honest:
    """Let an honest worker make so many steps on a server that nobody else uses."""
    with serving() as servers, closing(door(servers.transport, servers.addresses[0])(hello(HONEST))) as line:
        honest = Honest(line, HONEST)
        for _ in range(num_steps):
            honest.step()
    return honest


def hello(me: Sender) -> Hello:
    return Hello("worker", me.worker, me.incarnation, me.generation)


def door(transport: Transport, address: str) -> Enter:
    return lambda who: transport.connect(address, encode(who), timeout_s=10.0)


def lives() -> Iterator[Sender]:
    return (Sender(1, RANK, incarnation) for incarnation in count())


def peak_bytes(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def judge(honest: Honest) -> None:
    """Compare an honest worker with one that had the server for itself."""
    alone = undisturbed(len(honest.digests))
    assert honest.digests == alone.digests
    assert honest.slowest_s < max(HONEST_WITHIN_S, TIMES_AS_SLOW * alone.slowest_s), f"{honest.slowest_s:.3f} s"


def attack_server(folder: Path, num_messages: int, seed: int) -> None:
    with server_process(folder) as (servers, process):
        enter = door(servers.transport, servers.addresses[0])
        with closing(enter(hello(HONEST))) as line:
            honest = Honest(line, HONEST)
            honest.step()
            size_bytes, peak = process.memory_info().vms + ROOM_BYTES, peak_bytes(process)
            resource.prlimit(process.pid, resource.RLIMIT_AS, (size_bytes, size_bytes))
            with Beside(honest) as beside:
                num_said = converse(enter, lives(), seed, num_messages)
            assert beside.error is None, beside.error
            assert num_said >= num_messages
            assert len(honest.digests) > 1
            grown_bytes = peak_bytes(process) - peak
    assert grown_bytes < GROWTH_BYTES, f"{grown_bytes} bytes more"
    judge(honest)


def test_conversations_with_a_server(tmp_path: Path) -> None:
    attack_server(tmp_path, 3_000, seed=1)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 110))
def test_a_million_things_said_to_servers(seed: int, tmp_path: Path) -> None:
    attack_server(tmp_path, 80_000, seed)
