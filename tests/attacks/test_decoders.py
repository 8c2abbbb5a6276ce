"""Whatever bytes come, from a peer or from a file, a decoder reads them or says in our words why not, at once."""

from __future__ import annotations

import hashlib
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.attacks.malformed import seeds
from tests.data.service.test_messages import MESSAGES as FED
from tests.transport.carriers import CREDENTIALS
from tests.transport.wire import hello

from paceline.data.service.messages import decode as decode_for_feeding
from paceline.data.service.messages import encode as encode_for_feeding
from paceline.data.sources.declared import decode_recipe
from paceline.errors import CheckpointError, PacelineError, PeerError, UsageError
from paceline.job.spec import ClusterSpec
from paceline.launch.rendezvous.liveness_lock import process_info
from paceline.launch.rendezvous.store import Invitation
from paceline.observe.runs import decode_lines
from paceline.serve.messages import EnterFrame, decode_answer, decode_enter_frame
from paceline.serve.messages import encode as encode_words
from paceline.snapshots.folder import MANIFEST, MANIFEST_DIGEST, Snapshot, SnapshotManifest
from paceline.transport import Frame, Limits, TcpTransport, TlsSettings
from paceline.transport.channel import OutOfTime, SocketChannel
from paceline.transport.deadline import Deadline
from paceline.transport.frames import Kind, Prefix, encode_prefix
from paceline.transport.handshake import HandshakeResult, TokenHandshake
from paceline.transport.payloads import InlinePayloads
from paceline.transport.peer_identity import read_revoked
from paceline.transport.poller import receive_all
from paceline.transport.stream import StreamConnection
from paceline.update.table import decode_table, encode_table
from paceline.wire.messages import decode, encode

MOST_BYTES = 64 << 10
MOST_S = 0.5  # of processor time: ten times what it may take
MOST_TAKEN_BYTES = 16 << 20
IN_A_FOLDER = settings(max_examples=40)

