"""The parts of a push over several connections: in proportion, and no connection that has ended holds up another."""

import threading
from collections.abc import Sequence

import pytest

from paceline.errors import ConnectionLost
from paceline.transport.base import EMPTY, AllocateBody, Frame
from paceline.wire.send_queue import OrderedPiece, SendOrder, SendQueue

PATIENCE_S = 30.0
LARGE, SMALL = 0, 1
NUM_PIECES = {LARGE: 64, SMALL: 16}
AHEAD = 1 / 32


class Line:
    """The lines of two connections, of which the large part's is closed at first; notes what leaves."""

    def __init__(self) -> None:
        self.left: list[tuple[int, bytes]] = []
        self.reached, self.opened, self.all_left = threading.Event(), threading.Event(), threading.Event()
        self.num_expected = sum(NUM_PIECES.values())

    def take(self, part: int, header: bytes) -> None:
        if part == LARGE:
            self.reached.set()
            assert self.opened.wait(PATIENCE_S)
        self.left.append((part, header))
        if len(self.left) >= self.num_expected:
            self.all_left.set()


class End:
    """A connection over one of the lines."""

    def __init__(self, line: Line, part: int) -> None:
        self.peer, self.identity = f"part {part}", b""
        self.line, self.part, self.closed = line, part, threading.Event()

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        self.line.take(self.part, header)
        if self.closed.is_set():
            raise ConnectionLost("closed")

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        return False

    def receive(self, *, timeout_s: float, place: AllocateBody | None = None) -> Frame:
        raise NotImplementedError

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        self.closed.set()
        self.line.opened.set()


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a piece had to wait for its turn."""
    found, ask = threading.Event(), OrderedPiece.may_leave

    def may_leave(piece: OrderedPiece, wake: object) -> bool:
        may = ask(piece, wake)  # type: ignore[arg-type]
        if not may:
            found.set()
        return may

    monkeypatch.setattr(OrderedPiece, "may_leave", may_leave)
    return found


def queues(line: Line) -> dict[int, SendQueue]:
    ends = {part: End(line, part) for part in NUM_PIECES}
    return {part: SendQueue(end, on_broken=end.close) for part, end in ends.items()}


def send_parts(posts: dict[int, SendQueue], parts: Sequence[int] = (LARGE, SMALL)) -> None:
    order = SendOrder()
    for part in parts:
        num = NUM_PIECES[part]
        for index in range(num):
            piece = order.piece(part, index / num, (index + 1) / num)
            posts[part].send(b"%d of %d" % (index, part), memoryview(b"x"), piece=piece)


def test_a_small_part_does_not_run_ahead_of_a_large_one(refused: threading.Event) -> None:
    line = Line()
    posts = queues(line)
    send_parts(posts)
    assert refused.wait(PATIENCE_S)  # of the small part, as the line of the large one is closed
    line.opened.set()
    assert line.all_left.wait(PATIENCE_S)
    for post in posts.values():
        post.close()
    gone = dict.fromkeys(NUM_PIECES, 0)
    for part, header in line.left:
        assert header == b"%d of %d" % (gone[part], part)
        assert gone[part] / NUM_PIECES[part] <= gone[1 - part] / NUM_PIECES[1 - part] + AHEAD
        gone[part] += 1


def test_what_is_urgent_passes_a_piece_that_waits_for_its_turn(refused: threading.Event) -> None:
    line = Line()
    posts = queues(line)
    line.num_expected += 1
    send_parts(posts)
    assert refused.wait(PATIENCE_S)
    posts[SMALL].send(b"tick", urgent=True)
    posts[SMALL].send(b"pull")
    line.num_expected += 1
    line.opened.set()
    assert line.all_left.wait(PATIENCE_S)
    for post in posts.values():
        post.close()
    small = [header for part, header in line.left if part == SMALL]
    assert b"tick" in small[:-2]
    assert small[-1] == b"pull"


def test_a_connection_that_ends_holds_up_no_other(refused: threading.Event) -> None:
    line = Line()
    posts = queues(line)
    line.num_expected = NUM_PIECES[SMALL] + 1  # the piece that was about to leave
    send_parts(posts)
    assert refused.wait(PATIENCE_S)
    assert line.reached.wait(PATIENCE_S)
    posts[LARGE].close()
    assert line.all_left.wait(PATIENCE_S)
    posts[SMALL].close()


@pytest.mark.parametrize("parts", [(LARGE, SMALL), (SMALL, LARGE)])
def test_a_connection_that_has_ended_before_holds_up_no_other(parts: Sequence[int]) -> None:
    line = Line()
    posts = queues(line)
    line.num_expected = NUM_PIECES[SMALL]
    posts[LARGE].close()
    send_parts(posts, parts)
    assert line.all_left.wait(PATIENCE_S)
    posts[SMALL].close()
