"""A port at which another program answers, or one with TLS where the other has none: the message says which."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from paceline.errors import DeadlineExceeded, PeerError
from paceline.job.credentials.holders import Holder, tls_settings
from paceline.job.credentials.key_store import make_keys
from paceline.transport import Credentials, TcpTransport

CREDENTIALS = Credentials(bytes(range(32)), "others")
HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n"
ANSWERS = {
    "web": (HTTP, r"a web server \(HTTP\): check the address"),
    "web that says much": (HTTP + bytes(2000), r"a web server \(HTTP\)"),
    "ssh": (b"SSH-2.0-OpenSSH_9.6p1\r\n", "an SSH server"),
    "mail": (b"220 mail ESMTP\r\n", "a mail or FTP server"),
    "nothing": (b"", "closed the connection"),
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys") / "made"
    make_keys(folder)
    return folder


@contextmanager
def program(answer: bytes) -> Iterator[str]:
    """A program that reads what is said first, answers and hangs up; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(("answer", "said"), ANSWERS.values(), ids=ANSWERS)
def test_what_another_program_is_is_told(answer: bytes, said: str, encrypted: bool, keys: Path) -> None:
    transport = TcpTransport(CREDENTIALS, tls=tls_settings(keys, Holder("any")) if encrypted else None)
    with program(answer) as address, pytest.raises(PeerError, match=rf"{address} .*{said}"):
        transport.connect(address, b"worker 0", timeout_s=30)


def test_a_program_that_takes_connections_and_says_nothing_is_given_up(keys: Path) -> None:
    for tls in (None, tls_settings(keys, Holder("any"))):
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
            with pytest.raises(DeadlineExceeded, match=rf"waited 0\.1 s .* with {address}: it took .* \(MTU\)"):
                TcpTransport(CREDENTIALS, tls=tls).connect(address, b"worker 0", timeout_s=0.1)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "tls"])
def test_tls_at_one_end_alone_is_told_at_both(encrypted: bool, keys: Path) -> None:
    told: list[str] = []
    has_told = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        has_told.set()

    with_tls, without = tls_settings(keys, Holder("any")), None
    here, there = (with_tls, without) if encrypted else (without, with_tls)
    with closing(TcpTransport(CREDENTIALS, tls=here, notice=tell).listen("127.0.0.1:0")) as listener:
        with pytest.raises(PeerError, match="it may run without TLS" if there else "it may .* want TLS"):
            TcpTransport(CREDENTIALS, tls=there).connect(listener.address, b"worker 0", timeout_s=30)
        assert has_told.wait(120)
    expected = "the client does not speak TLS, as this server does" if encrypted else "but one that speaks TLS"
    assert expected in told[0]