VALID = [encode(message) for message, _ in seeds()]
TABLE = encode_table(next(message.spec for message, _ in seeds() if type(message).__name__ == "Declare"))
SPEC = (
    b'{"job":"j","num_workers":1,"num_servers":1,"transport":"tcp","run_dir":"/tmp","addresses":["tcp://127.0.0.1:1"]}'
)
LARGE = st.integers(0, MOST_BYTES).map(lambda size: bytes(range(256)) * (size // 256))


@st.composite
def changed(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """Return bytes that begin as something valid: with bits flipped, parts cut out, repeated or put in."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        if draw(st.booleans()) and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        else:
            data[at : at + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(data)


def any_bytes(*originals: bytes) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=300) | LARGE | changed(list(originals))


@contextmanager
def within_bounds() -> Iterator[None]:
    """Check that what happens takes neither long nor much memory."""
    began_s = time.thread_time()
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_TAKEN_BYTES
    finally:
        tracemalloc.stop()
    assert time.thread_time() - began_s < MOST_S


def is_read_or_refused(read: Callable[[], object], refusal: type[PacelineError]) -> object:
    """Read; return what was read, or None where it was refused in our own words."""
    with within_bounds():
        try:
            return read()
        except refusal:
            return None


@given(any_bytes(*VALID))
@settings(deadline=None, max_examples=200)
def test_messages(data: bytes) -> None:
    message = is_read_or_refused(lambda: decode(data), PeerError)
    assert message is None or type(decode(encode(message))) is type(message)


@given(any_bytes(*map(encode_for_feeding, FED)))
@settings(deadline=None, max_examples=100)
def test_what_workers_and_data_servers_say(data: bytes) -> None:
    message = is_read_or_refused(lambda: decode_for_feeding(data), PeerError)
    assert message is None or decode_for_feeding(encode_for_feeding(message)) == message  # type: ignore[arg-type]
    is_read_or_refused(lambda: decode_recipe(data), PeerError)


@given(any_bytes(TABLE))
@settings(deadline=None)
def test_tables(data: bytes) -> None:
    is_read_or_refused(lambda: decode_table(data), PeerError)


@given(any_bytes(SPEC))
@IN_A_FOLDER
def test_cluster_specs(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "spec.json").write_bytes(data)
    is_read_or_refused(lambda: ClusterSpec.read(tmp_path / "spec.json"), UsageError)


@given(any_bytes(b'{"run_dir":"/tmp/run","machine":{"name":"a","boot":"b"},"version":"1"}'))
@IN_A_FOLDER
def test_what_processes_of_a_job_tell_each_other_in_files(tmp_path: Path, data: bytes) -> None:
    is_read_or_refused(lambda: Invitation.read(data, "the store"), UsageError)
    (tmp_path / "worker-3.life").write_bytes(data)
    is_read_or_refused(lambda: process_info(tmp_path, "worker", 3), UsageError)


@given(any_bytes(encode_words(EnterFrame("mnist"))))
@settings(deadline=None)
def test_what_clients_of_a_server_of_its_own_say(data: bytes) -> None:
    is_read_or_refused(lambda: decode_enter_frame(data), PeerError)
    is_read_or_refused(lambda: decode_answer(data), PeerError)


@given(any_bytes(msgspec.json.encode(SnapshotManifest(3, 1, 2, 1, (), ()))))
@IN_A_FOLDER
def test_manifests_of_snapshots(tmp_path: Path, data: bytes) -> None:
    (tmp_path / MANIFEST).write_bytes(data)
    (tmp_path / MANIFEST_DIGEST).write_text(hashlib.sha256(data).hexdigest())
    is_read_or_refused(lambda: Snapshot.read(tmp_path), CheckpointError)


@given(any_bytes(b'{"kind":"applied","t":1.0,"server":0,"table":"w","workers":[0],"clock":1}\n'))
@IN_A_FOLDER
def test_traces(tmp_path: Path, data: bytes) -> None:
    is_read_or_refused(lambda: decode_lines(data, tmp_path), UsageError)


@given(any_bytes(b"worker-3\n0A1B\n"))
@IN_A_FOLDER
def test_lists_of_revoked_names(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "revoked").write_bytes(data)
    is_read_or_refused(lambda: read_revoked(tmp_path / "revoked"), UsageError)


@given(any_bytes(b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"), st.sampled_from(range(3)))
@IN_A_FOLDER
def test_files_of_tls(tmp_path: Path, data: bytes, place: int) -> None:
    paths = [tmp_path / name for name in ("own.pem", "own.key", "authority.pem")]
    for path in paths:
        path.write_bytes(data if path is paths[place] else b"")
    assert is_read_or_refused(lambda: TcpTransport(CREDENTIALS, tls=TlsSettings(*paths)), UsageError) is None


@given(st.text(max_size=60) | st.from_regex(r"(tcp://)?\[?[0-9a-f:.%]{0,20}\]?:[0-9]{0,7}", fullmatch=True))
@settings(deadline=None, max_examples=100)
def test_addresses(address: str) -> None:
    def listen() -> None:
        TcpTransport(CREDENTIALS).listen(address).close()

    is_read_or_refused(listen, UsageError)


# -- streams ---------------------------------------------------------------------------------------------------------


@contextmanager
def stream_of(data: bytes) -> Iterator[SocketChannel]:
    """Yield a channel over which these bytes come, and then the end."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    theirs.send(data)  # they fit into the buffer of the kernel
    theirs.close()
    channel = SocketChannel(ours)
    try:
        yield channel
    finally:
        channel.close()


FRAME = encode_prefix(Prefix(Kind.INLINE, 9, 20)) + b"a header." + bytes(20)


@given(any_bytes(FRAME, FRAME * 9))
@settings(deadline=None, max_examples=100)
def test_frames(data: bytes) -> None:
    with stream_of(data) as channel:
        connection = StreamConnection(HandshakeResult(channel, b""), "peer", Limits(), InlinePayloads())

        def read_all() -> None:
            while True:
                assert len(connection.receive(timeout_s=1).body) <= len(data)

        is_read_or_refused(read_all, PeerError)
        connection.close()


def frames_of(data: bytes, read: Callable[[StreamConnection], list[Frame]]) -> list[tuple[bytes, bytes]]:
    """Read a stream to its end, or to where it is refused."""
    frames: list[tuple[bytes, bytes]] = []
    with stream_of(data) as channel:
        connection = StreamConnection(HandshakeResult(channel, b""), "peer", Limits(), InlinePayloads())

        def read_all() -> None:
            while True:
                frames.extend((frame.header, bytes(frame.body)) for frame in read(connection))

        is_read_or_refused(read_all, PeerError)
        connection.close()
    return frames


@given(any_bytes(FRAME, FRAME * 9, FRAME * 100))
@settings(deadline=None, max_examples=60)
def test_frames_read_together_are_those_read_one_by_one(data: bytes) -> None:
    one_by_one = frames_of(data, lambda connection: [connection.receive(timeout_s=1)])
    assert frames_of(data, lambda connection: receive_all(connection, timeout_s=1)) == one_by_one


@given(any_bytes(hello(b"worker 3") + bytes(32)))
@settings(deadline=None)
def test_handshakes(data: bytes) -> None:
    with stream_of(data) as channel, within_bounds(), pytest.raises((PeerError, EOFError, OSError, OutOfTime)):
        TokenHandshake(CREDENTIALS).answer(channel, Deadline.after(1))
