"""A worker as an attacker or a broken program would play it: whatever the test wants, over a real connection."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
from tests.data.service.feeders import DEADLINE_S, RECIPE, Feeders, hello

from paceline.data.service.messages import Message, OpenSource, ReadBatches, SourceOpened, decode, encode
from paceline.data.sources.batch import BatchRequest
from paceline.data.sources.declared import BatchRecipe, encode_recipe
from paceline.errors import ConnectionLost, DeadlineExceeded
from paceline.transport.base import EMPTY, Connection
from paceline.wire.messages import Hello
from paceline.wire.messages import encode as encode_hello

T = TypeVar("T")


class Caller:
    """A worker that says whatever the test wants."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def say(self, message: Message | bytes, body: memoryview = EMPTY) -> None:
        header = message if isinstance(message, bytes) else encode(message)
        self.connection.send(header, body, timeout_s=DEADLINE_S)

    def hear(self, kind: type[T]) -> T:
        message = decode(self.connection.receive(timeout_s=DEADLINE_S).header)
        assert isinstance(message, kind), message
        return message

    def opens(self, recipe: BatchRecipe = RECIPE, number: int = 0) -> SourceOpened:
        self.say(OpenSource(number), recipe_body(recipe))
        return self.hear(SourceOpened)

    def reads(
        self, asked: BatchRequest, number: int = 1, *, urgent: bool = False, returned: tuple[int, ...] = ()
    ) -> None:
        self.say(ReadBatches(number, 0, asked.epoch, len(asked.indices), urgent, returned), body_of(asked.indices))

    def is_cut_off(self) -> bool:
        try:
            while True:
                self.connection.receive(timeout_s=DEADLINE_S)
        except DeadlineExceeded:
            return False
        except ConnectionLost:
            return True


def recipe_body(recipe: BatchRecipe) -> memoryview:
    return memoryview(encode_recipe(recipe))


def body_of(indices: Sequence[int]) -> memoryview:
    return memoryview(np.array(indices, dtype=np.int64).tobytes())


@contextmanager
def caller(running: Feeders, identity: Hello | bytes | None = None) -> Iterator[Caller]:
    raw = identity if isinstance(identity, bytes) else encode_hello(identity or hello(7))
    connection = running.transport.connect(running.addresses[0], raw, timeout_s=DEADLINE_S)
    try:
        yield Caller(connection)
    finally:
        connection.close()
