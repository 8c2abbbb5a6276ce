"""Serves the page over the loopback, to browsers that know its token."""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any, Final, cast, final

from paceline.errors import UsageError
from paceline.observe.dashboard.page import Page, read_page
from paceline.observe.http_server import REQUEST_TIMEOUT_S, BoundedHttpServer

if TYPE_CHECKING:
    from types import TracebackType

    from paceline.observe.dashboard.feed import Feed

LOOPBACK: Final = "127.0.0.1"
END_PATIENCE_S: Final = 1.0  # for pages to take what was told last
KEEP_ALIVE_S: Final = 15.0  # between two pieces of a stream, so that one whose page is gone ends
_NAMES: Final = ("127.0.0.1", "localhost")  # a page of another site reaches us under its own name only
_SEND_BYTES: Final = 1 << 16  # that wait in the kernel for a page that is slow


@final
class DashboardServer:
    """A page, and a stream of what the feed says, at `url`.

    Each request has to have the token in its path, and this address as its host. A page that does not take what it is
    sent loses its connection after 10 s, and holds up nothing meanwhile.

        with DashboardServer(feed) as server:
            print(server.url)
            while wanted:
                feed.publish()
    """

    def __init__(self, feed: Feed, port: int = 0) -> None:
        """Listen on a port of the loopback, 0 for any that is free; raises UsageError if it is taken."""
        self._feed = feed
        token = secrets.token_urlsafe(24)
        try:
            self._http = _Server((LOOPBACK, port), feed, read_page(), token)
        except OSError as error:
            raise UsageError(f"cannot listen on {LOOPBACK}:{port}: {error.strerror}; name another --port") from error
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="paceline-dashboard", daemon=True
        )
        self._thread.start()
        self.url = f"http://{LOOPBACK}:{self._http.server_port}/{token}/"

    def __enter__(self) -> DashboardServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all connections and threads. Idempotent."""
        self._feed.close()
        self._http.shutdown()
        self._thread.join()
        self._http.close_all()


class _Server(BoundedHttpServer):
    """Threads of requests, which all end with it."""

    daemon_threads = False  # `server_close` joins those that are none
    block_on_close = True

    def __init__(self, address: tuple[str, int], feed: Feed, page: Page, token: str) -> None:
        self.feed, self.page, self.token = feed, page, token
        super().__init__(address, _Request)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the base class has it
        """Bound what waits for a page that is slow."""
        cast("socket.socket", request).setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
        super().process_request(request, client_address)

    def close_all(self) -> None:
        """Let pages take what was told last, end all connections, wait for their threads, and stop to listen."""
        self.end_all(END_PATIENCE_S)
        self.server_close()


class _Request(BaseHTTPRequestHandler):
    """One request: the page, or its stream."""

    timeout = REQUEST_TIMEOUT_S
    server_version = "paceline"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer with the page or its stream, to those who know the token."""
        server = cast("_Server", self.server)
        host = self.headers.get("Host", "")
        if host not in {f"{name}:{server.server_port}" for name in _NAMES}:
            self._refuse(HTTPStatus.FORBIDDEN, "this page is served to this machine only, by its own address")
            return
        token, slash, rest = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "open the whole address that paceline has written")
            return
        server.keep(self.connection)
        if slash and not rest:
            self._send_page(server.page)
        elif rest == "events":
            self._stream(server.feed)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is only the page")

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        content = f"{status.value}: {text}\n".encode()
        self.send_response(status)
        self._send_headers("text/plain; charset=utf-8")
        self.send_header("Content-Length", f"{len(content)}")
        self.end_headers()
        self.wfile.write(content)

    def _send_page(self, page: Page) -> None:
        self.send_response(HTTPStatus.OK)
        self._send_headers("text/html; charset=utf-8")
        self.send_header("Content-Length", f"{len(page.content)}")
        self.send_header("Content-Security-Policy", page.policy)
        self.end_headers()
        self.wfile.write(page.content)

    def _stream(self, feed: Feed) -> None:
        self.send_response(HTTPStatus.OK)
        self._send_headers("text/event-stream")
        self.end_headers()
        feed.note_looking(1)
        try:
            version = 0
            while True:
                version, message = feed.wait_since(version, KEEP_ALIVE_S)
                if feed.is_closed and not message:
                    return
                self.wfile.write(b"data: %b\n\n" % message if message else b":\n\n")
        finally:
            feed.note_looking(-1)

    def _send_headers(self, content_type: str) -> None:
        self.send_header("Content-Type", content_type)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: paths have the token."""
