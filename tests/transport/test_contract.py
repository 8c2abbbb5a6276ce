"""What every transport promises, asked of every transport."""

import os
import resource
import select
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transport.carriers import Carrier, Pair, connect_pair, make_carrier

from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError, UsageError
from paceline.transport import EMPTY, Frame, Limits, Listener, TlsSettings
from paceline.transport.base import MAX_TOGETHER, HandsOver, SocketListener
from paceline.transport.channel import SocketChannel
from paceline.transport.deadline import Deadline
from paceline.transport.poller import receive_all
from paceline.transport.stream import ReadAhead, StreamConnection

TIMEOUT_S = 60.0


def test_echo(pair: Pair) -> None:
    pair.client.send(b"push", memoryview(b"gradient"), timeout_s=30)
    frame = pair.server.receive(timeout_s=30)
    assert (frame.header, bytes(frame.body)) == (b"push", b"gradient")
    pair.server.send(b"done", frame.body, timeout_s=30)
    back = pair.client.receive(timeout_s=30)
    assert (back.header, bytes(back.body)) == (b"done", b"gradient")


def test_header_and_body_may_be_empty(pair: Pair) -> None:
    pair.client.send(b"", timeout_s=30)
    frame = pair.server.receive(timeout_s=30)
    assert frame.header == b""
    assert frame.body.nbytes == 0
    assert frame.body == EMPTY


def test_large_body(pair: Pair) -> None:
    body = os.urandom(8 << 20)
    with ThreadPoolExecutor(1) as pool:
        received = pool.submit(pair.server.receive, timeout_s=30)
        pair.client.send(b"large", memoryview(body), timeout_s=30)
        assert bytes(received.result().body) == body


def test_order_of_many_small_frames(pair: Pair) -> None:
    num_frames = 10_000

    def send_all() -> None:
        for number in range(num_frames):
            pair.client.send(number.to_bytes(4), timeout_s=30)

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(send_all)
        numbers = [int.from_bytes(pair.server.receive(timeout_s=30).header) for _ in range(num_frames)]
        sent.result()
    assert numbers == list(range(num_frames))


def test_bodies_of_all_sizes_follow_each_other(pair: Pair) -> None:
    sizes = [0, 1, 63, 64, 4096, 16_383, 16_384, 70_000, 262_143, 262_144, 300_001]
    bodies = [os.urandom(size) for size in sizes]
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(
            lambda: [
                pair.client.send(b"h" * (size % 999), memoryview(b), timeout_s=30)
                for size, b in zip(sizes, bodies, strict=True)
            ]
        )
        frames = [pair.server.receive(timeout_s=30) for _ in sizes]
        sent.result()
    assert [bytes(frame.body) for frame in frames] == bodies
    assert [len(frame.header) for frame in frames] == [size % 999 for size in sizes]


def test_allocated_body_travels_whole_and_in_part(pair: Pair) -> None:
    memory = pair.transport.allocate(100_000)
    memory[:] = bytes(range(250)) * 400
    pair.client.send(b"whole", memory, timeout_s=30)
    pair.client.send(b"part", memory[1000:1010], timeout_s=30)
    assert pair.server.receive(timeout_s=30).body == memory
    assert pair.server.receive(timeout_s=30).body == memory[1000:1010]


def test_allocated_memory_travels_over_all_connections_of_its_transport(carrier: Carrier, pair: Pair) -> None:
    memory = carrier.transport.allocate(1000)
    memory[:] = bytes(range(250)) * 4
    other = carrier.transport.connect(pair.listener.address, b"worker 4", timeout_s=30)
    accepted = pair.listener.accept(timeout_s=30)
    ways = ((pair.client, pair.server), (other, accepted), (pair.server, pair.client), (accepted, other))
    for start, (sender, receiver) in enumerate(ways):
        sender.send(b"slice", memory[start * 100 : 900], timeout_s=30)
        assert receiver.receive(timeout_s=30).body == memory[start * 100 : 900]
    other.close()
    accepted.close()


