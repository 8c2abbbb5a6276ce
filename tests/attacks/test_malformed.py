"""Ten thousand malformed frames: the server goes on, needs no more memory, an honest worker learns the same bits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
import pytest
import torch
from tests.attacks.malformed import RANK, Frame, FrameSource
from tests.attacks.rogue import row_table
from tests.attacks.target import serving
from tests.faults.running import SOURCES
from tests.nodes.client import Client, as_body, member
from tests.nodes.cluster import Cluster, table
from tests.transport.carriers import CREDENTIALS
from tests.transport.wire import open_raw, read_to_end, shake_hands

from paceline.core.messages import Applied, Fetched, Join, Pull, Push, PushId, Sender
from paceline.job.folders import INTERVAL_S
from paceline.job.spec import ClusterSpec, write_private
from paceline.transport import TcpTransport
from paceline.update.named_rules import SGD
from paceline.wire.messages import Hello, PullFrame, PushFrame, encode
from paceline.wire.requests import Declare, DeclareRows, Initialise, RequestDone

SERVER = Path(__file__).with_name("scripts") / "guarded_server.py"
NUMEL = 1000
NUM_STEPS = 40
STARTS_WITHIN_S = 200.0
TRAIN = 10  # frames a connection
GROWTH_BYTES = 4 << 20


@contextmanager
def server_process(folder: Path) -> Iterator[tuple[Cluster, psutil.Process]]:
    """Run a server as a process of its own, which must end as it is told and say nothing of a mistake of its own."""
    folder.chmod(0o700)
    write_private(folder / "token", CREDENTIALS.token)
    spec = ClusterSpec(job=CREDENTIALS.job, num_workers=1, num_servers=1, transport="tcp", run_dir=str(folder))
    spec.write(folder / "spec.json")
    command = [sys.executable, str(SERVER), str(folder / "spec.json"), "0"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    with (folder / "said").open("w+") as said:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=said, stderr=said, env=environment)
        try:
            address = wait_address(folder / "server-0.address", process)
            yield Cluster(TcpTransport(CREDENTIALS), [], (address,), 5.0), psutil.Process(process.pid)
            assert process.poll() is None, (folder / "said").read_text()
            process.communicate(b"stop\n", timeout=20)
        finally:
            process.kill()
            process.communicate()
    words = (folder / "said").read_text()
    assert process.returncode == 0, words
    assert "Traceback" not in words
    assert "FORBIDDEN" not in words


def wait_address(path: Path, process: subprocess.Popen[bytes]) -> str:
    for _ in range(round(STARTS_WITHIN_S / INTERVAL_S)):
        if path.exists():
            return path.read_text()
        with suppress(subprocess.TimeoutExpired):
            process.wait(INTERVAL_S)  # at most so long
            break
    raise AssertionError(f"no server came up: {(path.parent / 'said').read_text()}")


class Learner:
    """An honest worker with a table "w" under momentum SGD, and one of rows that it leaves alone."""

    def __init__(self, peer: Client) -> None:
        self._peer = peer
        self._noise = torch.Generator().manual_seed(0)
        self._num_steps = 0
        peer.say(Declare(1, table("w", NUMEL, "asynchronous", rule=SGD(lr=0.1, momentum=0.9))))
        peer.hear(RequestDone)
        peer.say(Initialise(2, "w"), as_body(torch.ones(NUMEL)))
        peer.hear(RequestDone)
        peer.say(DeclareRows(3, row_table("r")))
        peer.hear(RequestDone)

    def step(self) -> bytes:
        """Read values, push a gradient that depends on them, and return what was read."""
        number = self._num_steps = self._num_steps + 1
        self._peer.say(PullFrame(Pull(Sender(1, 0, 0), number, "w", 0, 0), number - 1))
        read = bytearray(self._peer.hear(Fetched)[1])
        values = torch.frombuffer(read, dtype=torch.float32)
        gradient = values.cos() * torch.randn(NUMEL, generator=self._noise)
        push = Push(PushId(1, 0, 0, number - 1), "w", 0, number - 1)
        self._peer.say(PushFrame(push, 1.0, (), ()), as_body(gradient))
        self._peer.hear(Applied)
        return bytes(read)


def undisturbed() -> list[bytes]:
    with serving() as servers, member(servers, 0) as peer:
        learner = Learner(peer)
        return [learner.step() for _ in range(NUM_STEPS)]


def attack(address: str, train: list[bytes], number: int) -> None:
    """Join as a worker with the token, say all that, and wait until the server has heard it or has hung up."""
    with open_raw(address) as sock, suppress(ConnectionError):
        shake_hands(sock, encode(Hello("worker", RANK, 0, 1, number)))
        sock.sendall(train[0])
        for frame in train[1:]:
            sock.sendall(frame)
        with suppress(OSError):  # "not connected" where the server has hung up
            sock.shutdown(socket.SHUT_WR)
        read_to_end(sock)


def bombard(folder: Path, num_frames: int, seed: int) -> None:
    expected = undisturbed()
    num_trains = -(-num_frames // TRAIN)
    with server_process(folder) as (servers, process), member(servers, 0) as peer:
        learner, read = Learner(peer), list[bytes]()
        held = list[int]()  # bytes of memory after each ninth
        join = encode(Join(Sender(1, RANK, 0)))
        for number, train in enumerate(FrameSource(seed).trains(num_frames, TRAIN)):
            attack(servers.addresses[0], [Frame(join, b"").raw, *(frame.raw for frame in train)], number)
            if number % max(1, num_trains // NUM_STEPS) == 0 and len(read) < NUM_STEPS:
                read.append(learner.step())
            if (number + 1) % (num_trains // 9) == 0:
                held.append(process.memory_info().rss)
        read += [learner.step() for _ in range(NUM_STEPS - len(read))]
    assert read == expected
    # In the last two thirds. What is kept of each frame grows in every part of them, and what the allocator takes from
    # the system for a while in one or two.
    parts = [later - sooner for sooner, later in pairwise(held[2:9])]
    assert len(parts) * median(parts) < max(GROWTH_BYTES, held[2] // 50), held


def test_ten_thousand_malformed_frames_change_nothing(tmp_path: Path) -> None:
    bombard(tmp_path, 10_000, seed=1)


@pytest.mark.campaign
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(10))
def test_a_million_malformed_frames_change_nothing(seed: int, tmp_path: Path) -> None:
    bombard(tmp_path, 100_000, seed=100 + seed)
