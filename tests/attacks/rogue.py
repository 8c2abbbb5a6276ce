"""A worker that was taken over: it has the token, it has joined, and it says whatever its new master wants."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tests.attacks.target import PATIENCE_S
from tests.nodes.client import Client, client
from tests.nodes.cluster import Cluster
from torch import Tensor

from paceline.core.messages import Join, Joined, Pull, Push, PushId, Sender
from paceline.errors import PeerError
from paceline.transport.base import EMPTY
from paceline.update.named_rules import Add
from paceline.update.rows.spec import RowTableSpec
from paceline.update.rules import Hyper, RuleSpec
from paceline.update.table import Segment, TableSpec
from paceline.wire.messages import Hello, Keys, PullFrame, PushFrame, RowPullFrame, RowPushFrame, decode, encode
from paceline.wire.requests import RequestFailed, SaveState

LAST = 10**6  # the number of a request whose answer says that all before have been looked at
MOST = 2**64 - 1  # that fits into a message
IDS = torch.tensor([1, 2])


class Rogue:
    """Says anything, and hears what becomes of it."""

    def __init__(self, peer: Client, rank: int, sender: Sender | None = None) -> None:
        self.peer = peer
        self.rank = rank
        self.sender = sender or Sender(1, rank, 0)

    def say(self, message: object, body: memoryview | bytes = EMPTY) -> None:
        self.say_bytes(encode(message), body)

    def say_bytes(self, header: bytes, body: memoryview | bytes = EMPTY) -> None:
        self.peer.connection.send(header, memoryview(body), timeout_s=PATIENCE_S)

    def hear(self) -> list[object]:
        """Return all answers so far; "cut" at the end when the server has ended the connection."""
        heard: list[object] = []
        try:
            self.say(SaveState(LAST, "there is none"))
            while True:
                message = decode(self.peer.connection.receive(timeout_s=PATIENCE_S).header)
                if isinstance(message, RequestFailed) and message.number == LAST:
                    return heard
                heard.append(message)
        except PeerError:
            return [*heard, "cut"]

    def push(self, seq: int = 0, table: str = "w", *, clock: int = 0, settled: int = 0, worker: int = -1) -> Push:
        return Push(PushId(1, self.rank if worker < 0 else worker, 0, seq), table, clock, settled)

    def frame(self, seq: int = 0, table: str = "w", *, hyper: tuple[Hyper, ...] = (), clock: int = 0) -> PushFrame:
        return PushFrame(self.push(seq, table, clock=clock), 1.0, (), hyper)

    def rows(self, keys: Keys, seq: int = 0, *, hyper: tuple[Hyper, ...] = ()) -> RowPushFrame:
        return RowPushFrame(self.push(seq, "r"), 1.0, hyper, keys)

    def pull(self, table: str = "w", *, worker: int = -1, needs: int = 0, request: int = 1) -> PullFrame:
        sender = self.sender if worker < 0 else Sender(1, worker, 0)
        return PullFrame(Pull(sender, request, table, 0, needs), 0)

    def row_pull(self, keys: Keys, table: str = "r", *, needs: int = 0, request: int = 1) -> RowPullFrame:
        return RowPullFrame(self.pull(table, needs=needs, request=request).pull, keys)


@contextmanager
def rogue_in(servers: Cluster, rank: int) -> Iterator[Rogue]:
    """Join as a worker of an unused rank."""
    with client(servers, Hello("worker", rank, 0, 1)) as peer:
        peer.say(Join(Sender(1, rank, 0)))
        peer.hear(Joined)
        yield Rogue(peer, rank)


def dense(name: str = "z", *shape: int, rule: RuleSpec | None = None, consistency: str = "asynchronous") -> TableSpec:
    return TableSpec(name, (Segment(name, shape or (4,)),), "float32", rule or Add(), consistency, "sum", "reject")


def row_table(
    name: str = "q", rule: RuleSpec | None = None, consistency: str = "asynchronous", **more: Any
) -> RowTableSpec:
    given = {"width": 2, "dtype": "float32", "scale": "sum", "nonfinite": "reject"} | more
    return RowTableSpec(name=name, rule=rule or Add(), consistency=consistency, **given)


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()


def container(dtype: str, num_bytes: int, name: str = "values") -> bytes:
    """Return a safetensors file of one tensor of any dtype, also of one that torch does not have."""
    header = json.dumps({name: {"dtype": dtype, "shape": [4], "data_offsets": [0, num_bytes]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(num_bytes)