def test_allocated_memory_survives_reconnects(carrier: Carrier) -> None:
    memory = carrier.transport.allocate(1000)
    for number in range(3):
        memory[:] = bytes([number]) * 1000
        pair = connect_pair(carrier.transport, carrier.address)
        for _ in range(2):
            pair.client.send(b"again", memory, timeout_s=30)
            assert pair.server.receive(timeout_s=30).body == memory
        pair.close()


def test_memory_of_a_negative_size_is_the_callers_mistake(carrier: Carrier) -> None:
    assert carrier.transport.allocate(0).nbytes == 0
    with pytest.raises(UsageError, match="-1 bytes"):
        carrier.transport.allocate(-1)


def test_plain_body_is_copied_before_send_returns(pair: Pair) -> None:
    body = bytearray(b"before")
    pair.client.send(b"push", memoryview(body), timeout_s=30)
    body[:] = b"after!"
    assert bytes(pair.server.receive(timeout_s=30).body) == b"before"


def test_received_body_outlives_the_connection(carrier: Carrier) -> None:
    pair = connect_pair(carrier.transport, carrier.address)
    memory = carrier.transport.allocate(5000)
    memory[:5] = b"alive"
    pair.client.send(b"push", memory, timeout_s=30)
    body = pair.server.receive(timeout_s=30).body
    pair.close()
    memory.release()
    assert bytes(body[:5]) == b"alive"


@pytest.mark.parametrize("size_bytes", [1, 100, 70_000, 1 << 20])
def test_plain_body_goes_where_the_receiver_wants_it(pair: Pair, size_bytes: int) -> None:
    body, wanted = os.urandom(size_bytes), bytearray(size_bytes + 10)
    asked: list[tuple[bytes, int]] = []

    def place(header: bytes, size_bytes: int) -> memoryview:
        asked.append((header, size_bytes))
        return memoryview(wanted)[5:-5]

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(pair.client.send, b"push", memoryview(body), timeout_s=30)
        frame = pair.server.receive(timeout_s=30, place=place)
        sent.result()
    assert asked == [(b"push", size_bytes)]
    assert wanted == bytes(5) + body + bytes(5)
    frame.body[:1] = b"z"
    assert wanted[5] == ord("z")


def test_floats_are_a_place_too(pair: Pair) -> None:
    wanted = memoryview(bytearray(24)).cast("f", (2, 3))
    pair.client.send(b"push", memoryview(bytes(range(24))), timeout_s=30)
    pair.server.receive(timeout_s=30, place=lambda *_: wanted)
    assert wanted.tobytes() == bytes(range(24))


def test_without_a_place_for_it_a_body_comes_in_fresh_memory(pair: Pair) -> None:
    pair.client.send(b"push", memoryview(b"gradient"), timeout_s=30)
    assert bytes(pair.server.receive(timeout_s=30, place=lambda *_: None).body) == b"gradient"


def test_an_empty_body_has_no_place(pair: Pair) -> None:
    def place(header: bytes, size_bytes: int) -> memoryview:
        raise AssertionError(header)

    pair.client.send(b"tick", timeout_s=30)
    assert pair.server.receive(timeout_s=30, place=place).body == EMPTY


@pytest.mark.parametrize("wanted", [memoryview(bytearray(7)), memoryview(bytearray(9)), memoryview(bytes(8))])
def test_a_place_must_be_writable_and_of_the_size_of_the_body(pair: Pair, wanted: memoryview) -> None:
    pair.client.send(b"push", memoryview(b"gradient"), timeout_s=30)
    with pytest.raises(UsageError, match="a body of 8 bytes was to go into"):
        pair.server.receive(timeout_s=30, place=lambda *_: wanted)


