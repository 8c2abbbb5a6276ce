"""The page is for those who know its token, on this machine, and a browser that stalls holds up nothing."""

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

import pytest
from tests.leaks import nothing_left_behind
from tests.observe.dashboard.test_feed import step, told, write
from tests.observe.stories import story

from paceline.errors import UsageError
from paceline.observe.dashboard import server as servers
from paceline.observe.dashboard.feed import Feed
from paceline.observe.dashboard.page import read_page
from paceline.observe.dashboard.server import DashboardServer
from paceline.observe.http_server import MAX_CONNECTIONS

MAX_PAGE_BYTES = 100 * 1024
DEADLINE_S = 100.0


@pytest.fixture
def feed(tmp_path: Path) -> Feed:
    write(tmp_path, story())
    made = Feed([tmp_path], ["a"])
    made.publish()
    return made


@pytest.fixture
def server(feed: Feed) -> Generator[DashboardServer]:
    with nothing_left_behind(), DashboardServer(feed) as opened:
        yield opened


def ask(server: DashboardServer, path: str, host: str | None = None, method: str = "GET") -> http.client.HTTPResponse:
    """Return the answer to a request, whose body has been read."""
    port = urlsplit(server.url).port
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
    connection.request(method, path, headers={"Host": host or f"127.0.0.1:{port}"})
    answer = connection.getresponse()
    answer.text = answer.read().decode()  # type: ignore[attr-defined]
    connection.close()
    return answer


@dataclass
class Stream:
    """A page's connection to its stream."""

    connection: socket.socket
    file: BinaryIO

    def close(self) -> None:
        self.file.close()
        self.connection.close()


def open_stream(server: DashboardServer) -> Stream:
    """Ask for the stream of the page, and read nothing of it yet."""
    parts = urlsplit(server.url)
    connection = socket.create_connection(("127.0.0.1", parts.port or 0), timeout=DEADLINE_S)
    connection.sendall(f"GET {parts.path}events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    return Stream(connection, connection.makefile("rb"))


def read_message(stream: Stream) -> bytes:
    """Return the next message of a stream."""
    while not (line := stream.file.readline()).startswith(b"data: "):
        assert line, "the stream has ended"
    return line.removeprefix(b"data: ")


def test_the_page_is_one_text_of_a_hundred_kilobytes_that_loads_nothing(server: DashboardServer) -> None:
    answer = ask(server, urlsplit(server.url).path)
    text: str = answer.text  # type: ignore[attr-defined]
    assert answer.status == 200
    assert len(text.encode()) <= MAX_PAGE_BYTES
    assert not re.findall(r"""(?:src|href)\s*=|@import|url\(|\bimport\(|fetch\(|XMLHttpRequest""", text)
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["Referrer-Policy"] == "no-referrer"


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "//",
        "wrong",
        "*",
        "/events",
        "/wrong/",
        "/wrong/events",
        "/../",
        "/%2e%2e/",
        "/wrong/../../etc/passwd",
        "/?token=",
    ],
)
def test_without_the_token_nothing_is_told(server: DashboardServer, path: str) -> None:
    answer = ask(server, path)
    assert (answer.status, "paceline has written" in answer.text) == (403, True)  # type: ignore[attr-defined]


def test_a_token_that_is_nearly_right_is_wrong(server: DashboardServer) -> None:
    path = urlsplit(server.url).path
    assert ask(server, path[:-2] + "/").status == 403
    assert ask(server, path[:-1] + "x/").status == 403


@pytest.mark.parametrize("rest", ["style.css", "../events", "events/", "..%2fevents", "page/style.css", "//"])
def test_there_are_no_other_paths(server: DashboardServer, rest: str) -> None:
    assert ask(server, urlsplit(server.url).path + rest).status in (403, 404)


