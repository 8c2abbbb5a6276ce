"""A client that does not belong to the job gets a closed connection at once, no word, and changes nothing."""

from __future__ import annotations

import hmac
import os
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.attacks.certificates import Certificates
from tests.attacks.target import Target, target
from tests.nodes.client import client, member
from tests.transport.carriers import CREDENTIALS
from tests.transport.wire import GREETING_BYTES, NONCE, hello, open_raw, proof, read_exactly, read_to_end, shake_hands

from paceline.errors import AuthenticationFailed, PeerError
from paceline.job.credentials.holders import Holder
from paceline.transport import Credentials, Limits, TcpTransport, TlsSettings
from paceline.transport.frames import WIRE_VERSION
from paceline.transport.handshake import REFUSAL
from paceline.wire.messages import Hello, encode

IDENTITY = encode(Hello("worker", 1, 0, 1))
ZERO, DAY, YEAR = timedelta(0), timedelta(days=1), timedelta(days=365)
PATIENT = Limits(handshake_timeout_s=300.0)  # no attacker waits so long: to be refused at this deadline is too late

# Attacks a server at an address, and returns all that it has heard once it is turned away.
Attack = Callable[[str], bytes]


def is_refused_without_a_trace(attack: Attack, victim: Target, most_heard: int = GREETING_BYTES) -> None:
    before = victim.picture()
    heard = attack(victim.address)
    assert len(heard.removesuffix(REFUSAL)) <= most_heard, heard
    assert victim.picture() == before
    assert victim.read() == bytes(16)


# -- a server whose line is plain ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain() -> Iterator[Target]:
    with target(limits=PATIENT) as victim:
        yield victim


def say(address: str, *words: bytes) -> bytes:
    """Connect, say all that, and hear what comes until the other side closes."""
    with open_raw(address) as sock:
        with suppress(OSError):  # it may be closed before all is said
            for word in words:
                sock.sendall(word)
        return read_to_end(sock)


def answer_with(address: str, make_proof: Callable[[bytes], bytes], identity: bytes = IDENTITY) -> bytes:
    """Play a client up to its proof, which is made from the server's nonce."""
    with open_raw(address) as sock:
        sock.sendall(hello(identity))
        greeting = read_exactly(sock, GREETING_BYTES)
        sock.sendall(make_proof(greeting[-32:]))
        return greeting + read_to_end(sock)


def proof_by(token: bytes, job: str = CREDENTIALS.job) -> Callable[[bytes], bytes]:
    """Return how a holder of some token proves it."""

    def prove(nonce: bytes) -> bytes:
        parts = (b"client", struct.pack(">H", 1), job.encode(), b"", IDENTITY, NONCE, nonce)
        said = b"".join(struct.pack(">I", len(part)) + part for part in parts)
        return hmac.new(token, said, "sha256").digest()

    return prove


def replay(address: str) -> bytes:
    """Say again, word for word, what an honest worker has said."""
    with open_raw(address) as honest:
        honest.sendall(hello(IDENTITY))
        nonce = read_exactly(honest, GREETING_BYTES)[-32:]
        recorded = proof(b"client", IDENTITY, NONCE, nonce)
        honest.sendall(recorded)
        read_exactly(honest, 32)
    return say(address, hello(IDENTITY) + recorded)


def reflect(address: str) -> bytes:
    """Return every word of the server to it, as a mirror."""
    with open_raw(address) as sock:
        sock.sendall(hello(IDENTITY))
        heard = b""
        with suppress(OSError):
            while word := sock.recv(4096):
                heard += word
                sock.sendall(word)
        return heard


def relay_to_itself(address: str) -> bytes:
    """Have the server prove itself to itself: its nonce of one connection is the client's of another."""
    with open_raw(address) as first, open_raw(address) as second:
        first.sendall(hello(IDENTITY))
        nonce = read_exactly(first, GREETING_BYTES)[-32:]
        second.sendall(hello(IDENTITY, nonce=nonce))
        first.sendall(read_exactly(second, GREETING_BYTES)[-32:])
        return read_to_end(first)


def speak_tls(address: str) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with open_raw(address) as sock, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(sock)
    return b""