def test_a_receiver_that_finds_no_place_may_end_the_connection(pair: Pair) -> None:
    def place(header: bytes, size_bytes: int) -> memoryview:
        raise PeerError(f"no reader wants {size_bytes} bytes of {header!r}")

    pair.client.send(b"push", memoryview(b"gradient"), timeout_s=30)
    with pytest.raises(PeerError, match="no reader wants 8 bytes of b'push'"):
        pair.server.receive(timeout_s=30, place=place)
    with pytest.raises(ConnectionLost):
        pair.server.receive(timeout_s=30)
    with pytest.raises(ConnectionLost):
        pair.client.receive(timeout_s=30)


def test_body_of_any_element_type_travels_as_bytes(pair: Pair) -> None:
    floats = memoryview(bytearray(24)).cast("f", (2, 3))
    pair.client.send(b"floats", floats, timeout_s=30)
    assert pair.server.receive(timeout_s=30).body.nbytes == 24


def test_scattered_body_is_the_callers_mistake(pair: Pair) -> None:
    with pytest.raises(UsageError, match="contiguous"):
        pair.client.send(b"push", memoryview(bytes(10))[::2], timeout_s=30)


def test_frame_over_the_limits_is_the_callers_mistake(carrier: Carrier, pair: Pair) -> None:
    with pytest.raises(UsageError, match="limits"):
        pair.client.send(b"h" * (Limits().max_header_bytes + 1), timeout_s=30)


def test_concurrent_senders_do_not_mix_frames(pair: Pair) -> None:
    num_senders, num_frames = 4, 100

    def send(sender: int) -> None:
        for _ in range(num_frames):
            pair.client.send(bytes([sender]), memoryview(bytes([sender]) * 5000), timeout_s=30)

    with ThreadPoolExecutor(num_senders) as pool:
        sent = [pool.submit(send, sender) for sender in range(num_senders)]
        for _ in range(num_senders * num_frames):
            frame = pair.server.receive(timeout_s=30)
            assert bytes(frame.body) == frame.header * 5000
        for future in sent:
            future.result()


def test_receive_ends_at_its_deadline_and_the_connection_lives_on(pair: Pair) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"frame from"):
        pair.client.receive(timeout_s=0.05)
    assert 0.05 <= time.monotonic() - started < 30
    pair.server.send(b"late", timeout_s=30)
    assert pair.client.receive(timeout_s=30).header == b"late"


def test_send_ends_at_its_deadline_without_a_receiver(pair: Pair) -> None:
    body = memoryview(bytes(1 << 16))

    def fill() -> None:
        for _ in range(10_000):
            pair.client.send(b"push", body, timeout_s=0.05)

    with pytest.raises(DeadlineExceeded, match="to take a frame"):
        fill()


def test_close_wakes_a_blocked_receiver(pair: Pair) -> None:
    entered = threading.Event()

    def receive() -> None:
        entered.set()
        pair.client.receive(timeout_s=30)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(receive)
        entered.wait()
        pair.client.close()
        with pytest.raises(ConnectionLost):
            waiting.result(timeout=30)


def test_close_wakes_a_blocked_sender(pair: Pair) -> None:
    pair.client.send(b"first", timeout_s=30)

    def send_on() -> None:
        while True:
            pair.client.send(b"push", memoryview(bytes(1 << 16)), timeout_s=30)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(send_on)
        pair.server.receive(timeout_s=30)
        pair.client.close()
        with pytest.raises(ConnectionLost):
            waiting.result(timeout=30)


def test_close_may_be_repeated_and_ends_sending_and_receiving(pair: Pair) -> None:
    pair.client.close()
    pair.client.close()
    with pytest.raises(ConnectionLost):
        pair.client.receive(timeout_s=30)
    with pytest.raises(ConnectionLost):
        pair.client.send(b"push", timeout_s=30)


def test_what_was_sent_before_closing_still_arrives(pair: Pair) -> None:
    pair.client.send(b"goodbye", timeout_s=30)
    pair.client.close()
    assert pair.server.receive(timeout_s=30).header == b"goodbye"
    with pytest.raises(ConnectionLost):
        pair.server.receive(timeout_s=30)


