"""Where all clients of a server of its own come in: each is told which worker it is, and led to its namespace."""

from __future__ import annotations

import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from paceline.errors import DeadlineExceeded, PacelineError, PeerError
from paceline.serve.handoff import PendingHandshake
from paceline.serve.messages import EnterAccepted, EnterRefused, EnterRequest, decode_visit, encode
from paceline.serve.namespaces import MAX_NAMESPACES
from paceline.wire.malformed import story

if TYPE_CHECKING:
    from paceline.serve.namespaces import Namespaces
    from paceline.transport.base import Connection, Listener, PeerIdentity

TICK_S: Final = 0.25
_ANSWER_TIMEOUT_S: Final = 5.0  # an answer is small, and a client takes it at once
# Answered at once, others wait in line: an answer waits for its own namespace, which may be read from disk first.
_MAX_VISITS: Final = MAX_NAMESPACES


@final
class Gateway:
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
            self._namespaces.bring(visit.namespace, PendingHandshake(connection, visit))
        elif visit.ask is not None:
            answering = visits.submit(self._answer, connection, visit.namespace, visit.ask)
            answering.add_done_callback(_show_fault)
        else:
            connection.close()

    def _answer(self, connection: Connection, namespace: str, ask: EnterRequest) -> None:
        """Answer a client that asks which worker it is; one that does not take the answer is none."""
        try:
            answer = self._place(namespace, ask, connection.peer_identity)
            connection.send(encode(answer), timeout_s=_ANSWER_TIMEOUT_S)
        except PeerError:
            return
        finally:
            connection.close()

    def _place(self, namespace: str, ask: EnterRequest, peer_identity: PeerIdentity) -> EnterAccepted | EnterRefused:
        try:
            return self._namespaces.admit(namespace, ask, peer_identity)
        except PacelineError as error:
            return EnterRefused(story(error))


def _show_fault(answered: Future[None]) -> None:
    """Write where an error of ours came from, which nobody waits for."""
    error = answered.exception()
    if error is not None:
        traceback.print_exception(error)
