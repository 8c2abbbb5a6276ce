"""What is sent to a peer that is slow to take it: in order, without holding up who sends, and nothing survives."""

import threading

import pytest

from paceline.errors import ConnectionLost
from paceline.transport.base import EMPTY, Frame, Place
from paceline.wire.send_queue import SendQueue

LARGE = 1 << 20
PATIENCE_S = 10.0


class Gate:
    """A connection that takes a large frame only once it is told to."""

    def __init__(self) -> None:
        self.peer, self.identity = "gate", b""
        self.taken: list[tuple[bytes, bytes]] = []
        self.begun, self.open, self.all_taken = threading.Event(), threading.Event(), threading.Event()
        self.num_expected = 0
        self.closed = False

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        if len(body) == LARGE:
            self.begun.set()
            assert self.open.wait(min(timeout_s, PATIENCE_S))
        if self.closed:
            raise ConnectionLost("closed")
        self.taken.append((header, bytes(body[:1])))
        if len(self.taken) == self.num_expected:
            self.all_taken.set()

    def has_room(self, body: memoryview) -> bool:
        return len(body) < LARGE

    def receive(self, *, timeout_s: float, place: Place | None = None) -> Frame:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True
        self.open.set()


def test_a_large_frame_holds_up_nobody_and_the_order_stays() -> None:
    gate, broken = Gate(), threading.Event()
    gate.num_expected = 3
    post = SendQueue(gate, on_broken=broken.set)
    post.send(b"first")
    post.send(b"large", memoryview(bytes(LARGE)))
    post.send(b"last")
    assert gate.begun.wait(PATIENCE_S)
    assert [header for header, _ in gate.taken] == [b"first"]
    gate.open.set()
    assert gate.all_taken.wait(PATIENCE_S)
    post.close()
    assert [header for header, _ in gate.taken] == [b"first", b"large", b"last"]
    assert not broken.is_set()


@pytest.mark.parametrize("copies", [False, True])
def test_a_body_that_waits_may_change_where_it_is_copied(copies: bool) -> None:
    gate = Gate()
    gate.num_expected = 1
    post = SendQueue(gate, on_broken=gate.close, copies=copies)
    body = bytearray(LARGE)
    post.send(b"values", memoryview(body))
    assert gate.begun.wait(PATIENCE_S)
    body[0] = 1
    gate.open.set()
    assert gate.all_taken.wait(PATIENCE_S)
    post.close()
    assert gate.taken == [(b"values", b"\0" if copies else b"\1")]


def test_a_repetition_of_what_waits_is_left_out() -> None:
    gate = Gate()
    gate.num_expected = 2
    post = SendQueue(gate, on_broken=gate.close)
    for header in (b"push 1", b"push 2", b"push 1", b"push 2"):
        post.send(header, memoryview(bytes(LARGE)))
    gate.open.set()
    assert gate.all_taken.wait(PATIENCE_S)
    post.close()
    assert [header for header, _ in gate.taken] == [b"push 1", b"push 2"]


def test_closing_ends_the_thread_and_drops_what_has_not_left() -> None:
    gate = Gate()
    before = threading.active_count()
    post = SendQueue(gate, on_broken=lambda: None)
    post.send(b"large", memoryview(bytes(LARGE)))
    post.send(b"never")
    assert gate.begun.wait(PATIENCE_S)
    post.close()
    assert threading.active_count() == before
    assert gate.taken == []
    post.send(b"large", memoryview(bytes(LARGE)))
    assert threading.active_count() == before


def test_a_connection_that_breaks_is_reported_once() -> None:
    gate, reports = Gate(), list[str]()
    gate.close()
    post = SendQueue(gate, on_broken=lambda: reports.append("broken"))
    for _ in range(2):
        post.send(b"small")
        assert (reports, post.is_over) == (["broken"], True)
    post.close()


def test_what_is_urgent_goes_before_all_that_waits() -> None:
    gate = Gate()
    gate.num_expected = 4
    post = SendQueue(gate, on_broken=gate.close)
    post.send(b"push 1", memoryview(bytes(LARGE)))
    assert gate.begun.wait(PATIENCE_S)
    post.send(b"push 2", memoryview(bytes(LARGE)))
    post.send(b"clock 1", urgent=True)
    post.send(b"clock 2", urgent=True)
    gate.open.set()
    assert gate.all_taken.wait(PATIENCE_S)
    post.close()
    assert [header for header, _ in gate.taken] == [b"push 1", b"clock 1", b"clock 2", b"push 2"]
