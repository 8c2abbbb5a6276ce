"""Conversations change no bit of what an honest worker reads, keep it waiting for no second, and fill no memory."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import count
from pathlib import Path

import psutil
import pytest
from tests.attacks.conversations import Asker, Beside, Enter, Honest, converse
from tests.attacks.malformed import RANK
from tests.attacks.target import serving
from tests.attacks.test_malformed import server_process
from tests.data.service.feeders import ask, feeders, is_right
from tests.data.service.speaking import caller
from tests.serve.daemon import daemon

from paceline.core.messages import Sender
from paceline.errors import PeerError
from paceline.serve.access import ServeUrl, server_access
from paceline.serve.client import NamespaceTransport, enter_namespace
from paceline.transport import Transport
from paceline.transport.base import Connection
from paceline.wire.messages import Hello, encode

HONEST = Sender(1, 0, 0)
HONEST_WITHIN_S = 1.0  # that the server computes, for one round trip
ROOM_BYTES = 3 << 30  # of address space, beside what a server has at its start
GROWTH_BYTES = 1 << 30  # of memory in use, at any time


def undisturbed(num_steps: int) -> Honest:
    """Let an honest worker make so many steps on a server of its own."""
    with serving() as servers, closing(entry_of(servers.transport, servers.addresses[0])(hello(HONEST))) as line:
        honest = Honest(line, HONEST)
        for _ in range(num_steps):
            honest.step()
    return honest


def hello(me: Sender) -> Hello:
    return Hello("worker", me.worker, me.incarnation, me.generation)


def entry_of(transport: Transport, address: str) -> Enter:
    return lambda own: transport.connect(address, encode(own), timeout_s=30)


def lives() -> Iterator[Sender]:
    return (Sender(1, RANK, incarnation) for incarnation in count())


def peak_bytes(process: psutil.Process) -> int:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def attack_data_server(folder: Path, num_messages: int, seed: int) -> None:
    """Open, read, return and leave as a worker may, and as none may, while an honest worker reads its batches."""
    asker, num_said = Asker(seed), 0
    with feeders("tcp", folder) as running, running.reader() as reader:
        for number in count():
            if num_said >= num_messages:
                break
            with caller(running) as rogue, suppress(PeerError):
                num_said += asker.talk(rogue)
            asked = ask(number % 1000, epoch=number // 1000)
            assert is_right(reader.read(asked), asked)  # within the deadline of a read


def judge(honest: Honest) -> None:
    """Compare an honest worker with one that had the server for itself."""
    alone = undisturbed(len(honest.digests))
    assert honest.digests == alone.digests
    assert honest.slowest_s < HONEST_WITHIN_S, f"{honest.slowest_s:.3f} s"


def attack_served(folder: Path, num_messages: int, seed: int) -> None:
    """Attack the namespace of an honest client of `paceline serve`, by lives that its gateway has admitted."""
    with daemon(folder / "state") as served:
        location = ServeUrl.parse(served.address("shared"))
        access = server_access("127.0.0.1", served.state, None)
        lines: dict[tuple[int, int], NamespaceTransport] = {}

        def let_in(rank: int) -> Sender:
            entry = enter_namespace(location, access, rank, None)
            admitted = entry.admitted
            lines[rank, admitted.incarnation] = entry.transport
            return Sender(admitted.generation, rank, admitted.incarnation)

        def connect(own: Hello) -> Connection:
            return lines[own.rank, own.incarnation].connect(str(location), encode(own), timeout_s=30)

        def others() -> Iterator[Sender]:
            while True:
                yield let_in(next(ranks))

        ranks = count(1)
        me = let_in(0)
        with closing(connect(hello(me))) as line:
            honest = Honest(line, me)
            with Beside(honest) as beside:
                assert converse(connect, others(), seed, num_messages) >= num_messages
            assert beside.error is None, beside.error
    judge(honest)


def attack_server(folder: Path, num_messages: int, seed: int) -> None:
    with server_process(folder) as (servers, process):
        enter = entry_of(servers.transport, servers.addresses[0])
        with closing(enter(hello(HONEST))) as line:
            honest = Honest(line, HONEST, lambda: sum(process.cpu_times()[:2]))
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


def test_conversations_in_a_namespace(tmp_path: Path) -> None:
    attack_served(tmp_path, 1_000, seed=2)


def test_conversations_with_a_data_server(tmp_path: Path) -> None:
    attack_data_server(tmp_path, 1_000, seed=3)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(200, 202))
def test_a_hundred_thousand_things_said_in_namespaces_and_to_data_servers(seed: int, tmp_path: Path) -> None:
    attack_served(tmp_path, 50_000, seed)
    attack_data_server(tmp_path, 50_000, seed)


@pytest.mark.campaign
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(100, 112))
def test_a_million_things_said_to_servers(seed: int, tmp_path: Path) -> None:
    attack_server(tmp_path, 80_000, seed)
