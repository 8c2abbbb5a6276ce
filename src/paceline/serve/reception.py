"""Where all clients of a server of its own come in: each is told which worker it is, and led to its namespace."""

from __future__ import annotations

import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from paceline.errors import DeadlineExceeded, PacelineError, PeerError
from paceline.node.mishaps import story
from paceline.serve.guest import Guest
from paceline.serve.messages import Admitted, Ask, TurnedAway, Visit, decode_said, decode_visit, encode

if TYPE_CHECKING:
    from paceline.serve.namespaces import Namespaces
    from paceline.transport.base import Connection, Listener, Papers

TICK_S: Final = 0.25
# Who asks has its question ready, and takes the answer at once.
_QUESTION_TIMEOUT_S: Final = 5.0
_MAX_VISITS: Final = 8  # answered at once; others wait in line


@final
class Reception:
    """Receives at one listener, and looks after all namespaces, until it is told to stop."""

    def __init__(self, listener: Listener, namespaces: Namespaces) -> None:
        self._listener = listener
        self._namespaces = namespaces
        self._stopping = threading.Event()

    def run(self) -> list[str]:
        """Receive until `stop`; then save and end all namespaces, and return what could not be saved."""
        look_at = 0.0
        with ThreadPoolExecutor(_MAX_VISITS, thread_name_prefix="paceline-reception") as visits:
            try:
                while not self._stopping.is_set():
                    with suppress(DeadlineExceeded):
                        self._receive(self._listener.accept(timeout_s=TICK_S), visits)
                    if time.monotonic() >= look_at:
                        look_at = time.monotonic() + TICK_S
                        self._namespaces.look_after()
            finally:
                self._listener.close()
                unsaved = self._namespaces.close()
        return unsaved

    def stop(self) -> None:
        """End `run`; for any thread, and for handlers of signals."""
        self._stopping.set()

    def _receive(self, connection: Connection, visits: ThreadPoolExecutor) -> None:
        """Lead a client to where it wants to go; one that does not say so is cut off."""
        try:
            visit = decode_visit(connection.identity)
        except PeerError:
            connection.close()
            return
        if visit.hello:
            self._namespaces.bring(visit.namespace, Guest(connection, visit))
        else:
            visits.submit(self._answer, connection, visit).add_done_callback(_show_fault)

    def _answer(self, connection: Connection, visit: Visit) -> None:
        """Answer one who asks for its place; whoever does not listen has none."""
        try:
            asked = decode_said(connection.receive(timeout_s=_QUESTION_TIMEOUT_S, place=_nowhere).header)
            if isinstance(asked, Ask):
                answer = self._place(visit.namespace, asked, connection.papers)
                connection.send(encode(answer), timeout_s=_QUESTION_TIMEOUT_S)
        except PeerError:
            return
        finally:
            connection.close()

    def _place(self, namespace: str, ask: Ask, papers: Papers) -> Admitted | TurnedAway:
        try:
            return self._namespaces.admit(namespace, ask, _holder_rank(papers))
        except PacelineError as error:
            return TurnedAway(story(error))


def _show_fault(answered: Future[None]) -> None:
    """Write where an error of ours came from, which nobody waits for."""
    error = answered.exception()
    if error is not None:
        traceback.print_exception(error)


def _nowhere(_header: bytes, size_bytes: int) -> None:
    """Take no memory for one who brings more than a question."""
    raise PeerError(f"a question at the reception came with {size_bytes} bytes beside it")


def _holder_rank(papers: Papers) -> int | None:
    """Return which worker a certificate is for, if it is for one."""
    role, _, rank = papers.holder.partition("-")
    return int(rank) if role == "worker" and rank.isascii() and rank.isdigit() else None
