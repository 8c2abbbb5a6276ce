"""A data server to which a worker says whatever can be said: it answers, refuses or hangs up, and serves the others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.attacks.malformed import EXTREMES
from tests.data.service.feeders import ODD, RECIPE, ask, feeders, is_right
from tests.data.service.speaking import Caller, body_of, caller, recipe_body

from paceline.data.service.messages import (
    _CODEC,
    BatchAnswer,
    BatchFailed,
    Message,
    OpenSource,
    ReadBatches,
    SourceOpened,
    encode,
)
from paceline.data.sources.batch import BatchLayout
from paceline.errors import PeerError

NUM_CONNECTIONS = 60
PER_CONNECTION = 12
BODY = body_of([5, 6])
RECIPES = recipe_body(ODD)
SAID: list[Message] = [
    *[ReadBatches(9, 0, 0, 2, urgent=False, returned=(0,))] * 6,
    *[OpenSource(3)] * 2,
    SourceOpened(0, 3, "f00d"),
    BatchAnswer(3, -1, BatchLayout(None, 0, 1, 0)),
    BatchFailed(3, "usage", "no"),
]


class FrameSource:
    """Makes frames without end, the same ones from the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def frames(self) -> Iterator[tuple[bytes, memoryview]]:
        for _ in range(PER_CONNECTION):
            body = self._random.choice(
                (BODY, RECIPES, body_of([]), body_of([-1, 1 << 62]), memoryview(self._random.randbytes(99)))
            )
            if body is RECIPES:
                body = body[: self._random.choice((len(body), self._random.randrange(len(body))))]
            yield self._header(), body

    def _header(self) -> bytes:
        message = self._random.choice(SAID)
        header = encode(message)
        fate = self._random.random()
        if fate < 0.6:
            fields = msgspec.to_builtins(message)
            self._fill(fields)
            return _CODEC.kind_byte(type(message)) + msgspec.msgpack.encode(fields)
        if fate < 0.8:
            return header[: self._random.randrange(len(header))]
        changed = bytearray(header)
        changed[self._random.randrange(len(changed))] ^= 1 << self._random.randrange(8)
        return bytes(changed)

    def _fill(self, fields: Any) -> None:
        name = self._random.choice(list(fields))
        fields[name] = deepcopy(self._random.choice(EXTREMES))


def say_all(rogue: Caller, frames: Iterator[tuple[bytes, memoryview]]) -> int:
    """Say what can be said until the connection is over; return how much that was."""
    num_said = 0
    for header, body in frames:
        try:
            rogue.say(header, body)
        except PeerError:
            break
        num_said += 1
    return num_said


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm"])
def test_whatever_is_said_the_others_are_served(kind: str, tmp_path: Path) -> None:
    source = FrameSource(7)
    with feeders(kind, tmp_path) as running, running.reader() as reader:
        num_said = 0
        for number in range(NUM_CONNECTIONS):
            with caller(running) as rogue:
                rogue.opens(RECIPE)
                num_said += say_all(rogue, source.frames())
            assert is_right(reader.read(ask(number)), ask(number))
        assert num_said > NUM_CONNECTIONS