def test_closed_peer_is_noticed_by_the_sender(pair: Pair) -> None:
    pair.server.close()

    def send_on() -> None:
        for _ in range(1000):
            pair.client.send(b"push", memoryview(bytes(10_000)), timeout_s=30)

    with pytest.raises(ConnectionLost):
        send_on()


def test_identity_arrives_and_peers_are_named(pair: Pair) -> None:
    assert pair.server.identity == pair.client.identity == b"worker 3"
    assert pair.client.peer
    assert pair.server.peer


def test_identity_is_bounded(carrier: Carrier) -> None:
    with pytest.raises(UsageError, match="identity"):
        carrier.transport.connect(carrier.address, bytes(1025), timeout_s=1)


def test_no_listener(carrier: Carrier) -> None:
    listener = carrier.transport.listen(carrier.address)
    listener.close()
    with pytest.raises(PeerError, match="no listener"):
        carrier.transport.connect(listener.address, b"", timeout_s=2)


def test_accept_ends_at_its_deadline(carrier: Carrier) -> None:
    listener = carrier.transport.listen(carrier.address)
    with pytest.raises(DeadlineExceeded, match="connection at"):
        listener.accept(timeout_s=0.01)
    listener.close()


def test_closing_a_listener_wakes_accept_and_spares_what_was_accepted(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pair.listener.accept, timeout_s=30)
        pair.listener.close()
        pair.listener.close()
        with pytest.raises(ConnectionLost):
            waiting.result(timeout=30)
    pair.client.send(b"still here", timeout_s=30)
    assert pair.server.receive(timeout_s=30).header == b"still here"


def test_closing_a_listener_ends_connections_never_accepted(carrier: Carrier) -> None:
    listener = carrier.transport.listen(carrier.address)
    client = carrier.transport.connect(listener.address, b"", timeout_s=30)
    listener.close()
    with pytest.raises(ConnectionLost):
        client.receive(timeout_s=30)
    client.close()


def test_an_address_taken_and_given_back(carrier: Carrier) -> None:
    first = carrier.transport.listen(carrier.address)
    with pytest.raises(UsageError, match="taken"):
        carrier.transport.listen(first.address)
    first.close()
    carrier.transport.listen(first.address).close()


def end_as_if_killed(listener: Listener) -> None:
    """Close a listener, but leave the file of its socket as the process had it."""
    path = Path(listener.address.removeprefix("shm://"))
    if path.is_socket():
        path.with_suffix(".kept").hardlink_to(path)
    listener.close()
    if path.with_suffix(".kept").exists():
        path.with_suffix(".kept").rename(path)


@pytest.mark.parametrize("carrier", ["tcp", "tls", "shm"], indirect=True)
def test_clients_wait_while_another_process_comes_to_listen_in_the_place_of_one_that_was_killed(
    carrier: Carrier,
) -> None:
    listener = carrier.transport.listen(carrier.address)
    assert isinstance(listener, SocketListener)
    assert isinstance(carrier.transport, HandsOver)
    address, kept = listener.address, os.dup(listener.fileno())
    with ThreadPoolExecutor(1) as elsewhere:
        end_as_if_killed(listener)
        waiting = elsewhere.submit(carrier.transport.connect, address, b"worker 3", timeout_s=TIMEOUT_S)
        successor = carrier.transport.listen_again(address, kept)
        server, client = successor.accept(timeout_s=TIMEOUT_S), waiting.result(TIMEOUT_S)
    assert (successor.address, server.identity) == (address, b"worker 3")
    for end in (client, server, successor):
        end.close()


def test_address_of_another_transport_is_refused(carrier: Carrier) -> None:
    with pytest.raises(UsageError, match="not an address of"):
        carrier.transport.connect("pigeon://roof", b"", timeout_s=1)


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm"])
def test_limits_hold_for_bodies(kind: str, tmp_path: Path) -> None:
    carrier = make_carrier(kind, tmp_path, Limits(max_body_bytes=1000))
    pair = connect_pair(carrier.transport, carrier.address)
    pair.client.send(b"", memoryview(bytes(1000)), timeout_s=30)
    with pytest.raises(UsageError, match="limits"):
        pair.client.send(b"", memoryview(bytes(1001)), timeout_s=30)
    pair.close()


