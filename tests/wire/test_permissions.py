"""What a peer may say and be: by its role, by its certificate, and until that is revoked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.nodes.client import NUMEL, ONES, WORKER, Client, as_body, client, member, push, serve_table
from tests.nodes.cluster import JOIN_S, RETRY_S, Cluster, cluster, table

from paceline.core.messages import Applied, Clock, Closed, Follow, Join, Pull, Push, PushId, Sender
from paceline.core.settings import ServerSettings, WorkerSettings
from paceline.core.worker import MAX_TOGETHER
from paceline.errors import AuthenticationFailed, PeerError
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.job.credentials.revocation import POLL_S, watching_revoked
from paceline.observe.trace import Trace
from paceline.server.buffers import BodyLimits, ReceiveBuffers
from paceline.server.node import ServerNode
from paceline.transport import Credentials, TcpTransport
from paceline.transport.frames import Kind, Prefix, encode_prefix
from paceline.wire import messages as wire
from paceline.wire.messages import (
    SENDERS,
    Hello,
    Keys,
    PullFrame,
    PushFrame,
    RowPullFrame,
    RowPushFrame,
    StepFrame,
    check_sender,
    encode,
)
from paceline.wire.requests import SMALL_BYTES, Barrier, Declare, Initialise, LoadState, RequestDone
from paceline.worker.node import WorkerNode
from paceline.worker.waits import WorkerOptions

CREDENTIALS = Credentials(bytes(range(32)), "nodes")
HOLDERS = tuple(Holder("worker", rank) for rank in range(3)) + tuple(Holder("server", rank) for rank in range(2))


def rows(worker: int, *, digest: bytes = b"", sent: bool = True) -> RowPushFrame:
    return RowPushFrame(push(0, worker=worker).push, 1.0, (), Keys(1, digest, sent=sent))


def test_every_message_of_the_wire_has_its_speaker() -> None:
    assert set(SENDERS) == set(wire._CODEC.kinds)


@pytest.mark.parametrize(
    ("hello", "message"),
    [
        (WORKER, Follow(1, 1, "w", 0)),
        (WORKER, Closed(1, "w", 0, ())),
        (WORKER, Clock(Sender(1, 0, 0), 9)),
        (WORKER, Join(Sender(1, 1, 7))),
        (WORKER, push(0, worker=0)),
        (WORKER, PullFrame(Pull(Sender(1, 0, 0), 1, "w", 0, 0), 0)),
        (WORKER, StepFrame((push(0, worker=0),), 1, (), (8,))),
        (WORKER, StepFrame((push(1, worker=1), push(0, worker=0)), 1, (), (8, 8))),
        (WORKER, StepFrame((), 1, (PullFrame(Pull(Sender(1, 0, 0), 1, "w", 1, 1), 0),), ())),
        (WORKER, StepFrame((push(1, worker=1),), 2**64 - 1, (), (8,))),
        (WORKER, StepFrame((), 1, (), ())),
        (WORKER, StepFrame((push(1, worker=1),), 1, (), ())),
        (WORKER, StepFrame((push(1, worker=1),), 1, (), (-8,))),
        (WORKER, StepFrame((), 1, (), (8,), (rows(0),))),
        (WORKER, StepFrame((), 1, (), (8,), (rows(1, digest=b"x"),))),
        (WORKER, StepFrame((), 1, (), (8,), (rows(1, sent=False),))),
        (WORKER, StepFrame((), 1, (), (), (rows(1),))),
        (WORKER, StepFrame((), 1, (), (0,) * (MAX_TOGETHER + 1), (rows(1),) * (MAX_TOGETHER + 1))),
        (WORKER, StepFrame((push(1, worker=1),) * (MAX_TOGETHER + 1), 1, (), (0,) * (MAX_TOGETHER + 1))),
        (Hello("server", 1, 0, 1), Barrier(1, "here")),
        (Hello("server", 1, 0, 1), Follow(1, 0, "w", 0)),
        (Hello("server", 2, 0, 1), Closed(1, "w", 0, ())),
        (Hello("server", 1, 0, 1), Follow(1, 1, "w", 0, norm=-1.0)),
        (Hello("server", 0, 0, 1), Closed(1, "w", 0, (), clips=True, norm=-1.0)),
        (Hello("None", 0, 0, 1), RequestDone(1)),
    ],
)
def test_no_worker_speaks_as_another(hello: Hello, message: object) -> None:
    with pytest.raises(PeerError):
        check_sender(hello, message, num_servers=2)


def test_in_its_own_name_a_peer_may_speak() -> None:
    check_sender(WORKER, StepFrame((push(1, worker=1),), 1, (), (8, 8), (rows(1),)), num_servers=2)
    check_sender(WORKER, Clock(Sender(1, 1, 0), 9), num_servers=2)
    check_sender(WORKER, Barrier(1, "here"), num_servers=2)
    check_sender(Hello("server", 1, 0, 1), Follow(1, 1, "w", 0), num_servers=2)


# -- what certificates say ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, authority = tmp_path_factory.mktemp("keys"), Authority.make(CREDENTIALS.job)
    for holder in HOLDERS:
        authority.issue(folder, holder)
    return folder


def carrier(keys: Path, holder: Holder) -> TcpTransport:
    return TcpTransport(CREDENTIALS, tls=tls_settings(keys, holder))


@contextmanager
def serving(keys: Path) -> Iterator[Cluster]:
    """One server with a certificate; its end ends everything."""
    transport = carrier(keys, Holder("server", 0))
    with closing(transport.listen("127.0.0.1:0")) as listener:
        settings = ServerSettings(0, 1, workers=(), lease_s=60.0, retry_s=RETRY_S)
        node = ServerNode(settings, listener, transport, lambda: (listener.address,), Trace(None))
        thread = threading.Thread(target=node.run, daemon=True)
        thread.start()
        try:
            yield Cluster(transport, [node], (listener.address,), 60.0)
        finally:
            node.stop()
            thread.join(JOIN_S)
            assert not thread.is_alive()


def seen_by(servers: Cluster, keys: Path, rank: int) -> Cluster:
    """The same servers, as one with this worker's certificate can reach them."""
    return replace(servers, transport=carrier(keys, Holder("worker", rank)))


