"""Frames that no Paceline has ever sent: valid ones changed, cut, swapped or filled with extremes, and noise."""

from __future__ import annotations

import math
import random
import struct
import zlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from tests.attacks.rogue import LAST, MOST, bytes_of, container, dense, row_table

from paceline.core import messages
from paceline.core.messages import Push, PushId, Sender
from paceline.errors import PeerError
from paceline.transport.frames import WIRE_VERSION, Kind, Prefix, encode_prefix
from paceline.update.rows.spec import FilterSpec, Lifecycle
from paceline.wire import messages as wire
from paceline.wire import requests
from paceline.wire.messages import (
    Hello,
    Keys,
    PullFrame,
    PushFrame,
    RowPullFrame,
    RowPushFrame,
    Unsubscribe,
    check_sender,
    decode,
)
from paceline.wire.requests import TableCall

RANK = 7
ME = Sender(1, RANK, 0)
IDS = torch.tensor([3, 4])
EXTREMES: tuple[object, ...] = (
    *(0, -1, 1, 2**31, -(2**31), 2**53 + 1, 2**63 - 1, 2**63, -(2**63), MOST, math.nan, math.inf, -math.inf, 1e308),
    *(None, True, "", "z", "q", "\0", "x" * 300, b"", [], {}, [0] * 9, {"lr": math.nan}),
)


@dataclass(frozen=True, slots=True)
class Frame:
    """What travels: 64 bytes that announce it, a header and a body."""

    header: bytes
    body: bytes
    prefix: bytes = b""

    @property
    def raw(self) -> bytes:
        return (self.prefix or encode_prefix(Prefix(Kind.INLINE, len(self.header), len(self.body)))) + (
            self.header + self.body
        )


def seeds() -> list[tuple[object, bytes]]:
    """One message of each kind, none of which may change tables "w" and "r" as it is, and what travels beside it."""
    push, sender, table_call = Push(PushId(1, RANK, 0, 0), "z", 0, 0), ME, TableCall(1, "q", 0, 0)
    keys, rows = Keys(2, b"", sent=True), bytes_of(IDS) + bytes_of(torch.ones(2, 2))
    pulled = PullFrame(messages.Pull(sender, 1, "w", 0, 0), 0)
    odd = row_table("q", life=Lifecycle(admit_after=0), filters=(FilterSpec("int8", {"push": True}),))
    said: list[tuple[object, bytes]] = [
        (Hello("worker", RANK, 0, 1), b""),
        (PushFrame(push, 1.0, (0,), ({"lr": 0.1},)), bytes(16)),
        (wire.PushPiece(PushFrame(push, 1.0, (), ()), 0), bytes(8)),
        (wire.FactoredPush(PushFrame(push, 1.0, (), ()), (wire.FactoredMatrix(0, 1),), 0), bytes(16)),
        (wire.EarlyValues("w", 0, 0), bytes(16)),
        (wire.FetchedRest(messages.Fetched(1, "w", 1, 1, 0, ()), 8), bytes(8)),
        (pulled, b""),
        (wire.StepFrame((PushFrame(push, 1.0, (0,), ({"lr": 0.1},)),), 1, (pulled,), (16,)), bytes(16)),
        (wire.StepFrame((PushFrame(push, 1.0, (), ()),) * 2, -1, (pulled,), (16, 8)), bytes(24)),
        (wire.StepFrame((), -1, (pulled,), (32,), (RowPushFrame(push, 1.0, (), keys),)), rows),
        (RowPushFrame(push, 1.0, (), keys), rows),
        (RowPullFrame(messages.Pull(sender, 1, "r", 0, 0), keys), bytes_of(IDS)),
        (Unsubscribe(sender, "r", 3), bytes_of(IDS)),
        (wire.RowsUsed(sender, "r", 3), bytes_of(IDS)),
        (wire.KeysWanted("q", 0, 0), b""),
        (messages.Join(sender), b""),
        (messages.Clock(sender, 3, (("w", 1),)), b""),
        (messages.Taken(sender, "r", 1), b""),
        (messages.Leave(sender), b""),
        (messages.Closed(1, "w", 0, ((RANK, 0),)), b""),
        (messages.Follow(1, 0, "w", 0), b""),
        (messages.Fetched(1, "w", 0, 0, 0, (1, 2)), bytes(16)),
        (requests.Declare(1, dense("z", -4)), b""),
        (requests.DeclareRows(1, odd), b""),
        (requests.Describe(1, "w"), b""),
        (requests.Initialise(1, "w"), bytes(16)),
        (requests.AwaitValues(1, "w"), b""),
        (requests.SaveState(1, "w"), b""),
        (requests.LoadState(1, "z"), container("F32", 16)),
        (requests.Barrier(1, "here"), b""),
        (requests.ClaimWork(1, "work", 0, 0, (1, 2), (3,)), b""),
        (requests.CallFunction(table_call, "sample", {"k": 3}), b""),
        (requests.CountRows(table_call), b""),
        (requests.ReadRows(table_call, 0, values_only=True), b""),
        (requests.WriteRows(table_call), container("I64", 32, "ids")),
        (requests.ListTables(1), b""),
        (requests.BeginCut(table_call), b""),
        (requests.ReadCut(1, "w", 0), b""),
        (requests.EndCut(1, "w"), b""),
        (requests.RequestFailed(1, "no"), b""),
    ]
    return said