def test_an_idle_connection_has_room_for_a_small_frame(pair: Pair) -> None:
    assert pair.client.has_room(memoryview(bytes(100)))
    assert pair.server.has_room(EMPTY)


def test_there_is_no_room_for_a_frame_that_would_wait(pair: Pair) -> None:
    body, num_sent = memoryview(bytes(16 << 10)), 0
    while pair.client.has_room(body):
        pair.client.send(b"more", body, timeout_s=30)
        num_sent += 1
        assert num_sent < 1 << 13
    for _ in range(num_sent):
        assert len(pair.server.receive(timeout_s=30).body) == len(body)
    assert pair.client.has_room(body)


def received(pair: Pair, num: int) -> list[Frame]:
    frames: list[Frame] = []
    while len(frames) < num:
        frames += receive_all(pair.server, timeout_s=30)
    return frames


def test_frames_that_are_sent_together_arrive_in_order_each_with_its_body(pair: Pair) -> None:
    bodies = [EMPTY, memoryview(b"gradient"), memoryview(os.urandom(5000)), EMPTY, memoryview(b"x")]
    frames = [(bytes([number]) * number, body) for number, body in enumerate(bodies)]
    assert pair.client.try_send(frames, timeout_s=30)
    got = received(pair, len(frames))
    assert [(frame.header, bytes(frame.body)) for frame in got] == [(header, bytes(body)) for header, body in frames]


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm"])
def test_frames_that_have_arrived_are_handed_over_together(kind: str, tmp_path: Path) -> None:
    carrier = make_carrier(kind, tmp_path)
    pair = connect_pair(carrier.transport, carrier.address)
    frames = [(bytes([number]), EMPTY) for number in range(MAX_TOGETHER + 6)]
    assert pair.client.try_send([*frames[:3], (b"last", memoryview(b"of four"))], timeout_s=30)
    assert len(receive_all(pair.server, timeout_s=30)) == 4
    assert not pair.server.has_frame()
    assert pair.client.try_send(frames, timeout_s=30)
    assert [len(receive_all(pair.server, timeout_s=30)) for _ in range(2)] == [MAX_TOGETHER, 6]
    pair.close()


def test_shared_and_plain_bodies_are_sent_together(pair: Pair) -> None:
    first, second = pair.transport.allocate(50_000), pair.transport.allocate(30_000)
    first[:], second[:] = bytes(range(250)) * 200, bytes(range(250)) * 120
    for body in (first, second):  # so that all carriers know them, and none has to wait
        pair.client.send(b"known", body, timeout_s=30)
        pair.server.receive(timeout_s=30)
    bodies = [first[:100], memoryview(b"plain"), second[7:107], first[50:60], EMPTY]
    assert pair.client.try_send([(b"h", body) for body in bodies], timeout_s=30)
    assert [bytes(frame.body) for frame in received(pair, 5)] == [bytes(body) for body in bodies]


def test_memory_that_a_peer_has_never_seen_is_sent_together_with_other_frames(pair: Pair) -> None:
    memories = [pair.transport.allocate(1000) for _ in range(3)]
    for number, memory in enumerate(memories):
        memory[:] = bytes([number]) * 1000
    bodies = [memories[0], EMPTY, memories[1][10:20], memories[0][5:9], memories[2]]
    assert pair.client.try_send([(b"h", body) for body in bodies], timeout_s=30)
    assert [bytes(frame.body) for frame in received(pair, 5)] == [bytes(body) for body in bodies]


def test_bodies_that_arrive_together_go_each_to_its_place(pair: Pair) -> None:
    places = {b"a": bytearray(4), b"b": bytearray(2)}
    frames = [(b"a", memoryview(b"1234")), (b"-", EMPTY), (b"b", memoryview(b"56"))]
    assert pair.client.try_send(frames, timeout_s=30)
    got: list[Frame] = []
    while len(got) < 3:
        got += receive_all(pair.server, timeout_s=30, place=lambda header, _: memoryview(places[header]))
    assert places == {b"a": b"1234", b"b": b"56"}


