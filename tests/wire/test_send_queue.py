"""What is sent to a peer that is slow to take it: in order, without holding up the sender, and nothing survives."""

import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transport.carriers import connect_pair, make_carrier

from paceline.errors import ConnectionLost
from paceline.transport.base import EMPTY, MAX_TOGETHER, AllocateBody, Frame
from paceline.transport.buffers import LentBody, LentMemory
from paceline.transport.poller import receive_all
from paceline.wire.send_queue import SendHold, SendQueue

LARGE = 1 << 20
PATIENCE_S = 30.0


class Gate:
    """A connection that takes a large frame only once it is told to."""

    def __init__(self) -> None:
        self.peer, self.identity = "gate", b""
        self.taken: list[tuple[bytes, bytes]] = []
        self.begun, self.open, self.all_taken = threading.Event(), threading.Event(), threading.Event()
        self.num_expected = 0
        self.num_together: list[int] = []  # frames of each successful `try_send`
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

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        if any(len(body) == LARGE for _, body in frames):
            return False
        for header, body in frames:
            self.send(header, body, timeout_s=timeout_s)
        self.num_together.append(len(frames))
        return True

    def receive(self, *, timeout_s: float, place: AllocateBody | None = None) -> Frame:
        raise NotImplementedError

    def fileno(self) -> int | None:
        return None

    def close(self) -> None:
        self.closed = True
        self.open.set()


def test_a_large_frame_holds_up_no_caller_and_the_order_stays() -> None:
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


def test_a_repetition_of_what_waits_in_pieces_is_left_out() -> None:
    gate = Gate()
    gate.num_expected = 3
    post = SendQueue(gate, on_broken=gate.close)
    post.send(b"piece 1", memoryview(bytes(LARGE)))
    post.send(b"piece 2", memoryview(bytes(LARGE)), last_of=b"push")
    for header in (b"push", b"push 2"):
        post.send(header, memoryview(bytes(LARGE)))
    gate.open.set()
    assert gate.all_taken.wait(PATIENCE_S)
    post.close()
    assert [header for header, _ in gate.taken] == [b"piece 1", b"piece 2", b"push 2"]


class CountedHeader(bytes):
    """A header that counts how often headers are compared."""

    num_compared = 0
    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        CountedHeader.num_compared += 1
        return bytes.__eq__(self, other)  # type: ignore[arg-type]


def test_a_frame_costs_the_same_however_many_wait() -> None:
    gate = Gate()
    post = SendQueue(gate, on_broken=gate.close, bounded=True)
    post.send(b"large", memoryview(bytes(LARGE)))
    CountedHeader.num_compared = 0
    for number in range(1000):
        post.send(CountedHeader(b"answer %d" % number))
    num_compared = CountedHeader.num_compared
    gate.close()
    post.close()
    assert num_compared <= 1000  # 499,500 where each frame is compared with all that wait


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


@pytest.mark.parametrize("is_opened", [False, True])
def test_each_frame_that_has_left_is_told_and_an_opened_queue_sends_on_its_thread(is_opened: bool) -> None:
    gate, told, all_told = Gate(), list[tuple[str, bool]](), threading.Event()
    post = SendQueue(gate, on_broken=gate.close)
    if is_opened:
        post.open()

    def note(name: str) -> None:
        told.append((name, threading.current_thread() is threading.main_thread()))
        if len(told) == 3:
            all_told.set()

    post.send(b"first", on_sent=lambda: note("first"))
    post.send(b"large", memoryview(bytes(LARGE)), on_sent=lambda: note("large"))
    assert gate.begun.wait(PATIENCE_S)
    assert post.num_waiting == 1
    post.send(b"large", memoryview(bytes(LARGE)), on_sent=lambda: note("repetition"))  # dropped, here
    gate.open.set()
    assert all_told.wait(PATIENCE_S)
    post.close()
    assert sorted(told) == [("first", not is_opened), ("large", False), ("repetition", True)]


def test_what_has_not_left_when_the_connection_ends_is_not_told() -> None:
    gate, told = Gate(), list[str]()
    post = SendQueue(gate, on_broken=lambda: None)
    post.send(b"large", memoryview(bytes(LARGE)), on_sent=lambda: told.append("large"))
    assert gate.begun.wait(PATIENCE_S)
    post.close()
    post.send(b"late", on_sent=lambda: told.append("late"))
    assert (told, post.num_waiting) == ([], 0)


def test_a_connection_that_breaks_is_reported_once() -> None:
    gate, reports = Gate(), list[str]()
    gate.close()
    post = SendQueue(gate, on_broken=lambda: reports.append("broken"))
    for _ in range(2):
        post.send(b"small")
        assert (reports, post.is_over) == (["broken"], True)
    post.close()