class FrameSource:
    """Makes malformed frames without end, the same ones from the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seeds = seeds()

    def trains(self, num_frames: int, length: int) -> Iterator[list[Frame]]:
        """Yield so many frames in trains, each for a connection of its own: only the last may be unreadable."""
        left = num_frames
        while left > 0:
            train = [self._readable() for _ in range(min(length, left) - 1)]
            yield [*train, self._unreadable()]
            left -= len(train) + 1

    def _readable(self) -> Frame:
        """Return a frame with a message that a worker may say, with extremes in it or with another's body."""
        while True:
            message, body = self._random.choice(self._seeds)
            fields = msgspec.to_builtins(message)
            for _ in range(self._random.randint(1, 2)):
                self._fill(fields)
            header = wire._CODEC.kind_byte(type(message)) + msgspec.msgpack.encode(fields)
            if self._random.random() < 0.3:
                body = self._random.choice(self._seeds)[1]
            if _may_be_said(header):
                return Frame(header, body)

    def _fill(self, fields: Any) -> None:
        """Put an extreme in place of one number, name or list, at any depth."""
        place = self._random.choice(list(fields) if isinstance(fields, dict) else range(len(fields)))
        inner = fields[place]
        if isinstance(inner, dict | list) and inner and self._random.random() < 0.8:
            self._fill(inner)
        else:
            fields[place] = deepcopy(self._random.choice(EXTREMES))

    def _unreadable(self) -> Frame:
        message, body = self._random.choice(self._seeds)
        header = wire.encode(message)
        ruin = self._random.choice((self._noise, self._flipped, self._cut, self._announced, self._damaged))
        return ruin(header, body)

    def _noise(self, header: bytes, body: bytes) -> Frame:
        return Frame(self._random.randbytes(len(header)), body, self._random.randbytes(self._random.randint(1, 99)))

    def _flipped(self, header: bytes, body: bytes) -> Frame:
        changed = bytearray(header)
        for _ in range(self._random.randint(1, 4)):
            changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return Frame(bytes(changed), body)

    def _cut(self, header: bytes, body: bytes) -> Frame:
        return Frame(header[: self._random.randrange(len(header))], body[: self._random.randint(0, len(body))])

    def _announced(self, header: bytes, body: bytes) -> Frame:
        """Announce what does not come, or what may not be announced, under a checksum that holds."""
        sizes = (0, 1, 64, 1 << 20, (1 << 20) + 1, (1 << 32) - 1)
        large = (*sizes, 1 << 34, (1 << 34) + 1, 2**63, MOST)
        pick = self._random.choice
        kind, header_bytes, body_bytes = pick((0, 0, 0, 1, 2, 3, 4, 65535)), pick(sizes), pick(large)
        version = pick((*[WIRE_VERSION] * 3, 0, 1))
        fields = (b"PCLN", version, kind, header_bytes, pick(sizes), body_bytes, pick(large), pick(large))
        raw = struct.pack("<4sHHIIQQQ20x", *fields)
        return Frame(header, body, raw + struct.pack("<I", zlib.crc32(raw)))

    def _damaged(self, header: bytes, body: bytes) -> Frame:
        prefix = bytearray(encode_prefix(Prefix(Kind.INLINE, len(header), len(body))))
        prefix[self._random.randrange(len(prefix))] ^= 1 << self._random.randrange(8)
        return Frame(header, body, bytes(prefix))


def _may_be_said(header: bytes) -> bool:
    try:
        message = decode(header)
        check_sender(Hello("worker", RANK, 0, 1), message, 1)
    except PeerError:
        return False
    # These would end the life in whose name all others are said, or be taken for the last word.
    return not isinstance(message, messages.Leave | messages.Join) and getattr(message, "number", 0) != LAST