def honest_can_push(honest: Client, seq: int) -> bool:
    honest.say(push(seq, worker=0), ONES)
    applied, _ = honest.hear(Applied)
    return applied.id.seq == seq


def test_a_peer_with_another_name_than_its_certificate_is_cut_off_and_changes_nothing(keys: Path) -> None:
    with serving(keys) as servers, member(seen_by(servers, keys, 0), 0) as honest:
        serve_table(honest)
        for hello, say in (
            (Hello("worker", 0, 0, 1, 5), push(7, worker=0)),
            (Hello("worker", 2, 0, 1), Join(Sender(1, 2, 0))),
            (Hello("server", 0, 0, 1), Closed(1, "w", 0, ())),
            (Hello("reader", 0, 0, 1), push(7, worker=0)),
            (Hello("reader", 1, 0, 1), Join(Sender(1, 1, 0))),
        ):
            with client(seen_by(servers, keys, 1), hello) as rogue:
                rogue.say(say, ONES)
                assert rogue.is_cut_off()
        assert honest_can_push(honest, 0)
        assert servers.values("w").tolist() == [1.0] * NUMEL


def test_a_worker_does_not_trust_another_server_than_the_one_it_called(keys: Path) -> None:
    """A worker that was taken over listens where a server should."""
    for impostor in (Holder("worker", 2), Holder("server", 1)):
        with closing(carrier(keys, impostor).listen("127.0.0.1:0")) as listener:
            settings = WorkerSettings(Sender(1, 0, 0), 1, retry_s=RETRY_S)
            node = WorkerNode(settings, carrier(keys, Holder("worker", 0)), (listener.address,), WorkerOptions(5.0))
            try:
                with pytest.raises(AuthenticationFailed, match=f"server 0, but its certificate is for {impostor}"):
                    node.join()
            finally:
                node.close()


def test_a_revoked_worker_is_out_within_a_second_and_the_others_go_on(keys: Path, tmp_path: Path) -> None:
    path = tmp_path / "revoked"
    with (
        serving(keys) as servers,
        watching_revoked(path, servers.servers[0].expel),
        member(seen_by(servers, keys, 0), 0) as honest,
        member(seen_by(servers, keys, 1), 1) as revoked,
    ):
        honest.say(Declare(1, table("w", NUMEL, "bsp")))
        honest.hear(RequestDone)
        honest.say(Initialise(2, "w"), as_body(torch.zeros(NUMEL)))
        honest.hear(RequestDone)
        honest.say(push(0, worker=0), ONES)
        honest.say(Clock(Sender(1, 0, 0), 1))  # which waits for worker 1
        path.write_text("worker-1\n")
        assert POLL_S < 1.0, "all else takes as long as the machine does"
        assert revoked.is_cut_off()
        honest.hear(Applied)


