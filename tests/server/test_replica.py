"""A head and its replica: what leaves has been received, and one of them goes on where both believe the other gone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.nodes.cluster import hosted_tables

from paceline.core.events import Died, Timeout
from paceline.core.messages import Push, PushId
from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError
from paceline.server import replica_link, replica_place
from paceline.server.buffers import ReceiveBuffers
from paceline.server.connections import Stop
from paceline.server.journal import Asked, encode_written
from paceline.server.line_watch import LineWatch
from paceline.server.recovery import Declarations, Recovery
from paceline.server.replay import Replay
from paceline.server.replica import Follower
from paceline.server.replica_link import ReplicaLink
from paceline.server.replica_messages import (
    ANSWERS,
    CODEC,
    Attached,
    Checked,
    Ended,
    Happened,
    Leaving,
    Pushed,
    Received,
    Restored,
)
from paceline.server.replica_place import HandedOver, ReplicaPlace, Superseded
from paceline.transport import MemoryTransport
from paceline.transport.base import Connection, Listener
from paceline.wire.messages import Hello, PushFrame, encode
from paceline.wire.requests import MAX_HEARD_BYTES, SMALL_BYTES, Initialise

PATIENCE_S = 60.0
ADDRESS = "memory://replica"


@dataclass
class Votes:
    """Lets the first of the two decide; or has already."""

    decided: str = ""
    fails: bool = False
    num_failures: int = 0  # before it decides

    def promote(self, number: int) -> bool:
        return self._decide("promoted", number)

    def dismiss(self, number: int) -> bool:
        return self._decide("dismissed", number)

    def enlist(self, number: int, process: int) -> bool:
        return self._decide(f"enlisted {process}", number)

    def _decide(self, outcome: str, number: int) -> bool:
        assert number == 1
        if self.fails or self.num_failures > 0:
            self.num_failures -= 1
            raise OSError(5, "Input/output error")
        if self.decided:
            return False
        self.decided = outcome
        return True


@dataclass
class Other:
    """The test in the place of the other process, over memory."""

    transport: MemoryTransport = field(default_factory=MemoryTransport)
    votes: Votes = field(default_factory=Votes)
    told: list[str] = field(default_factory=list)

    def listen(self) -> Listener:
        return self.transport.listen(ADDRESS)

    def attached(self, listener: Listener) -> tuple[ReplicaLink, Connection]:
        """A head that has given its state to the test."""
        place = ReplicaPlace(0, 1, self.votes, lambda: ADDRESS, self.transport, self.told.append)
        link, opened = ReplicaLink(place), Future[None]()
        threading.Thread(target=lambda: opened.set_result(link.open(b"state")), daemon=True).start()
        connection = listener.accept(timeout_s=PATIENCE_S)
        frame = connection.receive(timeout_s=PATIENCE_S)
        assert CODEC.decode(frame.header) == Attached(1)
        assert bytes(frame.body) == b"state"
        answer(connection, 1)
        opened.result(PATIENCE_S)
        return link, connection


def answer(connection: Connection, num_frames: int) -> None:
    connection.send(ANSWERS.encode(Received(num_frames)), timeout_s=PATIENCE_S)


@pytest.fixture
def other() -> Other:
    return Other()


@pytest.fixture
def listener(other: Other) -> Iterator[Listener]:
    found = other.listen()
    yield found
    found.close()


def test_an_answer_leaves_when_the_replica_has_what_it_rests_on(other: Other, listener: Listener) -> None:
    link, connection = other.attached(listener)
    assert link.wait_received(), "nothing was told since"
    link.note(Timeout(), 1.0)
    link.note(Timeout(), 2.0)
    frames = [connection.receive(timeout_s=PATIENCE_S) for _ in range(2)]
    assert [CODEC.decode(frame.header).now for frame in frames] == [1.0, 2.0]
    answer(connection, 3)
    assert link.wait_received()
    link.close()
    connection.close()


def test_no_answer_leaves_a_head_whose_replica_serves(other: Other, listener: Listener) -> None:
    link, connection = other.attached(listener)
    link.note(Timeout(), 1.0)
    answer(connection, 1)  # of what came before
    other.votes.decided = "promoted"
    connection.close()
    for _ in range(2):
        with pytest.raises(Superseded, match="the replica of server 0 serves in its place"):
            link.wait_received()
    assert other.told == []


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_head_that_is_to_hand_over_has_its_replica_serve(is_taken: bool, other: Other, listener: Listener) -> None:
    link, connection = other.attached(listener)
    link.hands_over = lambda: True
    ended = Future[None]()

    def look() -> None:
        try:
            ended.set_result(link.look())
        except Superseded as error:
            ended.set_exception(error)

    threading.Thread(target=look, daemon=True).start()
    assert CODEC.decode(connection.receive(timeout_s=PATIENCE_S).header) == Leaving()
    other.votes.decided = "promoted" if is_taken else ""
    connection.close()
    if is_taken:
        with pytest.raises(HandedOver, match=r"^server 0 is handed over, to its replica on another machine$"):
            ended.result(PATIENCE_S)
    else:
        ended.result(PATIENCE_S)
        assert other.votes.decided == "dismissed"


def test_an_answer_that_rests_on_nothing_new_is_checked_as_well(other: Other, listener: Listener) -> None:
    link, connection = other.attached(listener)
    other.votes.decided = "promoted"
    connection.close()
    with pytest.raises(Superseded):  # noqa: PT012 - either may find it out
        link.check()
        link.wait_received()


def test_a_head_whose_replica_is_gone_goes_on_alone_and_says_so(other: Other, listener: Listener) -> None:
    link, connection = other.attached(listener)
    link.note(Timeout(), 1.0)
    connection.close()
    assert link.wait_received()
    assert not link.is_there
    link.note(Timeout(), 2.0)
    assert link.wait_received()
    [line] = other.told
    assert line.startswith("the run ends if server 0 is lost, as it has no replica any more: ")
    assert other.votes.decided == "dismissed"


def test_a_head_that_is_told_nothing_notices_that_its_replica_is_gone(other: Other, listener: Listener) -> None:
    link, connection = other.attached(listener)
    assert link.patience_s(None) == 1.0
    link.look()
    assert CODEC.decode(connection.receive(timeout_s=PATIENCE_S).header) == Checked()
    answer(connection, 2)
    assert link.wait_received()
    connection.close()
    link.look()  # no sooner than a second later
    assert link.is_there
    link._look_s = 0.0
    link.look()
    assert not link.is_there
    assert other.votes.decided == "dismissed"
    assert link.patience_s(None) is None, "no other replica is looked for"


class Line:
    """A connection of which only its machine is asked."""

    def __init__(self, silent_s: float) -> None:
        self.told_s = silent_s

    def silent_s(self) -> float:
        return self.told_s


def looks(line: LineWatch, times: Iterable[float]) -> list[bool]:
    moments = iter(times)
    line.now = moments.__next__
    return [line.is_silent() for _ in times]


def test_a_machine_that_confirms_nothing_for_a_second_is_gone() -> None:
    line = LineWatch(cast("Any", Line(1.0)))
    assert looks(line, [0.25, 0.5, 0.75, 1.0]) == [False, False, False, True]
    line.note_heard()
    assert looks(line, [1.25, 1.5, 1.75, 2.0]) == [False, False, False, True]


def test_a_machine_that_confirms_what_it_is_told_is_there_whatever_its_processes_do() -> None:
    assert not any(looks(LineWatch(cast("Any", Line(0.9))), [0.25 * look for look in range(1, 1000)]))


def test_time_in_which_this_process_was_stopped_says_nothing_of_another_machine() -> None:
    line = LineWatch(cast("Any", Line(3600.0)))
    assert not any(looks(line, [0.25, 0.5, 0.75, 3600.0, 3600.25, 3600.5]))
    assert looks(line, [3600.75]) == [True]


def test_a_head_that_cannot_know_answers_nothing_more(
    other: Other, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, connection = other.attached(listener)
    monkeypatch.setattr(replica_place, "DECISION_PATIENCE_S", 0.0)
    other.votes.fails = True
    link.note(Timeout(), 1.0)
    connection.close()
    for _ in range(2):
        with pytest.raises(Superseded, match="cannot tell whether that serves"):
            link.wait_received()


def whole(state: bytes = b"state") -> Any:
    """What a server without tables would give a new replica."""
    return SimpleNamespace(dump=lambda: state, calls=SimpleNamespace(has_waiting=False))


def repaired(other: Other, listener: Listener, give: Callable[[Connection], None]) -> ReplicaLink:
    """A head that has lost its replica, and has tried another one, in the place of which is the test."""
    place = ReplicaPlace(0, 2, other.votes, lambda: ADDRESS, other.transport, other.told.append, process=2)
    link = ReplicaLink(None, lambda: [place])

    def be_replica() -> None:
        give(listener.accept(timeout_s=PATIENCE_S))

    thread = threading.Thread(target=be_replica, daemon=True)
    thread.start()
    try:
        link.repair(whole(), hosted_tables())
    finally:
        thread.join(PATIENCE_S)
    return link


def test_a_head_that_cannot_know_for_a_moment_asks_again_and_says_so_once(other: Other, listener: Listener) -> None:
    link, connection = other.attached(listener)
    link.note(Timeout(), 1.0)
    other.votes.num_failures = 2
    connection.close()
    assert link.wait_received()
    assert other.votes.decided == "dismissed"
    waits, alone = other.told
    assert waits == (
        "server 0 waits: which of its processes serves cannot be read or written: [Errno 5] Input/output error"
    )
    assert "has no replica any more" in alone


def test_a_launcher_that_has_not_answered_in_time_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_place, "DECISION_PATIENCE_S", 0.05)
    asked, told = list[int](), list[str]()

    def ask() -> bool:
        asked.append(1)
        threading.Event().wait(0.1)  # as long as the launcher is waited for: 30 s
        raise TimeoutError("the launcher did not say which process serves within 30 s")

    with pytest.raises(TimeoutError, match="within 30 s"):
        replica_place.wait_decided(ask, "server 0", told.append)
    assert (len(asked), told) == (1, [])


def test_a_new_replica_counts_once_it_has_all(other: Other, listener: Listener) -> None:
    got: list[Connection] = []

    def take(connection: Connection) -> None:
        frame = connection.receive(timeout_s=PATIENCE_S)
        assert CODEC.decode(frame.header) == Attached(2)
        assert other.votes.decided == ""
        answer(connection, 1)
        got.append(connection)

    link = repaired(other, listener, take)
    assert other.votes.decided == "enlisted 2"
    assert other.told == ["server 0 has a replica again"]
    link.note(Timeout(), 1.0)
    told = [CODEC.decode(got[0].receive(timeout_s=PATIENCE_S).header) for _ in range(2)]
    assert isinstance(told[0], Checked)  # by which it knows that it counts
    assert told[1].now == 1.0
    link.close()
    got[0].close()


def test_a_new_replica_that_cannot_be_reached_is_told_of(other: Other, listener: Listener) -> None:
    place = ReplicaPlace(0, 2, other.votes, lambda: "memory://nowhere", other.transport, other.told.append, process=2)
    link = ReplicaLink(None, lambda: [place])
    link.repair(whole(), hosted_tables())
    assert not link.is_there
    [line] = other.told
    assert line.startswith("server 0 has no replica yet: ")


def test_a_head_in_which_pushes_always_wait_says_once_why_it_has_no_replica(
    other: Other, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = SimpleNamespace(s=100.0)
    monkeypatch.setattr(replica_link, "time", SimpleNamespace(monotonic=lambda: passed.s))
    place = ReplicaPlace(0, 2, other.votes, lambda: "memory://nowhere", other.transport, other.told.append, process=2)
    link, tables = ReplicaLink(None, lambda: [place]), SimpleNamespace(num_waiting=1, has_values=True)
    for step_s in (0.0, 9.0, 0.9):
        passed.s += step_s
        link.repair(whole(), cast("Any", {"w": tables}))
        assert not other.told
    for step_s in (0.2, 11.0, 11.0):
        passed.s += step_s
        link.repair(whole(), cast("Any", {"w": tables}))
    [line] = other.told
    assert line.startswith("server 0 has no replica yet: pushes that wait for their clock, or calls, have left no ")


def test_a_new_replica_that_does_not_take_all_does_not_count(other: Other, listener: Listener) -> None:
    link = repaired(other, listener, lambda connection: connection.close())
    assert not link.is_there
    assert other.votes.decided == ""
    assert link.wait_received(), "the head goes on"
    link.repair(whole(), hosted_tables())  # once is enough


def test_a_head_that_cannot_know_whether_it_has_a_replica_answers_nothing_more(
    other: Other, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_place, "DECISION_PATIENCE_S", 0.0)
    other.votes.fails = True
    with pytest.raises(Superseded, match="cannot tell whether it has a replica"):
        repaired(other, listener, lambda connection: answer(connection, 1))


# -- the replica's end ------------------------------------------------------------------------------------------------


@dataclass
class Following:
    """A replica in a thread, of which the test is the head."""

    other: Other
    listener: Listener
    items: list[object] = field(default_factory=list)
    done: list[object] = field(default_factory=list)
    outcome: Future[Recovery | None] = field(default_factory=Future)

    def start(self, patience_s: float = PATIENCE_S) -> None:
        parts: Any = SimpleNamespace(load=self.done.append, declarations=Declarations())
        replay = Replay(parts, hosted_tables(), ReceiveBuffers(), self.handle, lambda *_: None)
        follower = Follower(0, self.other.votes, self.listener, patience_s, self.other.told.append)

        def run() -> None:
            try:
                self.outcome.set_result(follower.follow(replay, lambda _: self.items.pop(0) if self.items else None))
            except BaseException as error:
                self.outcome.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    def handle(self, event: Any, now: float) -> set[Any]:
        self.done.append((event, now))
        return set()

    def connect(self, role: str = "head", rank: int = 0) -> Connection:
        return self.other.transport.connect(ADDRESS, encode(Hello(role, rank, 0, 1)), timeout_s=PATIENCE_S)

    def attach(self) -> Connection:
        connection = self.connect()
        self.send(connection, 1, Attached(1), b"state")
        return connection

    def send(self, connection: Connection, number: int, message: Any, body: bytes = b"") -> None:
        connection.send(CODEC.encode(message), memoryview(body), timeout_s=PATIENCE_S)
        received = connection.receive(timeout_s=PATIENCE_S)
        assert ANSWERS.decode(received.header) == Received(number)


def happened(event: Any, now: float) -> Happened:
    return Happened(now, encode_written(event))


def test_a_replica_does_what_it_is_told_and_serves_once_its_head_is_gone(other: Other, listener: Listener) -> None:
    following, death = Following(other, listener), Died(1, 0, "it was killed")
    following.items.append(death)
    following.start()
    connection = following.attach()
    following.send(connection, 2, happened(Timeout(), 7.0))
    connection.close()
    assert following.outcome.result(PATIENCE_S) == Recovery(postponed=[death], served="server 0")
    assert following.done == [b"state", (Timeout(), 7.0)]
    assert other.votes.decided == "promoted"
    [line] = other.told
    assert line.startswith("server 0 is served by its replica from now on: ")


def test_a_replica_whose_head_goes_on_alone_does_not_serve(other: Other, listener: Listener) -> None:
    following = Following(other, listener)
    following.start()
    connection = following.attach()
    other.votes.decided = "dismissed"
    connection.close()
    with pytest.raises(Superseded, match="server 0 goes on without its replica"):
        following.outcome.result(PATIENCE_S)
    assert other.told == []


def test_a_replica_whose_head_has_not_begun_does_not_serve(other: Other, listener: Listener) -> None:
    following = Following(other, listener)
    following.start()
    following.connect().close()
    with pytest.raises(Superseded, match="had not begun"):
        following.outcome.result(PATIENCE_S)
    assert other.votes.decided == ""


def test_a_replica_ends_with_a_head_that_ends_as_it_was_told_to(other: Other, listener: Listener) -> None:
    following = Following(other, listener)
    following.start()
    connection = following.attach()
    connection.send(CODEC.encode(Ended("the job is over")), timeout_s=PATIENCE_S)
    assert following.outcome.result(PATIENCE_S) is None
    assert other.votes.decided == ""
    connection.close()


def test_a_replica_that_is_told_to_end_waits_for_its_head_and_does_not_serve(other: Other, listener: Listener) -> None:
    following = Following(other, listener)
    following.start()
    connection = following.attach()
    following.items.append(Stop())
    for number in range(2, 6):  # the second of these comes after it has looked
        following.send(connection, number, happened(Timeout(), float(number)))
    connection.close()
    assert following.outcome.result(PATIENCE_S) is None
    assert len(following.done) == 5
    assert other.votes.decided == ""


def test_a_head_that_ends_says_nothing_of_a_replica_that_has_ended(other: Other, listener: Listener) -> None:
    link, connection = other.attached(listener)
    connection.close()
    link.end("the job is over")
    assert (other.told, other.votes.decided) == ([], "")


def test_a_replica_ends_when_it_is_told_to(other: Other, listener: Listener) -> None:
    following = Following(other, listener, items=[Stop()])
    following.start()
    assert following.outcome.result(PATIENCE_S) is None


@pytest.mark.parametrize(("role", "rank"), [("worker", 0), ("server", 0), ("head", 1)])
def test_only_the_head_of_this_server_is_followed(role: str, rank: int, other: Other, listener: Listener) -> None:
    following = Following(other, listener)
    following.start()
    stranger = following.connect(role, rank)
    with pytest.raises(ConnectionLost):
        stranger.receive(timeout_s=PATIENCE_S)
    stranger.close()
    connection = following.attach()
    connection.send(CODEC.encode(Ended("")), timeout_s=PATIENCE_S)
    assert following.outcome.result(PATIENCE_S) is None
    connection.close()


def test_a_head_that_does_not_come_is_missed(other: Other, listener: Listener) -> None:
    following = Following(other, listener)
    following.start(patience_s=0.0)
    with pytest.raises(DeadlineExceeded, match="server 0 did not connect to its replica"):
        following.outcome.result(PATIENCE_S)


def test_a_head_that_says_what_makes_no_sense_is_followed_no_more(other: Other, listener: Listener) -> None:
    following = Following(other, listener)
    following.start()
    connection = following.attach()
    connection.send(CODEC.encode(Restored("no table", 1, 1, ())), timeout_s=PATIENCE_S)
    with pytest.raises(PeerError, match="the head sent a Restored that makes no sense here: KeyError: 'no table'"):
        following.outcome.result(PATIENCE_S)
    connection.close()


@pytest.mark.parametrize(
    ("message", "size_bytes"),
    [
        (Attached(1), MAX_HEARD_BYTES + 1),
        (happened(Timeout(), 1.0), 1),
        (Ended(""), 1),
        (happened(Asked(0, 0, encode(Initialise(1, "no table"))), 1.0), SMALL_BYTES + 1),
        (Pushed(encode(PushFrame(Push(PushId(1, 0, 0, 0), "no table", 0, 0), 1.0, (), (), False))), SMALL_BYTES + 1),
    ],
)
def test_no_message_has_more_beside_it_than_it_may(message: Any, size_bytes: int) -> None:
    replay = Replay(cast("Any", None), hosted_tables(), ReceiveBuffers(), lambda *_: set(), lambda *_: None)
    with pytest.raises(PeerError, match=f"came with {size_bytes} bytes"):
        replay.place(CODEC.encode(message), size_bytes)
