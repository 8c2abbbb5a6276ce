"""The gateway of a standalone server: accepts all clients, and gives each a rank in the namespace that it asks for.

A namespace is opened by its first client, and ends with its last.
"""

from __future__ import annotations

import threading
import time
from contextlib import closing, suppress
from functools import partial
from typing import TYPE_CHECKING, Final, final

from msgspec.structs import replace

from paceline.errors import DeadlineExceeded, PacelineError, PeerError, Refused, UsageError
from paceline.launch.limits import explain
from paceline.serve.access import check_name
from paceline.serve.admission import ClaimedRank
from paceline.serve.answer_lines import AnswerLines
from paceline.serve.messages import (
    EnterAccepted,
    EnterElsewhere,
    EnterRefused,
    EnterRequest,
    NamespaceStanding,
    decode_enter_frame,
    encode,
)
from paceline.serve.namespace import (
    ANSWER_TIMEOUT_S,
    MEMORY_PREFIX,
    Namespace,
    NamespaceConfig,
    NamespaceConnection,
    NamespaceEnded,
    NamespaceMemory,
)
from paceline.serve.replicas import NamespaceReplicas, ServedElsewhere
from paceline.server.readers import ReaderService, is_reader, refuse_reader
from paceline.server.replica_messages import ROLE
from paceline.version import __version__
from paceline.wire.malformed import describe_error
from paceline.wire.messages import Hello, decode

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from paceline.serve.messages import Answer
    from paceline.serve.replicas import Companion, Companions
    from paceline.serve.state import StateFolder
    from paceline.transport.base import Connection, Listener, PeerIdentity, Transport

MAX_NAMESPACES: Final = 64
MOST_WORKERS: Final = 4096  # of a namespace: all are expected, and cost memory and time, from its first client on
# That a client was killed may be known a moment after it has come again.
_TAKEN_PATIENCE_S: Final = 1.0
_END_TIMEOUT_S: Final = 5.0  # for a thread that has nothing left to do
TICK_S: Final = 0.25
_SEND_TIMEOUT_S: Final = 5.0  # an answer is small, and a client takes it at once