def test_a_revoked_worker_is_out_while_the_server_is_busy(keys: Path) -> None:
    with serving(keys) as servers, member(seen_by(servers, keys, 1), 1) as revoked:
        busy, is_over = threading.Event(), threading.Event()
        servers.servers[0].do(lambda _: (busy.set(), is_over.wait(JOIN_S)))
        try:
            assert busy.wait(JOIN_S)
            servers.servers[0].expel(frozenset({"worker-1"}))
            assert revoked.is_cut_off()
        finally:
            is_over.set()


def test_a_certificate_that_is_revoked_between_its_handshake_and_its_first_word_lets_nothing_in(
    keys: Path, tmp_path: Path
) -> None:
    with serving(keys) as servers, member(seen_by(servers, keys, 0), 0) as honest:
        serve_table(honest)
        servers.servers[0].expel(frozenset({"worker-1"}))
        honest_can_push(honest, 0)  # so the order to expel was carried out before
        with client(seen_by(servers, keys, 1), Hello("worker", 1, 0, 1)) as late:  # no file says so to its handshake
            assert late.is_cut_off()
        servers.servers[0].expel(frozenset())
        honest_can_push(honest, 1)
        with member(seen_by(servers, keys, 1), 1, 2):
            assert honest_can_push(honest, 2)


# -- how large a body may be -------------------------------------------------------------------------------------------

MANY = 1 << 18  # floats: a mebibyte


def frame_of(name: str) -> PushFrame:
    return PushFrame(Push(PushId(1, 1, 0, 0), name, 0, 0), 1.0, (), ())


def step_of(*names: str, size: int) -> StepFrame:
    return StepFrame(tuple(map(frame_of, names)), 1, (), (size,) * len(names))


def test_a_body_has_the_size_that_its_table_gives_it(tmp_path: Path) -> None:
    with cluster("memory", tmp_path, num_servers=1) as servers, member(servers, 1) as worker:
        worker.say(Declare(1, table("w", MANY, "asynchronous")))
        worker.hear(RequestDone)
        node = servers.servers[0]
        body_limits = BodyLimits(node._tables.get, ReceiveBuffers())
        size = MANY * 4

        assert body_limits.place(encode(frame_of("w")), size) is not None
        assert body_limits.place(encode(step_of("w", size=size)), size) is not None
        assert body_limits.place(encode(Initialise(2, "w")), size) is None
        assert body_limits.place(encode(LoadState(3, "w")), 3 * size) is None
        keys = Keys(MANY, b"", sent=True)
        assert body_limits.place(encode(RowPullFrame(Pull(Sender(1, 1, 0), 1, "r", 0, 0), keys)), MANY * 8) is None

        for message, size_bytes in (
            (frame_of("w"), size - 4),
            (frame_of("w"), size + 4),
            (frame_of("nope"), size),
            (step_of("w", size=size + 4), size + 4),
            (step_of("nope", size=size), size),
            (step_of("w", "w", size=size), 2 * size),
            (Initialise(2, "w"), size * 2),
            (LoadState(3, "w"), size * 1000),
            (Barrier(4, "here"), SMALL_BYTES + 1),
            (RowPushFrame(frame_of("nope").push, 1.0, (), keys), 1 << 30),
            (RowPullFrame(Pull(Sender(1, 1, 0), 1, "r", 0, 0), Keys(-1, b"", sent=True)), 1 << 20),
            (Hello("worker", 0, 0, 1), 1 << 20),
        ):
            with pytest.raises(PeerError, match=f"came with {size_bytes} bytes, expected"):
                body_limits.place(encode(message), size_bytes)


def test_an_announced_body_that_cannot_be_right_ends_the_connection_before_it_comes(tmp_path: Path) -> None:
    with cluster("tcp", tmp_path, num_servers=1) as servers, member(servers, 0) as honest:
        serve_table(honest)
        with client(servers, WORKER) as rogue:
            header = encode(frame_of("w"))
            channel = rogue.connection._channel  # type: ignore[attr-defined]
            channel._socket.sendall(encode_prefix(Prefix(Kind.INLINE, len(header), 1 << 33)) + header)
            assert rogue.is_cut_off()
        assert honest_can_push(honest, 0)
