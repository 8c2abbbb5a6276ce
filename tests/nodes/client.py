"""A worker or server as an attacker or a broken program would play it: any bytes over a real connection."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from tests.nodes.cluster import Cluster, table
from torch import Tensor

from paceline.core.messages import Join, Joined, Push, PushId, Sender
from paceline.errors import ConnectionLost, DeadlineExceeded
from paceline.transport.base import EMPTY, Connection
from paceline.wire.messages import Hello, PushFrame, decode, encode
from paceline.wire.requests import Declare, Initialise, RequestDone, RequestFailed

T = TypeVar("T")

TIMEOUT_S = 30.0
NUMEL = 4
WORKER = Hello("worker", 1, 0, 1)
SENDER = Sender(1, 1, 0)


class Client:
    """A connection that says whatever the test wants."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def say(self, message: object, body: memoryview = EMPTY) -> None:
        self.connection.send(encode(message), body, timeout_s=TIMEOUT_S)

    def say_bytes(self, header: bytes) -> None:
        self.connection.send(header, timeout_s=TIMEOUT_S)

    def hear(self, kind: type[T]) -> tuple[T, memoryview]:
        """Wait for the next message of this kind, and return it with its body."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            frame = self.connection.receive(timeout_s=TIMEOUT_S)
            message = decode(frame.header)
            if isinstance(message, kind):
                return message, frame.body
            assert not isinstance(message, RequestFailed), message
        raise AssertionError(f"no {kind.__name__} came")

    def is_cut_off(self) -> bool:
        """Whether the server ends the connection, as it does with those that break the rules."""
        try:
            while True:
                self.connection.receive(timeout_s=TIMEOUT_S)
        except DeadlineExceeded:
            return False
        except ConnectionLost:
            return True


@contextmanager
def client(servers: Cluster, identity: object | bytes, server: int = 0) -> Iterator[Client]:
    raw = identity if isinstance(identity, bytes) else encode(identity)
    connection = servers.transport.connect(servers.addresses[server], raw, timeout_s=TIMEOUT_S)
    try:
        yield Client(connection)
    finally:
        connection.close()


@contextmanager
def member(servers: Cluster, rank: int, incarnation: int = 0, connection: int = 0) -> Iterator[Client]:
    """A client that has joined as a worker."""
    with client(servers, Hello("worker", rank, incarnation, 1, connection)) as joined:
        joined.say(Join(Sender(1, rank, incarnation)))
        joined.hear(Joined)
        yield joined


def push(seq: int, *, name: str = "w", clock: int = 0, worker: int = 1, count: float = 1.0) -> PushFrame:
    return PushFrame(Push(PushId(1, worker, 0, seq), name, clock, 0), count, (), ())


def as_body(values: Tensor) -> memoryview:
    return memoryview(values.numpy()).cast("B")


ONES = as_body(torch.ones(NUMEL))


def serve_table(member: Client, consistency: str = "asynchronous") -> None:
    """Make table "w" of zeros, as one worker would."""
    member.say(Declare(1, table("w", NUMEL, consistency)))
    member.hear(RequestDone)
    member.say(Initialise(2, "w"), as_body(torch.zeros(NUMEL)))
    member.hear(RequestDone)