def test_a_peer_that_needs_a_thread_where_none_is_left_loses_its_connection_and_lent_values_are_free_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate, reports, left = Gate(), list[str](), list[str]()
    post = SendQueue(gate, on_broken=lambda: reports.append("broken"), bounded=True, copies=True)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory = LentMemory(memoryview(bytearray(LARGE)))
    memory.when_left(lambda: left.append("values"))
    lent = memory.lend()
    post.send(b"values", lent.memory, lent=lent)
    assert (reports, left, post.is_over, post.num_waiting) == (["broken"], ["values"], True, 0)
    assert "gate loses its connection, as what it waits for needs a thread: can't start" in capsys.readouterr().err


def test_values_that_a_broken_connection_does_not_take_are_lent_no_more() -> None:
    gate, left = Gate(), list[str]()
    gate.close()
    post = SendQueue(gate, on_broken=lambda: None, bounded=True, copies=True)
    memory = LentMemory(memoryview(bytearray(8)))
    memory.when_left(lambda: left.append("values"))
    lent = memory.lend()
    post.send(b"values", lent.memory, lent=lent)
    assert (left, post.is_over) == (["values"], True)


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


def test_small_frames_that_are_held_leave_together_when_the_hold_ends() -> None:
    gate, hold = Gate(), SendHold()
    post = SendQueue(gate, on_broken=gate.close, hold=hold)
    with hold:
        post.send(b"push", memoryview(b"1"))
        with hold:
            post.send(b"clock", urgent=True)
        post.send(b"pull")
        assert gate.taken == []
    post.send(b"alone")
    assert gate.taken == [(b"push", b"1"), (b"clock", b""), (b"pull", b""), (b"alone", b"")]
    assert gate.num_together == [3, 1]


def test_frames_of_one_hold_to_several_peers_leave_to_each_together() -> None:
    hold, gates = SendHold(), [Gate(), Gate()]
    queues = [SendQueue(gate, on_broken=gate.close, hold=hold) for gate in gates]
    with hold:
        for number in range(6):
            queues[number % 2].send(bytes([number]))
    assert [gate.num_together for gate in gates] == [[3], [3]]
    assert [[header[0] for header, _ in gate.taken] for gate in gates] == [[0, 2, 4], [1, 3, 5]]


def test_a_hold_that_ends_by_an_error_sends_what_it_holds() -> None:
    gate, hold = Gate(), SendHold()
    post = SendQueue(gate, on_broken=gate.close, hold=hold)

    def fail() -> None:
        with hold:
            post.send(b"done")
            raise ValueError

    with pytest.raises(ValueError):
        fail()
    assert gate.taken == [(b"done", b"")]


def test_a_hold_is_suspended_during_a_wait_for_all_threads() -> None:
    gate, hold = Gate(), SendHold()
    post = SendQueue(gate, on_broken=gate.close, hold=hold)
    with hold:
        post.send(b"push")
        with hold.suspended():
            assert gate.num_together == [1]
            with hold:  # as a thread does that receives an answer meanwhile
                post.send(b"clock")
                post.send(b"used")
            assert gate.num_together == [1, 2]
        post.send(b"pull")
        assert gate.num_together == [1, 2]
    assert [header for header, _ in gate.taken] == [b"push", b"clock", b"used", b"pull"]


@pytest.mark.parametrize(("size_bytes", "num"), [(0, MAX_TOGETHER), (6000, 3)])
def test_what_is_held_is_bounded(size_bytes: int, num: int) -> None:
    gate, hold = Gate(), SendHold()
    post = SendQueue(gate, on_broken=gate.close, hold=hold)
    with hold:
        for number in range(num):
            assert gate.num_together == []
            post.send(bytes([number]), memoryview(bytes(size_bytes)))
        assert gate.num_together == [num]


class LendingGate(Gate):
    """A gate that sends lent bodies from where they are."""

    def send_lent(self, header: bytes, body: LentBody, *, timeout_s: float) -> None:
        self.begun.set()
        assert self.open.wait(min(timeout_s, PATIENCE_S))
        with body.lock:
            self.send(header, body.memory[: LARGE - 1], timeout_s=timeout_s)


@pytest.mark.parametrize("kind", [Gate, LendingGate])
def test_lent_values_leave_as_they_were(kind: type[Gate]) -> None:
    gate, hold, values = kind(), SendHold(), bytearray(LARGE)
    memory = LentMemory(memoryview(values))
    gate.num_expected = 3
    post = SendQueue(gate, on_broken=gate.close, copies=True, hold=hold)
    with hold:
        post.send(b"applied")
        lent = memory.lend(1)
        post.send(b"values", lent.memory, lent=lent)
        assert gate.num_together == [2]  # one byte less is not large
        lent = memory.lend()
        post.send(b"more", lent.memory, lent=lent)
        assert gate.begun.wait(PATIENCE_S)
    memory.take_back()
    values[:2] = b"ab"
    gate.open.set()
    assert gate.all_taken.wait(PATIENCE_S)
    post.close()
    assert gate.taken == [(b"applied", b""), (b"values", b"\0"), (b"more", b"\0")]