PLAIN_ATTACKS: dict[str, Attack] = {
    "another protocol": lambda address: say(address, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64)),
    "noise": lambda address: say(address, os.urandom(5000)),
    "no token": lambda address: answer_with(address, lambda _: bytes(32)),
    "a wrong token": lambda address: answer_with(address, proof_by(bytes(32))),
    "the token of another job": lambda address: answer_with(address, proof_by(CREDENTIALS.token, "another job")),
    "a proof for another server": lambda address: answer_with(
        address, proof_by(CREDENTIALS.token), encode(Hello("server", 0, 0, 1))
    ),
    "a replayed handshake": replay,
    "a reflected handshake": reflect,
    "a server that is to prove itself to itself": relay_to_itself,
    "an older version": lambda address: say(address, hello(IDENTITY, version=0) + bytes(32)),
    "an identity that is too long": lambda address: say(address, hello(b"x" * 2000)),
    "an identity of 64 KiB that does not come": lambda address: say(address, hello()[:6] + b"\xff\xff" + bytes(32)),
    "frames before a proof": lambda address: say(address, hello(IDENTITY), b"PCLN" * 100),
    "TLS where there is none": speak_tls,
}


@pytest.mark.parametrize("attack", PLAIN_ATTACKS.values(), ids=PLAIN_ATTACKS)
def test_a_stranger_is_turned_away(attack: Attack, plain: Target) -> None:
    is_refused_without_a_trace(attack, plain)


@pytest.mark.parametrize("part", ["header", "body"])
def test_a_frame_that_is_too_large_ends_the_connection_before_it_has_come(part: str, plain: Target) -> None:
    limits = Limits()
    sizes = (limits.max_header_bytes + 1, 0) if part == "header" else (1, limits.max_body_bytes + 1)

    def attack(address: str) -> bytes:
        with open_raw(address) as sock:
            shake_hands(sock, IDENTITY)
            sock.sendall(prefix(*sizes))
            return read_to_end(sock)

    is_refused_without_a_trace(attack, plain, most_heard=0)


def prefix(header_bytes: int, body_bytes: int) -> bytes:
    fields = struct.pack("<4sHHIIQQQ20x", b"PCLN", WIRE_VERSION, 0, header_bytes, 0, body_bytes, 0, 0)
    return fields + struct.pack("<I", zlib.crc32(fields))


def test_the_owner_of_a_token_is_told_which_token_was_asked_for(plain: Target) -> None:
    other = TcpTransport(Credentials(os.urandom(32), CREDENTIALS.job))
    with pytest.raises(AuthenticationFailed, match="the token or the job 'contract' is not the one"):
        other.connect(plain.address, IDENTITY, timeout_s=30)


# -- a server whose line is encrypted --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peer_identity(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def member_peer_identity(peer_identity: Certificates) -> TlsSettings:
    return peer_identity.of(Holder("worker", 0))


@pytest.fixture(scope="module")
def encrypted(peer_identity: Certificates, member_peer_identity: TlsSettings) -> Iterator[Target]:
    tls = peer_identity.of(Holder("server", 0))
    with target(tls=tls, client_tls=member_peer_identity, limits=PATIENT) as victim:
        yield victim


def try_to_join(why: str, tls: TlsSettings | None, credentials: Credentials = CREDENTIALS) -> Attack:
    """Return the attack of a whole Paceline that has the wrong certificates; its own user is told why it fails."""

    def attack(address: str) -> bytes:
        with pytest.raises(PeerError, match=why):
            TcpTransport(credentials, tls=tls).connect(address, IDENTITY, timeout_s=30)
        return b""

    return attack


def speak_old_tls(settings: TlsSettings) -> Attack:
    def attack(address: str) -> bytes:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.maximum_version = False, ssl.TLSVersion.TLSv1_2
        context.load_verify_locations(settings.authority)
        context.load_cert_chain(settings.certificate, settings.key)
        with open_raw(address) as sock, pytest.raises(ssl.SSLError, match="VERSION"):
            context.wrap_socket(sock)
        return b""

    return attack


