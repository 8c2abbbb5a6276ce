"""The gateway of a standalone server: accepts all clients, assigns ranks, and hands connections to namespaces."""

from __future__ import annotations

import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from paceline.errors import DeadlineExceeded, PacelineError, PeerError
from paceline.serve.handoff import NamespaceConnection
from paceline.serve.messages import EnterAccepted, EnterRefused, EnterRequest, decode_enter_frame, encode
from paceline.serve.namespaces import MAX_NAMESPACES
from paceline.wire.malformed import story

if TYPE_CHECKING:
    from paceline.serve.namespaces import Namespaces
    from paceline.transport.base import Connection, Listener, PeerIdentity

TICK_S: Final = 0.25
_ANSWER_TIMEOUT_S: Final = 5.0  # an answer is small, and a client takes it at once
# Answered at once, others wait in line: an answer waits for its own namespace, which may be read from disk first.
_MAX_ANSWERS: Final = MAX_NAMESPACES


@final
class Gateway:
    """Accepts clients at one listener, and runs due work of all namespaces, until `stop`."""

    def __init__(self, listener: Listener, namespaces: Namespaces) -> None:
        self._listener = listener
        self._namespaces = namespaces
        self._stopping = threading.Event()

    def run(self) -> list[str]:
        """Accept clients until `stop`; then save and end all namespaces, and return what could not be saved."""
        look_at = 0.0
        with ThreadPoolExecutor(_MAX_ANSWERS, thread_name_prefix="paceline-reception") as answers:
            try:
                while not self._stopping.is_set():
                    with suppress(DeadlineExceeded):
                        self._receive(self._listener.accept(timeout_s=TICK_S), answers)
                    if time.monotonic() >= look_at:
                        look_at = time.monotonic() + TICK_S
                        self._namespaces.run_due_work()
            finally:
                self._listener.close()
                unsaved = self._namespaces.close()
        return unsaved

    def stop(self) -> None:
        """End `run`; for any thread, and for handlers of signals."""
        self._stopping.set()

    def _receive(self, connection: Connection, answers: ThreadPoolExecutor) -> None:
        """Answer a client, or hand it over to its namespace; a malformed identity ends the connection."""
        try:
            frame = decode_enter_frame(connection.identity)
        except PeerError:
            connection.close()
            return
        if frame.hello:
            self._namespaces.hand_over(frame.namespace, NamespaceConnection(connection, frame))
        elif frame.ask is not None:
            answering = answers.submit(self._answer, connection, frame.namespace, frame.ask)
            answering.add_done_callback(_show_fault)
        else:
            connection.close()

    def _answer(self, connection: Connection, namespace: str, ask: EnterRequest) -> None:
        """Answer a client that asks for a rank; the rank expires if the answer is not received."""
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
    """Print the traceback of an unexpected error, whose future is never waited for."""
    error = answered.exception()
    if error is not None:
        traceback.print_exception(error)