@pytest.mark.parametrize("copies", [False, True])
def test_a_body_that_is_held_may_change_where_it_is_copied(copies: bool) -> None:
    gate, hold = Gate(), SendHold()
    post = SendQueue(gate, on_broken=gate.close, copies=copies, hold=hold)
    body = bytearray(b"before")
    with hold:
        post.send(b"values", memoryview(body))
        body[:] = b"after!"
    assert gate.taken == [(b"values", b"b" if copies else b"a")]


def test_held_frames_wait_behind_those_that_wait_and_urgent_ones_pass() -> None:
    gate, hold = Gate(), SendHold()
    gate.num_expected = 5
    post = SendQueue(gate, on_broken=gate.close, hold=hold)
    post.send(b"push 1", memoryview(bytes(LARGE)))
    assert gate.begun.wait(PATIENCE_S)
    post.send(b"push 2")
    with hold:
        post.send(b"push 3")
        post.send(b"clock", urgent=True)
        post.send(b"push 2")  # a repetition
        post.send(b"pull")
    gate.open.set()
    assert gate.all_taken.wait(PATIENCE_S)
    post.close()
    assert [header for header, _ in gate.taken] == [b"push 1", b"clock", b"push 2", b"push 3", b"pull"]


def test_a_peer_that_is_owed_more_than_it_can_be_is_given_up_when_the_hold_ends() -> None:
    gate, hold, broken = Gate(), SendHold(), threading.Event()
    post = SendQueue(gate, on_broken=broken.set, bounded=True, hold=hold)
    post.send(b"first", memoryview(bytes(LARGE)), owed="w")
    with hold:
        for number in range(2):
            post.send(bytes([number]), owed="w")
        assert not broken.is_set()
    assert broken.is_set()
    gate.close()
    post.close()


def test_a_connection_that_breaks_during_a_hold_is_reported_once_and_others_get_their_frames() -> None:
    hold, gates, reports = SendHold(), [Gate(), Gate()], list[str]()
    queues = [SendQueue(gate, on_broken=lambda: reports.append("broken"), hold=hold) for gate in gates]
    with hold:
        for queue in queues:
            queue.send(b"a")
            queue.send(b"b")
        gates[0].close()
    assert reports == ["broken"]
    assert [queue.is_over for queue in queues] == [True, False]
    assert [header for header, _ in gates[1].taken] == [b"a", b"b"]


def test_what_a_closed_queue_holds_is_lost() -> None:
    gate, hold, reports = Gate(), SendHold(), list[str]()
    post = SendQueue(gate, on_broken=lambda: reports.append("broken"), hold=hold)
    with hold:
        post.send(b"a")
        post.send(b"b")
        post.close()
        post.send(b"c")
    assert (gate.taken, reports) == ([], [])


SIZES = st.one_of(st.integers(0, 50), st.sampled_from([5000, 16 << 10, 100_000]))
SENT = st.lists(st.tuples(SIZES, st.booleans(), st.sampled_from(["send", "hold", "leave", "release"])), max_size=40)


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm", "faulty-memory", "faulty-tcp"])
@settings(max_examples=40)
@given(sent=SENT, copies=st.booleans())
def test_any_frames_through_holds_arrive_as_they_were_sent(
    kind: str, tmp_path: Path, sent: list[tuple[int, bool, str]], copies: bool
) -> None:
    carrier = make_carrier(kind, tmp_path)
    pair = connect_pair(carrier.transport, carrier.address)
    hold, shared = SendHold(), pair.transport.allocate(100_000)
    post = SendQueue(pair.client, on_broken=pair.client.close, copies=copies, hold=hold)
    depth, expected = 0, list[tuple[bytes, bytes]]()
    for number, (size_bytes, is_shared, then) in enumerate(sent):
        body = shared[:size_bytes] if is_shared else memoryview(bytearray([number]) * size_bytes)
        expected.append((bytes([number]), bytes(body)))
        post.send(bytes([number]), body)
        if then == "hold":
            hold.__enter__()
            depth += 1
        elif then == "leave" and depth:
            hold.__exit__(None, None, None)
            depth -= 1
        elif then == "release":
            hold.release()
    for _ in range(depth):
        hold.__exit__(None, None, None)
    got: list[tuple[bytes, bytes]] = []
    while len(got) < len(expected):
        got += [(frame.header, bytes(frame.body)) for frame in receive_all(pair.server, timeout_s=PATIENCE_S)]
    assert got == expected
    post.close()
    pair.close()
