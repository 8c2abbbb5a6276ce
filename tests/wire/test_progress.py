"""Connections that lead nowhere are not made again for ever, and those that only wait for other workers are."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import pytest

from paceline.core.messages import Held, PushId
from paceline.errors import PeerError
from paceline.transport import MemoryTransport
from paceline.transport.base import NotServed
from paceline.transport.memory import MemoryConnection
from paceline.wire import connection
from paceline.wire.connection import NUM_FRUITLESS, SOON_S, Progress, ReconnectingConnection
from paceline.wire.messages import Hello, KeysWanted, encode
from paceline.wire.requests import RequestDone

TIMEOUT_S = 60.0


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def connect(progress: Progress, clock: Clock, lived_s: float, *, sent: tuple[int, ...] = (), answered: bool) -> None:
    """Live through one connection."""
    progress.note_connected()
    for size_bytes in sent:
        progress.note_sent(size_bytes)
    if answered:
        progress.note_arrived(encode(RequestDone(1)))
    clock.now_s += lived_s
    progress.note_broken()


def test_fruitless_connections_are_given_up_with_the_size_of_the_frame() -> None:
    clock = Clock()
    progress = Progress(patience_s=5.0, now=clock)
    for _ in range(NUM_FRUITLESS):
        assert progress.objection() == ""
        connect(progress, clock, 11.0, sent=(60, 1 << 20, 80), answered=False)

    assert progress.objection() == (
        "was accepted 3 times, and broke each time before a frame of 1,048,576 bytes was answered"
    )


@pytest.mark.parametrize("again", [Held(PushId(1, 1, 0, 0)), KeysWanted("w", 0, 0)])
def test_what_a_repeated_push_is_told_each_time_is_no_progress(again: Held | KeysWanted) -> None:
    clock = Clock()
    progress = Progress(patience_s=5.0, now=clock)
    for _ in range(1 + NUM_FRUITLESS):  # over the first connection it is news
        assert progress.objection() == ""
        progress.note_connected()
        progress.note_sent(1 << 20)
        progress.note_arrived(encode(again))
        progress.note_sent(1 << 20)
        clock.now_s += 11.0
        progress.note_broken()

    assert progress.objection().endswith("before a frame of 1,048,576 bytes was answered")

    progress.note_connected()
    progress.note_arrived(encode(Held(PushId(1, 1, 0, 1))))  # another push has passed
    progress.note_broken()
    assert progress.objection() == ""


def test_answers_that_never_arrive_are_told_too() -> None:
    clock = Clock()
    progress = Progress(patience_s=5.0, now=clock)
    for _ in range(NUM_FRUITLESS):
        connect(progress, clock, 11.0, sent=(60,), answered=False)

    assert progress.objection() == "was accepted 3 times, and broke each time before anything was answered"


def test_connections_that_break_at_once_are_made_again_for_as_long_as_a_server_is_awaited() -> None:
    clock = Clock()
    progress = Progress(patience_s=5.0, now=clock)
    for _ in range(24):
        connect(progress, clock, 0.2, answered=False)
        assert progress.objection() == ""
    connect(progress, clock, 0.2, answered=False)

    assert progress.objection()


@pytest.mark.parametrize(("lived_s", "answered"), [(11.0, True), (SOON_S + 1.0, False)])
def test_a_connection_that_was_of_use_or_held_for_long_counts_for_the_path(lived_s: float, answered: bool) -> None:
    clock = Clock()
    progress = Progress(patience_s=5.0, now=clock)
    for lived in (11.0, 11.0, lived_s, 11.0, 11.0):
        connect(progress, clock, lived, sent=(1 << 20,), answered=answered and lived == lived_s)
        if lived == lived_s and not answered:
            assert progress.objection() == ""

    assert progress.objection() == ""


@dataclass
class Connected:
    """A connection to a server that has answered; a context manager."""

    patience_s: float
    lost: str = ""
    again: threading.Event = field(default_factory=threading.Event)  # it is made again, or given up

    def __enter__(self) -> Self:
        transport, answered = MemoryTransport(), threading.Event()
        self._listener = transport.listen("memory://server-0")
        self._client = ReconnectingConnection(
            0,
            self._listener.address,
            Hello("worker", 0, 0, 1),
            transport,
            self.patience_s,
            on_frames=lambda _: answered.set(),
            place=lambda _header, _size_bytes: None,
            on_reconnected=self._note_reconnected,
            on_lost=self._note_lost,
            how_ended=lambda: "",
        )
        self._client.open(TIMEOUT_S)
        self._server = self._listener.accept(timeout_s=TIMEOUT_S)
        self._server.send(encode(RequestDone(1)), timeout_s=TIMEOUT_S)
        assert answered.wait(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._listener.close()

    def break_off(self) -> None:
        self._server.close()

    def _note_reconnected(self, use: Callable[[], None]) -> None:
        use()
        self.again.set()

    def _note_lost(self, reason: str) -> None:
        self.lost = reason
        self.again.set()


def test_a_connection_that_was_of_use_is_made_again_at_once_with_time_for_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_FIRST_PAUSE_S", 3600.0)
    allowed_s: list[float] = []
    connect = MemoryTransport.connect

    def note_allowed(self: MemoryTransport, address: str, identity: bytes, *, timeout_s: float) -> MemoryConnection:
        allowed_s.append(timeout_s)
        return connect(self, address, identity, timeout_s=timeout_s)

    monkeypatch.setattr(MemoryTransport, "connect", note_allowed)
    with Connected(TIMEOUT_S) as client:
        client.break_off()
        assert client.again.wait(TIMEOUT_S)
    assert allowed_s[-1] == 2.0


@pytest.mark.parametrize(
    ("error", "lost"), [(NotServed("it took the connection"), ""), (PeerError("none listens"), "within 0.2 s (none")]
)
def test_a_server_whose_socket_takes_connections_is_awaited_for_longer_as_its_successor_may_have_to_start(
    error: PeerError, lost: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, left = MemoryTransport.connect, iter(range(40))

    def take_connection(self: MemoryTransport, address: str, identity: bytes, *, timeout_s: float) -> MemoryConnection:
        if next(left, None) is not None:
            raise error
        return connect(self, address, identity, timeout_s=timeout_s)

    with Connected(0.2) as client:
        monkeypatch.setattr(MemoryTransport, "connect", take_connection)
        client.break_off()
        assert client.again.wait(TIMEOUT_S)
        assert lost in client.lost
        assert bool(lost) == bool(client.lost)