@final
class Namespaces:
    """The namespaces that are served, and the folder of those that were.

    With `companions` other servers may serve them, too: each is served by one, and another one has its replica.
    """

    def __init__(
        self, state: StateFolder, transport: Transport, config: NamespaceConfig, companions: Companions | None = None
    ) -> None:
        self._state = state
        self._companions = companions
        self._filled: dict[str, tuple[Companion, ...]] = {}  # namespaces that were given to them, or could not be
        self._transport = transport
        self._config = config
        self._lock = threading.Lock()
        self._open: dict[str, Namespace] = {}
        self._readers: dict[str, ReaderService] = {}  # by namespace; what is published stays when its workers have left
        self._expelled: frozenset[str] = frozenset()
        self._lost: list[str] = []  # what namespaces that have ended could not save
        self._ending = threading.Event()

    def resume(self) -> None:
        """Go on with the namespaces that a process before this one has left in memory."""
        memory = self._config.memory
        names = [] if memory is None else memory.names
        for name in sorted({each.split("/")[1] for each in names if each.startswith(MEMORY_PREFIX)}):
            kept = self._memory_of(name)
            opened = None if kept is None else kept.opened
            if kept is not None and opened is not None:
                with self._lock:
                    self._begin(name, opened.workers, kept)
            elif kept is not None:
                reason = kept.reason or "it had not begun to serve"
                self._config.tell(
                    f"namespace '{name}' goes on from its newest snapshot when it is next asked for: {reason}"
                )
                kept.clear()

    def fill(self, alive: tuple[Companion, ...]) -> bool:
        """Open a namespace that this server alone has and no client uses, until one of the others has it, too.

        Does not block; returns whether there was one. Once for each that lives: some cannot have a replica.
        """
        with self._lock:
            is_busy = any(namespace.fills and not namespace.is_over for namespace in self._open.values())
            idle = [] if is_busy else [name for name in self._state.names() if self._known(name) is None]
        for name in idle:
            replicas = self._replicas_of(name)
            # Without the lock: the folder of views may be of a file server that does not answer.
            is_due = replicas is not None and self._filled.get(name) != alive and replicas.is_alone
            if is_due and self._has_begun_to_fill(name):
                self._filled[name] = alive
                return True
        return is_busy

    def _has_begun_to_fill(self, name: str) -> bool:
        """Open a namespace that no client uses; return whether that was possible, else it is tried again."""
        with self._lock:
            if self._ending.is_set() or self._known(name) is not None:
                return False
            with suppress(Refused):
                self._begin(name, None, self._memory_of(name), fills=True)
                return True
        return False

    def _known(self, name: str) -> Namespace | None:
        """Return a namespace that is served or followed here; one that is over is put away."""
        known = self._open.get(name)
        if known is not None and known.is_over:
            known.wait_end(_END_TIMEOUT_S)
            self._forget(known)
        return self._open.get(name)

    def end_those_that_are_lost(self) -> None:
        """Save and end the namespaces with which no other process can go on; blocks."""
        with self._lock:
            namespaces = [namespace for namespace in self._open.values() if not namespace.can_be_succeeded]
        for namespace in namespaces:
            namespace.close()

    def admit(self, name: str, ask: EnterRequest, peer_identity: PeerIdentity) -> EnterAccepted:
        """Let a client take part in a namespace, which begins with its first one; blocks until it is there.

        `peer_identity` is what its certificate says: one for a worker is for that rank alone.

        Raises:
            UsageError: it cannot have that name.
            Refused: the client cannot take part, or there are too many namespaces; `ClaimedRank` where another one
                has its rank, which may be known to be over a moment later.
            CheckpointError: what was saved of it cannot be used.
            ServedElsewhere: another server serves it.
        """
        check_name(name)
        if self._is_expelled(peer_identity):
            raise Refused(f"its certificate ({peer_identity.holder}, {peer_identity.serial}) was revoked")
        if peer_identity.has_role("reader") or peer_identity.has_role("relay"):
            raise Refused(
                f"its certificate is for {peer_identity.holder}, which may read what is published and no more"
            )
        if ask.workers is not None and ask.workers > MOST_WORKERS:
            raise Refused(f"a namespace has {MOST_WORKERS} workers at most, and it asks for {ask.workers}")
        holder_rank = _holder_rank(peer_identity)
        give_up = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < give_up:
            namespace = self._namespace(name, ask.workers)
            try:
                if namespace.is_followed:
                    self._require_own(name)
                return self._with_servers(namespace.admit(ask, holder_rank))
            except NamespaceEnded:  # its last client has just left
                namespace.wait_end(max(0.0, give_up - time.monotonic()))
        raise DeadlineExceeded(f"namespace '{name}' ended whenever it was asked for")

    def _require_own(self, name: str) -> None:
        """Raise ServedElsewhere if another server serves a namespace."""
        replicas = self._replicas_of(name)
        elsewhere = None if replicas is None else replicas.elsewhere()
        if elsewhere is not None:
            raise elsewhere

    def _is_for_others(self, name: str) -> bool:
        """Return whether another server serves a namespace, or may: where that cannot be read, it may."""
        try:
            replicas = self._replicas_of(name)
            return replicas is not None and replicas.is_for_others()
        except OSError:
            return True
        except UsageError:  # none can have that name
            return False

    def _with_servers(self, accepted: EnterAccepted) -> EnterAccepted:
        if self._companions is None:
            return accepted
        return replace(accepted, servers=self._companions.addresses, keeps_pushes=self._companions.lag > 0)

    def standing(self, name: str) -> NamespaceStanding:
        """Return what this server has of a namespace. Raises OSError, UsageError for what cannot be a name."""
        check_name(name)
        with self._lock:
            known = self._open.get(name)
            replicas = self._replicas_of(name)
        if replicas is None:
            return NamespaceStanding(is_head=True)
        is_open = known is not None and not known.is_over
        is_followed = known is not None and known.is_followed
        return replicas.standing(is_served=is_open and not is_followed, is_followed=is_followed)

    def take_head(self, name: str, connection: NamespaceConnection, ask: EnterRequest) -> None:
        """Have the replica of a namespace for the server that serves it, unless this one has something else of it."""
        try:
            hello = decode(connection.identity)
            check_name(name)
        except (PeerError, UsageError):
            hello = None
        is_head = isinstance(hello, Hello) and hello.role == ROLE and connection.peer_identity.permit("server", 0)
        if not isinstance(hello, Hello) or not is_head or not self._begin_following(name, connection, ask, hello):
            connection.close()

    def _begin_following(self, name: str, head: NamespaceConnection, ask: EnterRequest, hello: Hello) -> bool:
        with self._lock:
            is_able = ask.version == __version__ and hello.generation > 0 and not self._ending.is_set()
            is_able = is_able and (ask.workers or 0) <= MOST_WORKERS
            if self._companions is None or not is_able or self._known(name) is not None or not self._has_room(name):
                return False
            with suppress(Refused):  # the other server asks again
                self._begin(name, ask.workers, None, hello.generation).follow(head)
                return True
        return False

    def hand_over(self, name: str, admitted: NamespaceConnection) -> None:
        """Have a client served that was admitted; one that comes too late is told so."""
        with self._lock:
            namespace = self._open.get(name)
        if self._is_expelled(admitted.peer_identity) or (namespace is not None and namespace.is_followed):
            admitted.close()
        elif namespace is None or namespace.is_over:
            if self._is_for_others(name):
                admitted.close()  # the client looks for the server that serves it
            else:
                admitted.refuse_worker(f"namespace '{name}' has ended since it joined: connect again")
        else:
            namespace.hand_over(admitted)

    def take_reader(self, name: str, connection: NamespaceConnection) -> bool:
        """Serve a client that only reads what is published in a namespace; return whether it is one."""
        if not is_reader(connection):
            return False
        try:
            check_name(name)
            with self._lock:
                if name not in self._readers:
                    self._forget_unused_readers()
                if name not in self._readers and len(self._readers) >= MAX_NAMESPACES:
                    raise UsageError(f"readers wait for {MAX_NAMESPACES} namespaces already")
                readers = self._readers_of(name)
        except UsageError as error:
            refuse_reader(connection, str(error))
        else:
            readers.take(connection)
        return True

    def _forget_unused_readers(self) -> None:
        """Make room where readers have waited for namespaces that never were, and have gone."""
        for name, readers in list(self._readers.items()):
            if name not in self._open and readers.is_unused:
                del self._readers[name]
                readers.close()

    def _readers_of(self, name: str) -> ReaderService:
        """Return the readers of a namespace."""
        readers = self._readers.get(name)
        if readers is None:
            readers = self._readers[name] = ReaderService()
            readers.expel(self._expelled)
        return readers

    def expel(self, names: Collection[str]) -> None:
        """End the clients whose certificate has such a holder or serial number, and let no more of them in."""
        with self._lock:
            self._expelled = frozenset(names)
            for readers in self._readers.values():
                readers.expel(names)
            for namespace in self._open.values():
                namespace.expel(names)

    def run_due_work(self) -> None:
        """Have what is due done in each. Does not block."""
        with self._lock:
            for namespace in list(self._open.values()):
                if namespace.is_over:
                    self._forget(namespace)
                else:
                    namespace.run_due_work()

    def close(self) -> list[str]:
        """Save and end all; return what could not be saved."""
        with self._lock:
            self._ending.set()
            namespaces = list(self._open.values())
        for namespace in namespaces:
            namespace.close()
            with self._lock:
                self._forget(namespace)
        for readers in self._readers.values():
            readers.close()
        self._tell_alone()
        return self._lost

    def _tell_alone(self) -> None:
        """Tell which namespaces no other server can serve before this one is back."""
        with suppress(OSError):  # of the folder of views, which was told
            replicas = {name: self._replicas_of(name) for name in self._state.names()}
            alone = [name for name, found in replicas.items() if found is not None and found.is_alone]
            for name in alone:
                self._config.tell(
                    f"only this server has what is newest of {name}: others refuse its clients until this one is back"
                )

    def _forget(self, namespace: Namespace) -> None:
        """Drop a namespace that has ended, unless another thread has, but not what it could not save."""
        if self._open.get(namespace.name) is not namespace:
            return
        del self._open[namespace.name]
        if namespace.unsaved:
            self._lost.append(namespace.unsaved)

    def _is_expelled(self, peer_identity: PeerIdentity) -> bool:
        """Return whether a certificate was revoked, perhaps since the handshake in which it was shown."""
        with self._lock:
            return peer_identity.are_among(self._expelled)

    def _namespace(self, name: str, workers: int | None) -> Namespace:
        with self._lock:
            known = self._known(name)
            if known is not None:
                return known
            if self._ending.is_set():
                raise Refused("the server is ending")
            if not self._has_room(name):
                raise Refused(
                    f"there are {MAX_NAMESPACES} namespaces already, and no more than {MAX_NAMESPACES} may be: name "
                    "one of these, or have the folder of one that is not needed removed"
                )
            return self._begin(name, workers, self._memory_of(name))

    def _has_room(self, name: str) -> bool:
        """Return whether a namespace is one of those that there are, or may be one more; in the lock."""
        names = {*self._state.names(), *self._open}
        return name in names or len(names) < MAX_NAMESPACES

    def _begin(
        self, name: str, workers: int | None, memory: NamespaceMemory | None, followed: int = 0, *, fills: bool = False
    ) -> Namespace:
        """Open or follow a namespace; raises Refused where the system does not allow it."""
        try:
            begun = Namespace(
                *(name, self._state.folder(name), self._transport, self._config, workers, memory),
                published=self._readers_of(name).published,
                replicas=self._replicas_of(name),
                followed=followed,
                fills=fills,
            )
        except RuntimeError as error:  # the system has no thread left
            raise Refused(f"namespace '{name}' cannot be opened: {explain(error)}") from error
        begun.expel(self._expelled)
        self._open[name] = begun
        return begun

    def _replicas_of(self, name: str) -> NamespaceReplicas | None:
        """Return what this server has to do with a namespace that others may serve; None if there are none."""
        return None if self._companions is None else NamespaceReplicas(name, self._companions)

    def _memory_of(self, name: str) -> NamespaceMemory | None:
        """Return memory for a namespace that outlives this process, if there is any."""
        memory = self._config.memory
        return None if memory is None else NamespaceMemory(memory.part(f"{MEMORY_PREFIX}{name}/"))