@pytest.mark.parametrize("host", ["example.com", "example.com:{port}", "127.0.0.1", "127.0.0.1:1", "[::1]:{port}"])
def test_a_page_of_another_site_cannot_reach_it_by_its_own_name(server: DashboardServer, host: str) -> None:
    path, port = urlsplit(server.url).path, urlsplit(server.url).port
    assert ask(server, path, host.format(port=port)).status == 403
    assert ask(server, path, f"localhost:{port}").status == 200


def test_other_methods_are_not_answered(server: DashboardServer) -> None:
    assert ask(server, urlsplit(server.url).path, method="POST").status == 501


def test_the_stream_tells_all_that_look(server: DashboardServer, feed: Feed, tmp_path: Path) -> None:
    streams = [open_stream(server) for _ in range(3)]
    for stream in streams:
        assert told(read_message(stream))["whole"]
    assert feed.num_looking == 3
    write(tmp_path, [step(0, 50)])
    feed.publish()
    for stream in streams:
        assert not told(read_message(stream))["whole"]
    for stream in streams:
        stream.close()


def test_a_browser_that_stalls_holds_up_nothing(feed: Feed, server: DashboardServer) -> None:
    """Messages of megabytes fill what the kernel keeps for it; the others get theirs."""
    stalled, reading = open_stream(server), open_stream(server)
    read_message(reading)
    wait_until(lambda: feed.num_looking == 2)
    tell_much(feed)
    for _ in range(5):
        feed.publish()
        assert "filling" in told(read_message(reading))
    assert feed.num_looking == 2
    stalled.close()
    reading.close()


def test_a_browser_that_stalls_is_let_go(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers._Request, "timeout", 0.2)
    tell_much(feed)
    with nothing_left_behind(), DashboardServer(feed) as server:
        stalled, seen = open_stream(server), list[int]()
        wait_until(lambda: seen.append(feed.num_looking) or (1 in seen and not feed.num_looking))
        stalled.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s, never = time.monotonic() + DEADLINE_S, threading.Event()
    while not condition():
        assert time.monotonic() < deadline_s
        never.wait(0.01)


def tell_much(feed: Feed) -> None:
    """Let messages be larger than what the kernel takes for a connection."""
    content = json.dumps({"filling": "x" * (8 << 20)}).encode()
    feed._message = lambda *, whole: content


def test_no_more_connections_than_there_is_room_for(feed: Feed) -> None:
    with nothing_left_behind(), DashboardServer(feed) as server:
        streams = [open_stream(server) for _ in range(MAX_CONNECTIONS)]
        for stream in streams:
            read_message(stream)
        refused = open_stream(server)
        assert refused.connection.recv(1) == b""
        for stream in (refused, *streams):
            stream.close()


def test_connections_that_say_nothing_keep_no_browser_out(server: DashboardServer) -> None:
    parts = urlsplit(server.url)
    silent = [socket.create_connection(("127.0.0.1", parts.port or 0)) for _ in range(MAX_CONNECTIONS)]
    assert ask(server, parts.path).status == 200
    for connection in silent:
        connection.close()


def test_what_was_told_last_arrives_though_it_ends(feed: Feed, tmp_path: Path) -> None:
    with nothing_left_behind():
        with DashboardServer(feed) as server:
            stream = open_stream(server)
            read_message(stream)
            write(tmp_path, [step(0, 50)])
            feed.publish()
        assert told(read_message(stream))["runs"][0]["times"]["from"] > 0
        assert stream.file.read() == b"\n"
        stream.close()


def test_a_port_that_is_taken_is_said(feed: Feed, server: DashboardServer) -> None:
    port = urlsplit(server.url).port or 0
    with pytest.raises(UsageError, match=rf"cannot listen on 127.0.0.1:{port}: .*; name another --port"):
        DashboardServer(feed, port)


def test_the_licence_of_the_charts_is_with_them() -> None:
    page = Path(servers.__file__).with_name("page")
    assert "MIT" in (page / "uPlot.LICENSE").read_text()
    assert read_page().content.count(b"uPlot") > 1
