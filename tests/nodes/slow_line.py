"""A line to a replica that lags, on which frames stay until the head waits for them."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from tests.nodes.test_successors import Fate

from paceline.server import replica_link
from paceline.server.replica_link import ReplicaLink
from paceline.server.replica_messages import CODEC, Pushed
from paceline.transport.base import EMPTY, Connection

PATIENCE_S = 60.0


class SlowLine:
    """In the place of the send queue to a replica: frames leave when the head waits for them, else by chance or never.

    What has not left when the head is killed is lost with it.
    """

    num_lost = 0  # frames, over all lines
    of_threads: ClassVar[dict[int, SlowLine]] = {}  # the line that each thread uses
    chance = random.Random(7)  # begun anew for each test
    share = 0.02  # of frames with which others leave

    def __init__(self, connection: Connection, *_: Any, **__: Any) -> None:
        self.connection = connection
        self.frames: deque[tuple[bytes, bytes]] = deque()

    @property
    def num_waiting(self) -> int:
        return len(self.frames)

    def send(self, header: bytes, body: memoryview = EMPTY, *, last_of: bytes) -> None:
        self.of_threads[threading.get_ident()] = self
        self.frames.append((header, bytes(body)))
        if self.chance.random() < self.share:
            while self.frames and self.chance.random() < 0.9:
                self.send_next()

    def send_next(self) -> None:
        """Send frames up to the first that is answered."""
        while self.frames:
            header, body = self.frames.popleft()
            self.connection.send(header, memoryview(body), timeout_s=PATIENCE_S)
            if not isinstance(CODEC.decode(header), Pushed):
                return

    @classmethod
    def holds_frames(cls) -> bool:
        """Return whether frames would be lost with the server of this thread."""
        line = cls.of_threads.get(threading.get_ident())
        return line is not None and line.num_waiting > 0

    def close(self) -> None:
        SlowLine.num_lost += len(self.frames)
        self.frames.clear()
        self.connection.close()


@pytest.fixture
def slow_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have replicas lag by slow lines, and servers be killed only where frames are lost with them."""
    hear: Callable[..., None] = ReplicaLink._hear

    def wrapped(link: ReplicaLink, timeout_s: float) -> None:
        if timeout_s and isinstance(link._queue, SlowLine):
            link._queue.send_next()
        hear(link, timeout_s)

    monkeypatch.setattr(ReplicaLink, "_hear", wrapped)
    monkeypatch.setattr(replica_link, "SendQueue", SlowLine)
    monkeypatch.setattr(SlowLine, "num_lost", 0)
    monkeypatch.setattr(SlowLine, "of_threads", {})
    monkeypatch.setattr(SlowLine, "chance", random.Random(7))
    monkeypatch.setattr(Fate, "may_kill", SlowLine.holds_frames)
