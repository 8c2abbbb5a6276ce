"""What goes wrong with clients of a listener is told in few lines, and never to the peer that it concerns."""

from __future__ import annotations

import re
import time
from contextlib import closing

from tests.transport.carriers import CREDENTIALS
from tests.transport.wire import hello, open_raw, read_to_end

from paceline.errors import DeadlineExceeded
from paceline.transport import TcpTransport
from paceline.transport.rate_limited_log import MAX_LINES, RateLimitedLog


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_ten_lines_a_second_and_cause_then_a_number() -> None:
    told: list[str] = []
    clock = Clock()
    limited_log = RateLimitedLog(told.append, clock)
    for number in range(25):
        limited_log.add("flood", f"flood {number}")
    limited_log.add("rare", "rare 0")
    assert told == [*(f"flood {number}" for number in range(MAX_LINES)), "rare 0"]
    assert limited_log.patience_ms() == 1000

    clock.now_s += 1.0
    limited_log.tell_due()
    assert told[-1] == "... and 15 more (flood)"
    assert limited_log.patience_ms() is None

    limited_log.add("flood", "flood again")
    assert told[-1] == "flood again"


def test_what_was_only_counted_is_told_at_the_end() -> None:
    told: list[str] = []
    limited_log = RateLimitedLog(told.append, Clock())
    for number in range(12):
        limited_log.add("flood", f"{number}")
    limited_log.tell_rest()
    assert told[-1] == "... and 2 more (flood)"


def test_a_flood_of_clients_is_told_in_ten_lines_and_not_to_them() -> None:
    told: list[str] = []
    transport = TcpTransport(CREDENTIALS, notice=told.append)
    with closing(transport.listen("127.0.0.1:0")) as listener:
        began = time.monotonic()
        for _ in range(30):
            with open_raw(listener.address) as client:
                client.sendall(b"GET / HTTP/1.1\r\nHost: secret.example\r\n\r\n" + bytes(40))
                assert read_to_end(client) == b""
        num_spans = 1 + int(time.monotonic() - began)
    lines = [line for line in told if "was turned away" in line]
    counted = [int(found[1]) for line in told if (found := re.match(r"\.\.\. and (\d+) more \(PeerError\)", line))]
    assert len(lines) <= MAX_LINES * (num_spans + 1)
    assert len(lines) + sum(counted) == 30
    assert re.match(r"127\.0\.0\.1:\d+ was turned away: the client is not a Paceline peer", lines[0])


def test_what_was_counted_is_told_when_no_client_comes_any_more() -> None:
    told: list[str] = []
    transport = TcpTransport(CREDENTIALS, notice=told.append)
    with closing(transport.listen("127.0.0.1:0")) as listener:
        for _ in range(MAX_LINES + 1):
            with open_raw(listener.address) as client:
                client.sendall(hello(b"worker 3") + bytes(32))
                read_to_end(client)
        deadline = time.monotonic() + 10
        while not any("more" in line for line in told) and time.monotonic() < deadline:
            without_client(listener)
    assert "... and 1 more (AuthenticationFailed)" in told
    assert "did not prove that it belongs to this job" in told[0]


def test_a_listener_that_cannot_write_goes_on_all_the_same() -> None:
    def broken(text: str) -> None:
        raise BrokenPipeError(text)

    transport = TcpTransport(CREDENTIALS, notice=broken)
    with closing(transport.listen("127.0.0.1:0")) as listener:
        for _ in range(MAX_LINES + 1):
            with open_raw(listener.address) as stranger:
                stranger.sendall(hello(b"worker 3") + bytes(32))
                read_to_end(stranger)
        with (
            closing(transport.connect(listener.address, b"worker 3", timeout_s=30)),
            closing(listener.accept(timeout_s=30)) as server,
        ):
            assert server.identity == b"worker 3"


def without_client(listener: object) -> None:
    """Wait a moment for a client that does not come."""
    try:
        listener.accept(timeout_s=0.1)  # type: ignore[attr-defined]
    except DeadlineExceeded:
        return