def record_and_replay(settings: TlsSettings) -> Attack:
    """Return an attack that repeats every byte of an honest handshake."""

    def attack(address: str) -> bytes:
        recorded = bytearray()
        with socket.create_server(("127.0.0.1", 0)) as middle:

            def tap() -> None:
                near, _ = middle.accept()
                with near, open_raw(address) as far, suppress(OSError):
                    near.settimeout(30)
                    recorded.extend(word := near.recv(1 << 14))
                    far.sendall(word)
                    near.sendall(far.recv(1 << 14))
                    recorded.extend(near.recv(1 << 14))

            thread = threading.Thread(target=tap)
            thread.start()
            with suppress(PeerError):
                transport = TcpTransport(CREDENTIALS, tls=settings)
                transport.connect(f"127.0.0.1:{middle.getsockname()[1]}", IDENTITY, timeout_s=30).close()
            thread.join(120)
        assert len(recorded) > 1000, "a ClientHello and a certificate"
        say(address, bytes(recorded))
        return b""

    return attack


def wrong_identity(peer_identity: Certificates, member_peer_identity: TlsSettings) -> dict[str, Attack]:
    expired, too_new = peer_identity.of_time("expired", -YEAR, -DAY), peer_identity.of_time("tomorrow", DAY, YEAR)
    return {
        "no TLS": try_to_join("closed the connection during the handshake", None),
        "noise": lambda address: say(address, os.urandom(5000))[:0],
        "a foreign certificate": try_to_join("unknown ca", peer_identity.of_a_stranger()),
        "a certificate of another job": try_to_join(
            "after it had seen our certificate", peer_identity.of_another_job()
        ),
        "an expired certificate": try_to_join("certificate expired.*is the clock", expired),
        "a certificate of tomorrow": try_to_join("bad certificate.*holds from.*is the clock", too_new),
        "a wrong token": try_to_join(
            "the token or the job", member_peer_identity, Credentials(bytes(32), CREDENTIALS.job)
        ),
        "a replayed handshake": record_and_replay(member_peer_identity),
        "TLS 1.2": speak_old_tls(member_peer_identity),
    }


def test_wrong_certificates_are_turned_away(
    peer_identity: Certificates, member_peer_identity: TlsSettings, encrypted: Target
) -> None:
    for name, attack in wrong_identity(peer_identity, member_peer_identity).items():
        try:
            is_refused_without_a_trace(attack, encrypted)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_a_certificate_is_for_its_holder_alone(peer_identity: Certificates, encrypted: Target) -> None:
    before = encrypted.picture()
    own = peer_identity.of(Holder("worker", 1))
    for said in (Hello("worker", 0, 0, 1, 9), Hello("server", 0, 0, 1), Hello("worker", 2, 0, 1)):
        with closing(
            TcpTransport(CREDENTIALS, tls=own).connect(encrypted.address, encode(said), timeout_s=30)
        ) as rogue:
            rogue.send(b"\x02", timeout_s=30)
            with pytest.raises(PeerError):
                rogue.receive(timeout_s=30)
    assert encrypted.picture() == before
    assert encrypted.read() == bytes(16)


# -- crowds ----------------------------------------------------------------------------------------------------------


def test_a_client_that_drips_bytes_is_cut_off_at_its_deadline(plain: Target) -> None:
    with target(limits=Limits(handshake_timeout_s=1.0)) as victim, open_raw(victim.address) as dripping:
        dripping.settimeout(0.05)  # for each byte: to say all of them takes longer than a handshake may
        with suppress(OSError):
            for byte in hello(IDENTITY):
                dripping.sendall(bytes((byte,)))
                with suppress(TimeoutError):
                    if not dripping.recv(1 << 10):
                        break
            else:
                pytest.fail("it was not shown out")
    assert plain.read() == bytes(16)


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_hundred_silent_clients_keep_no_worker_out(
    is_encrypted: bool, plain: Target, encrypted: Target, peer_identity: Certificates
) -> None:
    victim = encrypted if is_encrypted else plain
    servers = victim.servers
    if is_encrypted:
        servers = replace(servers, transport=TcpTransport(CREDENTIALS, tls=peer_identity.of(Holder("worker", 7))))
    with ExitStack() as clients:
        for _ in range(100):
            clients.enter_context(open_raw(victim.address))
        with member(servers, 7):
            assert victim.read() == bytes(16)


def test_a_server_that_is_out_of_threads_turns_clients_away_and_goes_on(
    encrypted: Target, peer_identity: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    transport = TcpTransport(CREDENTIALS, tls=peer_identity.of(Holder("worker", 8)))
    servers = replace(encrypted.servers, transport=transport)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("paceline-read"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with client(servers, Hello("worker", 8, 0, 1)) as turned_away:
            assert turned_away.is_cut_off()
    with member(servers, 8):
        assert encrypted.read() == bytes(16)
