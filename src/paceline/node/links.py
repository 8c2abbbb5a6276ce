"""A worker's connection to one server, made again whenever it breaks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from paceline.errors import AuthenticationFailed, DeadlineExceeded, PeerError
from paceline.node.post import Post
from paceline.node.roles import check_server
from paceline.node.wire import Hello, encode
from paceline.stopwatch import Stopwatch
from paceline.transport.base import EMPTY, Frame, Place, Transport

_POLL_S = 0.5
_FIRST_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 1.0
_JOIN_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Link:
    """Sends to a server, and hands over what comes from it on a thread of its own.

    Args:
        server: its rank, which its certificate has to name where there is one.
        hello: who connects; the count of its connections is filled in here.
        on_frame: called with each frame, on the reader thread.
        place: asked where bodies go that the carrier copies, on the reader thread.
        on_reconnected: called when the connection was made again, on the reader thread, with what lets `send` use it.
            It has to call that, and to repeat what is unanswered before others may send: else they overtake it.
        on_lost: called with the reason when nothing will come from the server any more.
    """

    server: int
    address: str
    hello: Hello
    transport: Transport
    patience_s: float
    on_frame: Callable[[Frame], None]
    place: Place
    on_reconnected: Callable[[Callable[[], None]], None]
    on_lost: Callable[[str], None]
    _post: Post = field(init=False)
    _closing: threading.Event = field(default_factory=threading.Event)
    _reader: threading.Thread = field(init=False)

    def open(self, timeout_s: float) -> None:
        """Connect, and start to read. Blocks until connected; raises as `Transport.connect` does."""
        self._post = self._connect(timeout_s)
        self._reader = threading.Thread(target=self._read, name=f"paceline-link-{self.address}", daemon=True)
        self._reader.start()

    def send(self, header: bytes, body: memoryview = EMPTY, *, urgent: bool = False) -> None:
        """Send one frame, also while others are on their way to other servers; see `Post`.

        If the connection is broken it is lost, and repeated when there is a new connection. Until it is answered, the
        body must stay as it is.
        """
        self._post.send(header, body, urgent=urgent)

    def close(self) -> None:
        """End the connection and its thread."""
        self._closing.set()
        self._post.close()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout=_JOIN_TIMEOUT_S)

    def _connect(self, timeout_s: float) -> Post:
        connection = self.transport.connect(self.address, encode(self.hello), timeout_s=timeout_s)
        check_server(connection, self.server)
        self.hello = replace(self.hello, connection=self.hello.connection + 1)
        return Post(connection, self.transport.maps_memory, connection.close)

    def _read(self) -> None:
        """Hand over frames until closed or lost, and say so whatever the reason."""
        problem = "its reader thread failed; the traceback is on stderr"
        try:
            problem = self._read_on()
        finally:
            self._post.close()
            if not self._closing.is_set():
                self.on_lost(f"the connection to {self.address} is lost: {problem}")

    def _read_on(self) -> str:
        """Hand over frames until closed or lost; return why it is over."""
        problem = ""
        while not self._closing.is_set():
            try:
                self.on_frame(self._post.connection.receive(timeout_s=_POLL_S, place=self.place))
            except DeadlineExceeded:
                continue
            except PeerError as error:
                made = self._reconnect(str(error))
                if isinstance(made, str):
                    problem = made
                    break
                self.on_reconnected(partial(self._use, made))
        return problem

    def _use(self, post: Post) -> None:
        self._post = post
        if self._closing.is_set():  # `close` has closed the one before
            post.close()

    def _reconnect(self, problem: str) -> Post | str:
        """Try until connected or out of patience; return the new connection, or why there is none."""
        self._post.close()
        watch, pause_s = Stopwatch(_LONGEST_PAUSE_S + _POLL_S), _FIRST_PAUSE_S
        while watch.look() < self.patience_s and not self._closing.wait(pause_s):
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
            try:
                return self._connect(_POLL_S)
            except AuthenticationFailed as error:
                return str(error)
            except PeerError as error:
                problem = str(error)
        return f"it did not come back within {self.patience_s:g} s ({problem})"