def test_frames_before_one_that_is_refused_are_handed_over(pair: Pair) -> None:
    def place(header: bytes, size_bytes: int) -> memoryview | None:
        if header == b"bad":
            raise PeerError(f"{size_bytes} bytes are too many")
        return None

    frames = [(b"good", memoryview(b"1")), (b"also", EMPTY), (b"bad", memoryview(b"22")), (b"never", EMPTY)]
    assert pair.client.try_send(frames, timeout_s=30)
    got: list[bytes] = []

    def read_on() -> None:
        while True:
            got.extend(frame.header for frame in receive_all(pair.server, timeout_s=30, place=place))

    with pytest.raises(PeerError):
        read_on()
    assert got == [b"good", b"also"]


@pytest.mark.parametrize("kind", ["memory", "tcp", "shm"])
def test_no_frame_is_sent_beside_one_over_the_limits(kind: str, tmp_path: Path) -> None:
    carrier = make_carrier(kind, tmp_path)
    pair = connect_pair(carrier.transport, carrier.address)
    with pytest.raises(UsageError, match="limits"):
        pair.client.try_send([(b"small", EMPTY), (bytes(Limits().max_header_bytes + 1), EMPTY)], timeout_s=30)
    pair.client.send(b"next", timeout_s=30)
    assert pair.server.receive(timeout_s=30).header == b"next"
    pair.close()


def test_nothing_is_sent_where_one_would_wait(pair: Pair) -> None:
    body, num_sent = memoryview(bytes(16 << 10)), 0
    while pair.client.try_send([(b"small", EMPTY), (b"more", body)], timeout_s=30):
        num_sent += 2
        assert num_sent < 1 << 13
    for number in range(num_sent):
        assert pair.server.receive(timeout_s=30).header == (b"small", b"more")[number % 2]
    assert not pair.server.has_frame()
    pair.client.send(b"after", timeout_s=30)
    assert pair.server.receive(timeout_s=30).header == b"after"


def test_a_closed_connection_refuses_to_be_used(pair: Pair) -> None:
    pair.client.close()
    with pytest.raises(ConnectionLost):
        pair.client.try_send([(b"a", EMPTY), (b"b", EMPTY)], timeout_s=30)


TRAINS = st.lists(
    st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=200)), min_size=1, max_size=9), max_size=12
)


@settings(max_examples=30)
@given(TRAINS)
def test_any_trains_of_frames_arrive_as_one_sequence(pair: Pair, trains: list[list[tuple[bytes, bytes]]]) -> None:
    for train in trains:
        assert pair.client.try_send([(header, memoryview(body)) for header, body in train], timeout_s=30)
    said = [frame for train in trains for frame in train]
    got = received(pair, len(said))
    assert [(frame.header, bytes(frame.body)) for frame in got] == said
    assert not pair.server.has_frame()


class Interrupted(BaseException):
    """What the handler of a signal raises."""