def _holder_rank(peer_identity: PeerIdentity) -> int | None:
    """Return which worker a certificate is for, if it is for one."""
    role, _, rank = peer_identity.holder.partition("-")
    return int(rank) if role == "worker" and rank.isascii() and rank.isdigit() else None


@final
class Gateway:
    """Accepts clients at one listener, and runs due work of all namespaces, until `stop`."""

    def __init__(self, listener: Listener, namespaces: Namespaces) -> None:
        self._listener = listener
        self.namespaces: Final = namespaces
        self._lines = AnswerLines(MAX_NAMESPACES)
        self._stopping = threading.Event()

    def run(self) -> list[str]:
        """Accept clients until `stop`; then save and end all namespaces, and return what could not be saved."""
        look_at = 0.0
        with self._lines:
            try:
                while not self._stopping.is_set():
                    with suppress(DeadlineExceeded):
                        self._receive(self._listener.accept(timeout_s=TICK_S))
                    if time.monotonic() >= look_at:
                        look_at = time.monotonic() + TICK_S
                        self.namespaces.run_due_work()
                        self._lines.resume()
            finally:
                self._listener.close()
                unsaved = self.namespaces.close()
        return unsaved

    def stop(self) -> None:
        """End `run`; for any thread, and for handlers of signals."""
        self._stopping.set()

    def _receive(self, connection: Connection) -> None:
        """Answer a client, or hand it over to its namespace; a malformed identity ends the connection."""
        try:
            frame = decode_enter_frame(connection.identity)
        except PeerError:
            connection.close()
            return
        if frame.hello and frame.ask is not None:
            self.namespaces.take_head(frame.namespace, NamespaceConnection(connection, frame), frame.ask)
        elif frame.hello:
            entering = NamespaceConnection(connection, frame)
            if not self.namespaces.take_reader(frame.namespace, entering):
                self.namespaces.hand_over(frame.namespace, entering)
        elif frame.ask is not None:
            ask = partial(self._place, frame.namespace, frame.ask, connection.peer_identity)
            self._answer_in_line(frame.namespace, connection, ask)
        elif frame.seeks:
            self._answer_in_line(frame.namespace, connection, partial(self._standing, frame.namespace))
        else:
            connection.close()

    def _answer_in_line(self, name: str, connection: Connection, find: Callable[[], Answer]) -> None:
        """Have a client answered in a thread, behind those that ask of the same namespace."""
        patient_until = time.monotonic() + _TAKEN_PATIENCE_S
        self._lines.add(name, partial(self._answer, name, connection, find, patient_until))

    def _answer(self, name: str, connection: Connection, find: Callable[[], Answer], patient_until: float) -> None:
        """Answer a client that asks something; a rank that it asks for expires if the answer is not received."""
        try:
            answer = find()
        except ClaimedRank as error:
            again = partial(self._answer, name, connection, find, patient_until)
            if time.monotonic() < patient_until and self._lines.defer(name, again):
                return
            answer = EnterRefused(describe_error(error))
        except BaseException:
            connection.close()
            raise
        with closing(connection), suppress(PeerError):
            connection.send(encode(answer), timeout_s=_SEND_TIMEOUT_S)

    def _place(self, namespace: str, ask: EnterRequest, peer_identity: PeerIdentity) -> Answer:
        try:
            return self.namespaces.admit(namespace, ask, peer_identity)
        except ClaimedRank:
            raise
        except ServedElsewhere as error:
            return EnterElsewhere(describe_error(error), error.address)
        except (PacelineError, OSError) as error:
            return EnterRefused(describe_error(error))

    def _standing(self, namespace: str) -> Answer:
        try:
            return self.namespaces.standing(namespace)
        except (PacelineError, OSError) as error:
            return EnterRefused(describe_error(error))