@pytest.fixture
def _raising_handler() -> Iterator[None]:
    def interrupt(_number: int, _frame: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("_raising_handler")
@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_send_that_is_interrupted_in_the_middle_of_a_frame_ends_the_connection(kind: str, tmp_path: Path) -> None:
    carrier = make_carrier(kind, tmp_path)
    pair = connect_pair(carrier.transport, carrier.address)
    arrived = pair.server.fileno()
    assert arrived is not None

    def interrupt() -> None:
        select.select([arrived], [], [], TIMEOUT_S)  # a part has left; the rest cannot, as it is not read
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    interrupting = threading.Thread(target=interrupt)
    interrupting.start()
    with pytest.raises(Interrupted):
        pair.client.send(b"values", memoryview(bytearray(b"\1" * (64 << 20))), timeout_s=TIMEOUT_S)
    interrupting.join(TIMEOUT_S)
    with pytest.raises(ConnectionLost, match="a signal handler has interrupted it"):
        pair.client.send(b"next", timeout_s=0.1)
    with pytest.raises(ConnectionLost):  # and not a body that ends with the next frame
        pair.server.receive(timeout_s=TIMEOUT_S)
    pair.close()


@pytest.mark.usefixtures("_raising_handler")
@pytest.mark.parametrize("kind", ["tcp", "tls", "shm"])
def test_a_receive_that_is_interrupted_in_the_middle_of_a_frame_ends_the_connection(
    kind: str, tmp_path: Path, certificates: TlsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = make_carrier(kind, tmp_path, tls=certificates if kind == "tls" else None)
    pair = connect_pair(carrier.transport, carrier.address)
    read = SocketChannel._read

    def read_and_be_interrupted(self: SocketChannel, buffer: memoryview, deadline: Deadline, how: int) -> int:
        num_bytes = read(self, buffer[:4096] if how else buffer, deadline, how)
        if len(buffer) > 100_000:  # of a body
            signal.raise_signal(signal.SIGUSR1)
        return num_bytes

    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(pair.client.send, b"values", memoryview(os.urandom(1 << 20)), timeout_s=TIMEOUT_S)
        with monkeypatch.context() as patch:
            patch.setattr(SocketChannel, "_read", read_and_be_interrupted)
            with pytest.raises(Interrupted):
                pair.server.receive(timeout_s=TIMEOUT_S)
        with pytest.raises(ConnectionLost, match="a signal handler has interrupted it"):
            pair.server.receive(timeout_s=TIMEOUT_S)
        pair.server.close()
        sent.exception(TIMEOUT_S)
    pair.close()


@pytest.mark.parametrize("kind", ["tcp", "tls", "shm"])
@pytest.mark.parametrize("call", ["receive", "send", "try_send", "close"])
def test_a_signal_handler_closes_a_connection_that_its_own_thread_uses(
    kind: str, call: str, tmp_path: Path, certificates: TlsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    carrier = make_carrier(kind, tmp_path, tls=certificates if kind == "tls" else None)
    pair = connect_pair(carrier.transport, carrier.address)
    kinds: dict[str, tuple[type, str]] = {
        "receive": (StreamConnection, "_read_frame"),
        "send": (StreamConnection, "_send_frames"),
        "try_send": (StreamConnection, "_send_frames"),
        "close": (ReadAhead, "close"),
    }
    owner, inner = kinds[call]  # is called with a lock
    real, closed = getattr(owner, inner), list[bool]()

    def close(*_: object) -> None:
        pair.client.close()
        closed.append(True)

    def interrupted(self: object, *args: object) -> object:
        if self in (pair.client, pair.client._ahead) and not closed:  # pyright: ignore
            signal.raise_signal(signal.SIGUSR1)
        return real(self, *args)

    calls = {
        "receive": lambda: pair.client.receive(timeout_s=TIMEOUT_S),
        "send": lambda: pair.client.send(b"push", timeout_s=TIMEOUT_S),
        "try_send": lambda: pair.client.try_send([(b"push", EMPTY)], timeout_s=TIMEOUT_S),
        "close": pair.client.close,
    }
    before = signal.signal(signal.SIGUSR1, close)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(owner, inner, interrupted)
            with suppress(ConnectionLost) if call == "close" else pytest.raises(ConnectionLost):
                calls[call]()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert closed == [True]
    assert pair.client.fileno() is None, "the call that was interrupted has freed the descriptor"
    pair.close()


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_a_process_at_its_limit_of_open_files_cannot_connect_now(kind: str, tmp_path: Path) -> None:
    carrier = make_carrier(kind, tmp_path)
    listener = carrier.transport.listen(carrier.address)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        with pytest.raises(PeerError, match=r"cannot connect to .*: Too many open files"):
            carrier.transport.connect(listener.address, b"worker 3", timeout_s=TIMEOUT_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    carrier.transport.connect(listener.address, b"worker 3", timeout_s=TIMEOUT_S).close()
    listener.close()
