"""A namespace: one job on a standalone server, with a server node in a thread, its admission, and its snapshots.

The gateway accepts the connections of all namespaces, and hands each to the node of its namespace.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, final

import msgspec

from paceline.core.messages import Sender, WorkerRefused
from paceline.core.settings import MAX_WORKERS, ServerSettings
from paceline.errors import (
    CheckpointError,
    ConnectionLost,
    DeadlineExceeded,
    PacelineError,
    PeerError,
    UsageError,
)
from paceline.job.environment import checks_memory
from paceline.job.machines import cores_here, server_threads
from paceline.launch.limits import explain, is_shortage
from paceline.observe.export.run_metrics import RunMetrics
from paceline.observe.trace import Trace
from paceline.serve.admission import Admission, OpenNamespace
from paceline.serve.messages import EnterAccepted, EnterRequest
from paceline.serve.replicas import ServedElsewhere
from paceline.serve.saving import NamespaceCut, Read, TableVersions, restore_tables
from paceline.server.journal import COLD, COLD_BYTES
from paceline.server.node import ServerNode
from paceline.server.recovery import CannotGoOn
from paceline.server.replay import Diverged
from paceline.server.replica import Follower
from paceline.server.replica_link import ReplicaLink
from paceline.server.replica_place import Superseded
from paceline.server.tables import ServerState
from paceline.snapshots.folder import snapshots_in
from paceline.snapshots.increments import Increments
from paceline.snapshots.options import LEAST_AUTO_S, auto_interval_s
from paceline.transport.accept_queue import AcceptQueue
from paceline.transport.base import EMPTY, AllocateBody, Connection, Frame, MeasuresSilence, PeerIdentity
from paceline.update.lasting import LastingRecord
from paceline.wire.malformed import REQUEST_ERRORS, describe_error
from paceline.wire.messages import Hello, decode, encode

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from paceline.core.consistency import Consistency
    from paceline.core.server import ServerCore
    from paceline.serve.messages import EnterFrame
    from paceline.serve.replicas import NamespaceReplicas
    from paceline.serve.state import NamespaceFolder
    from paceline.server.readers import Published
    from paceline.server.tables import ServedTables
    from paceline.snapshots.folder import Snapshot
    from paceline.transport.base import Transport
    from paceline.transport.lasting_memory import LastingMemory

_REFUSAL_TIMEOUT_S: Final = 1.0
T = TypeVar("T")

# Longer than clients try to reconnect, so that they find their rank reserved.
LEASE_S: Final = 15.0
JOIN_TIMEOUT_S: Final = 300.0
ANSWER_TIMEOUT_S: Final = 50.0  # shorter than the deadline of clients
SAVE_TIMEOUT_S: Final = 600.0  # for the memory of a large machine
_END_TIMEOUT_S: Final = 10.0
_FILL_TIMEOUT_S: Final = 5.0  # to find another server that takes what this one has
_RETRY_S: Final = 10.0  # until a snapshot that failed is made again, at most
MEMORY_PREFIX: Final = "namespace/"  # and the name, of the memory of a namespace
_OPENED: Final = "opened"
_OPENED_BYTES: Final = 32 * MAX_WORKERS


@final
class NamespaceConnection:
    """A connection whose identity is the client's `Hello` to the server of its namespace."""

    def __init__(self, connection: Connection, frame: EnterFrame) -> None:
        self.identity: Final = frame.hello
        self._connection = connection

    @property
    def peer(self) -> str:
        """Name of the client, for messages."""
        return self._connection.peer

    @property
    def peer_identity(self) -> PeerIdentity:
        """Identity of the client's certificate."""
        return self._connection.peer_identity

    def send(self, header: bytes, body: memoryview = EMPTY, *, timeout_s: float) -> None:
        """Send one frame; see `Connection.send`."""
        self._connection.send(header, body, timeout_s=timeout_s)

    def try_send(self, frames: Sequence[tuple[bytes, memoryview]], *, timeout_s: float) -> bool:
        """Send frames together; see `Connection.try_send`."""
        return self._connection.try_send(frames, timeout_s=timeout_s)

    def has_room(self, body: memoryview) -> bool:
        """Return whether `send` would take a body without waiting; see `Connection.has_room`."""
        return self._connection.has_room(body)

    def has_frame(self) -> bool:
        """Return whether the next frame is here; see `Connection.has_frame`."""
        return self._connection.has_frame()

    def fileno(self) -> int | None:
        """Return a descriptor to wait for; see `Connection.fileno`."""
        return self._connection.fileno()

    def receive(self, *, timeout_s: float, place: AllocateBody | None = None) -> Frame:
        """Wait for the next frame; see `Connection.receive`."""
        return self._connection.receive(timeout_s=timeout_s, place=place)

    def silent_s(self) -> float:
        """Return for how long the other machine has confirmed nothing; see `MeasuresSilence`."""
        return self._connection.silent_s() if isinstance(self._connection, MeasuresSilence) else 0.0

    def close(self) -> None:
        """End the connection; see `Connection.close`."""
        self._connection.close()

    def refuse_worker(self, reason: str) -> None:
        """Refuse a worker whose namespace has ended, so that it does not reconnect, and end the connection."""
        with suppress(PeerError):
            hello = decode(self.identity)
            if isinstance(hello, Hello):
                refusal = WorkerRefused(Sender(hello.generation, hello.rank, hello.incarnation), reason)
                self.send(encode(refusal), timeout_s=_REFUSAL_TIMEOUT_S)
        self.close()


class NamespaceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of all namespaces of a server.

    Args:
        snapshot_every_s: interval between snapshots of what has changed; 0 chooses by what one takes.
        lease_s: how long a client may be disconnected before its worker is declared dead.
        allowed_paths: the user's own rules and functions that clients may name; None allows all.
        or_previous: restore the snapshot before the newest if that is damaged.
        tell: called with a line for the operator, from any thread.
        memory: outlives this process, so that another one can go on with the namespaces in it.
        metrics: of each namespace by its name; None for none.
    """

    tell: Callable[[str], None]
    snapshot_every_s: float = 0.0
    lease_s: float = LEASE_S
    allowed_paths: frozenset[str] | None = frozenset()
    or_previous: bool = False
    memory: LastingMemory | None = None
    metrics: dict[str, RunMetrics] | None = None

    def trace_of(self, name: str) -> Trace:
        """Return what the server of a namespace writes its records to: no file, and metrics if they are wanted."""
        if self.metrics is None:
            return Trace(None)
        return Trace(None, each=self.metrics.setdefault(name, RunMetrics()).add)


@final
class NamespaceMemory:
    """The memory of one namespace that outlives its process."""

    def __init__(self, memory: LastingMemory) -> None:
        self.memory: Final = memory

    @property
    def opened(self) -> OpenNamespace | None:
        """What a process before this one has left; None if that is not enough to go on with."""
        if self.reason or not self.memory.has(_OPENED):
            return None
        settings = self._record().settings
        return OpenNamespace.decode(settings) if settings else None

    @property
    def reason(self) -> str:
        """Why no process can go on; empty if one can, or it is not known."""
        if not self.memory.has(COLD):
            return ""
        return bytes(self.memory.region(COLD, COLD_BYTES)).rstrip(b"\0").decode(errors="replace")

    def note(self, opened: OpenNamespace) -> None:
        """Have another process go on from here. Raises OSError: there is no memory for it."""
        self._record().commit(opened.encode())

    def clear(self) -> None:
        """Have no process go on, and let the memory go; raises OSError when the process that keeps it has ended."""
        self.forget_opened()  # first: without it the rest is nothing
        self.memory.drop_all()

    def forget_opened(self) -> None:
        """Have no process go on, unless `note` is called again; raises as `clear`."""
        self.memory.drop(_OPENED)

    def _record(self) -> LastingRecord:
        return LastingRecord(self.memory.region(_OPENED, LastingRecord.size_bytes(0, _OPENED_BYTES), sparse=True), ())


class NamespaceEnded(ConnectionLost):
    """The namespace has ended; the next client starts it again."""


class _Stopped(Exception):
    """The server of a namespace handles nothing more."""


@final
class Namespace:
    """A namespace that is served, from its first client to its last.

    Its thread restores the newest snapshot, serves, makes others at intervals, and ends when no worker takes part any
    more, at `close`, or by an error; then `failure` says why.

    Where several servers stand in for each other, it first has the replica of another one that serves the namespace, or
    serves it and has a replica on another one.
    """

    def __init__(
        self,
        name: str,
        folder: NamespaceFolder,
        transport: Transport,
        config: NamespaceConfig,
        workers: int | None,
        memory: NamespaceMemory | None = None,
        published: Published | None = None,
        replicas: NamespaceReplicas | None = None,
        followed: int = 0,
        *,
        fills: bool = False,
    ) -> None:
        """Start its thread; see `EnterRequest` for `workers`. What was opened in `memory` goes on, and is not read.

        What is published goes to `published`, which lasts longer than the namespace is served. `followed`: generation
        in which another server serves, whose connection comes first; 0 if this one does. `fills`: it admits no client,
        and ends when another server has it, too.
        """
        self.name: Final = name
        self.failure = ""
        self.unsaved = ""  # why the last snapshot failed
        self._folder = folder
        self._transport = transport
        self._config = config
        self._memory = memory
        self._published = published
        self._replicas = replicas
        self._followed = followed
        self.fills: Final = fills
        self._elsewhere: ServedElsewhere | None = None
        self._head: NamespaceConnection | None = None
        self._beside = b""  # what the head has said of its admission
        self._workers = workers
        self._handoffs = AcceptQueue[Connection](f"namespace '{name}'")
        self._changed = threading.Condition()
        # Guarded by `_changed`. The node exists while it serves; the calls are those that wait for it.
        self._node: ServerNode | None = None
        self._over = False
        self._expelled: frozenset[str] = frozenset()
        self._owed: set[Future[object]] = set()
        # Used by the thread of the node alone, but for `_looking`, which only keeps looks from piling up.
        self._looking = False
        self._is_closing = False  # no snapshot is begun any more, but for the last
        self._saved_versions = TableVersions(0, ())
        self._interval_s = config.snapshot_every_s or LEAST_AUTO_S
        self._due_s = 0.0  # when the next snapshot is
        self._holds_workers = False  # while the next one is written
        self._increments = Increments()
        self._failed: Collection[str] = ()  # tables whose update had failed when the newest snapshot was made
        self._writer = self._new_writer()
        self._writing: tuple[NamespaceCut, Future[Snapshot]] | None = None
        self._admission: Admission | None = None
        self._thread = threading.Thread(target=self._live, name=f"paceline-namespace-{name}", daemon=True)
        self._thread.start()

    def admit(self, ask: EnterRequest, holder_rank: int | None) -> EnterAccepted:
        """Admit a client as a worker; blocks until the namespace is open.

        Raises:
            Refused: the client cannot take part; the message says why.
            NamespaceEnded: the namespace has ended meanwhile.
            CheckpointError: the snapshot cannot be restored.
        """
        return self._ask(lambda held: self._admit(held, ask, holder_rank), ANSWER_TIMEOUT_S)

    def hand_over(self, admitted: NamespaceConnection) -> None:
        """Serve an admitted client."""
        self._handoffs.put(admitted)

    def follow(self, head: NamespaceConnection) -> None:
        """Do what the head says; called once, where this server has the replica."""
        self._head = head
        self._handoffs.put(head)

    @property
    def is_followed(self) -> bool:
        """Whether another server serves, of which this one has the replica; for any thread."""
        return self._followed > 0 and not self._over

    def expel(self, names: Collection[str]) -> None:
        """End the clients whose certificate has such a holder or serial number, and refuse them from now on."""
        with self._changed:
            self._expelled = frozenset(names)
            if self._node is not None and not self._over:
                self._node.expel(self._expelled)

    def run_due_work(self) -> None:
        """Save if that is due, and end without workers. Does not block."""
        with self._changed:
            if self._node is not None and not self._over and not self._followed and not self._looking:
                self._looking = True
                self._node.do(self._look)

    @property
    def can_be_succeeded(self) -> bool:
        """Whether another process could go on if this one were killed; for any thread."""
        return self._memory is not None and self._memory.opened is not None

    @property
    def is_over(self) -> bool:
        """Whether the namespace has ended."""
        return self._over

    def close(self) -> None:
        """Save changes and end; blocks until then. A failure is reported, and in `unsaved`."""
        if self._followed:
            self._stop_following()
            return
        try:
            saving = self._ask(self._begin_to_end, SAVE_TIMEOUT_S)
            if saving is not None:
                wait([saving], SAVE_TIMEOUT_S)
            self._ask(self._save_and_end, SAVE_TIMEOUT_S)
        except NamespaceEnded:
            pass
        except CheckpointError as error:  # it could not be restored, which was reported
            self.unsaved = str(error)
        except ServedElsewhere:
            pass
        except DeadlineExceeded as error:
            self._note_unsaved(error)
            with self._changed:
                if self._node is not None:
                    self._node.do(self._save_and_end)  # it may come to it yet
        self.wait_end(_END_TIMEOUT_S)

    def _stop_following(self) -> None:
        """Save what the other server has said, and end."""
        with self._changed:
            self._changed.wait_for(lambda: self._node is not None or self._over, ANSWER_TIMEOUT_S)
            if self._node is not None and not self._over:
                self._node.do(self._save_and_end)  # comes to it only if this server has come to serve meanwhile
                self._node.stop()
        if self._head is not None:
            self._head.close()
        self.wait_end(SAVE_TIMEOUT_S)

    def wait_end(self, timeout_s: float) -> None:
        """Block until its thread has ended, or the time is over."""
        self._thread.join(timeout_s)

    def _ask(self, call: Callable[[ServerState], T], timeout_s: float) -> T:
        """Run a call on the thread that serves, and return its result."""
        deadline, future = time.monotonic() + timeout_s, Future[T]()
        with self._changed:
            self._changed.wait_for(lambda: self._node is not None or self._over, timeout_s)
            if self._over:
                raise self._end_error()
            if self._node is None:
                raise DeadlineExceeded(f"namespace '{self.name}' was not read from disk within {timeout_s:g} s")
            self._owed.add(future)  # pyright: ignore[reportArgumentType] - a set of futures of whatever
            self._node.do(lambda held: self._settle(future, call, held))
        try:
            return future.result(max(0.0, deadline - time.monotonic()))
        except TimeoutError as error:
            raise DeadlineExceeded(f"namespace '{self.name}' was busy for {timeout_s:g} s") from error

    def _settle(self, future: Future[T], call: Callable[[ServerState], T], held: ServerState) -> None:
        with self._changed:
            self._owed.discard(future)  # pyright: ignore[reportArgumentType]
        try:
            future.set_result(call(held))
        except Superseded:
            future.set_exception(NamespaceEnded(f"namespace '{self.name}' is served elsewhere"))
            raise
        except PacelineError as error:
            future.set_exception(error)
        except BaseException:
            future.set_exception(NamespaceEnded(f"namespace '{self.name}' has failed"))
            raise

    def _end_error(self) -> PacelineError:
        if self._elsewhere is not None:
            return self._elsewhere
        if self.failure:
            return CheckpointError(self.failure)
        return NamespaceEnded(f"namespace '{self.name}' has ended")

    # -- on the thread that serves -----------------------------------------------------------------------------------

    def _live(self) -> None:
        problem = f"namespace '{self.name}' has failed, and goes on from its newest snapshot when it is next asked for"
        try:
            node = self._open()
            with self._changed:
                self._node = node
                node.expel(self._expelled)
                self._changed.notify_all()
            with suppress(_Stopped):
                node.run()
            problem = ""
        except ServedElsewhere as error:
            problem, self._elsewhere = "", error
        except (Superseded, Diverged, PeerError) as error:  # nothing is lost: another server has it
            problem = ""
            self._config.tell(f"namespace '{self.name}' is not served here any more: {error}")
        except CannotGoOn as error:
            problem = f"namespace '{self.name}' goes on from its newest snapshot when it is next asked for: {error}"
        except (CheckpointError, OSError) as error:
            reason = explain(error) if isinstance(error, OSError) else error
            problem = self.failure = f"namespace '{self.name}': {reason}"
        finally:
            if problem:
                if not self.failure:
                    self.unsaved = problem
                self._config.tell(problem)
            self._handoffs.close()
            self._forget_memory()
            with self._changed:
                self._over = True
                for future in self._owed:
                    future.set_exception(self._end_error())
                self._owed.clear()
                self._changed.notify_all()
            self._writer.shutdown()

    def _forget_memory(self) -> None:
        if self._memory is not None:
            with suppress(OSError):  # the process that keeps it has ended
                self._memory.clear()

    def _open(self) -> ServerNode:
        """Return a server node that goes on from memory, or first restores the newest snapshot."""
        if self._followed:
            return self._follow(self._followed)
        opened = self._memory.opened if self._memory is not None else None
        if self._replicas is not None:
            (self._replicas.take if opened is None else self._replicas.go_on)()
        if opened is not None:
            node = self._make_node(opened.generation, 0)
            node.do(lambda held: self._go_on(held, opened))
            return node
        self._forget_memory()
        found = self._folder.newest(or_previous=self._config.or_previous)
        generation = self._folder.start_generation(found.manifest.generation if found else 0)
        node = self._make_node(generation, found.manifest.clock if found else 0)

        def restore(held: ServerState) -> None:
            if found is not None:
                restore_tables(found, held)
            self._begin(held, Admission(self.name, generation, self._workers), TableVersions.read(held))
            if self._memory is not None and held.keep():
                self._admission_changed()

        node.do(restore)
        return node

    def _go_on(self, held: ServerState, opened: OpenNamespace) -> None:
        admission = Admission(self.name, opened.generation, self._workers)
        admission.take_over(opened)
        self._begin(held, admission, TableVersions(-1, ()))  # it is not known what was saved

    def _follow(self, generation: int) -> ServerNode:
        """Return a server node that has the replica of another one, and serves once that is gone."""
        assert self._replicas is not None
        self._replicas.forget_saved()
        follower = Follower(
            0,
            self._replicas.views,
            self._handoffs,
            ANSWER_TIMEOUT_S,
            self._config.tell,
            name=f"namespace '{self.name}'",
            noted=self._note_beside,
            ended=self._save_followed,
            begins=self._begin_to_serve,
            lag=self._replicas.lag,
        )
        node = self._make_node(generation, 0, follower)
        node.do(self._take_over)  # comes to it when it serves
        return node

    def _note_beside(self, content: bytes) -> None:
        self._beside = content

    def _begin_to_serve(self) -> None:
        """Let clients in, which may have to say again what this server lacks before it serves."""
        self._followed = 0

    def _take_over(self, held: ServerState) -> None:
        """Serve in the place of the server whose replica this has been, from memory that ends with this process."""
        self._go_on(held, OpenNamespace.decode(self._beside).reserved_anew(time.monotonic()))
        self._due_s = time.monotonic()  # there may be no snapshot here, as replicas make none
        self._config.tell(
            f"namespace '{self.name}' goes on from its newest snapshot if this process is killed while no other server "
            "has its replica, as it was begun on another one"
        )

    def _save_followed(self, core: ServerCore, tables: ServedTables, view: int) -> None:
        """Save what the server has said whose replica this has been until it ended.

        `view`: in which that is all it has acknowledged; 0 for none.
        """
        assert self._replicas is not None
        held = ServerState(core, tables, lambda: False, tables.declare)
        try:
            if any(table.has_values for table in tables.values()):
                self._folder.start_generation(core.settings.generation - 1)
                cut = NamespaceCut.make(held, _read_here, self._increments)
                try:
                    self._tell_failed(cut, cut.write(self._folder.path))
                finally:
                    cut.opened.close()
            if view:
                self._replicas.note_saved(view)
        except REQUEST_ERRORS as error:
            self._config.tell(
                f"namespace '{self.name}' could not be saved here, the server that serves it has to be there when it "
                f"is next asked for: {describe_error(error)}"
            )

    def _begin(self, held: ServerState, admission: Admission, saved: TableVersions) -> None:
        held.tables.host.may_spill = False
        self._admission = admission
        self._saved_versions = saved
        self._due_s = time.monotonic() + self._interval_s

    def _admission_changed(self) -> None:
        """Have another process know it, before a client is told."""
        if self._node is not None and self._replicas is not None:
            self._node.replica.note_beside(self._opened())
            self._node.replica.wait_received()
        if self._memory is None or self._admission is None:
            return
        try:
            self._memory.note(self._admission.opened())
        except (OSError, UsageError) as error:  # what is there by now must not count any more
            self._config.tell(
                f"namespace '{self.name}' goes on from its newest snapshot if this process is killed: {error}"
            )
            with suppress(OSError):
                self._memory.forget_opened()

    def _opened(self) -> bytes:
        return b"" if self._admission is None else self._admission.opened().encode()

    def _make_node(self, generation: int, clock: int, follows: Follower | None = None) -> ServerNode:
        settings = ServerSettings(
            0,
            1,
            generation=generation,
            workers=tuple(range(self._workers or 0)),
            join_timeout_s=JOIN_TIMEOUT_S,
            lease_s=self._config.lease_s,
            clock=clock,
        )
        without = f"namespace '{self.name}' goes on from its newest snapshot if this process is killed"
        replicas = self._replicas
        link = ReplicaLink() if replicas is None else replicas.link(generation, self._workers, self._opened)
        return ServerNode(
            settings,
            self._handoffs,
            self._transport,
            tuple,
            self._config.trace_of(self.name),
            allowed_paths=self._config.allowed_paths,
            num_threads=_num_threads,
            checks_memory=checks_memory(),
            memory=None if self._memory is None or follows is not None else self._memory.memory,
            tell=self._config.tell,
            note_given_up=self._tell_given_up,
            without=without,
            replica=link,
            follows=follows,
            published=self._published,
        )

    def _tell_given_up(self, worker: int, reason: str) -> None:
        self._config.tell(
            f"namespace '{self.name}': worker {worker} is given up: {reason}; the others go on without it"
        )

    def _admit(self, held: ServerState, ask: EnterRequest, holder_rank: int | None) -> EnterAccepted:
        accepted = self._open_admission().admit(held, ask, holder_rank)
        self._admission_changed()
        return accepted

    def _open_admission(self) -> Admission:
        if self._admission is None or self.fills:  # a client that waits opens it anew
            raise NamespaceEnded(f"namespace '{self.name}' has ended")
        return self._admission

    def _look(self, held: ServerState) -> None:
        self._looking = False
        if self._is_closing or not self._has_written():
            return
        now = time.monotonic()
        if self.fills and self._node is not None:
            if self._node.replica.is_connected or now >= self._due_s - self._interval_s + _FILL_TIMEOUT_S:
                self._end()
            return
        is_idle = self._admission is not None and self._admission.is_idle(held)
        if now >= self._due_s or (is_idle and not self.unsaved):
            self._due_s = now + self._interval_s
            self._save(held, waits=is_idle or self._holds_workers)
            if is_idle and not self.unsaved:
                self._end()

    def _end(self) -> None:
        """Stop serving: the next client starts the namespace again, from disk."""
        self._admission = None
        self._note_all_saved()
        assert self._node is not None
        self._node.stop()
        self._folder.drop_if_empty()

    def _note_all_saved(self) -> None:
        """Note that this server has saved all that it has acknowledged, for the other ones to know."""
        if self._replicas is not None and not self.unsaved:
            self._replicas.note_saved_as_head()

    def _save(self, held: ServerState, *, waits: bool) -> None:
        """Write a snapshot if something has changed, in a thread of its own unless workers are to wait for it."""
        if TableVersions.read(held) == self._saved_versions:
            return
        try:
            cut = NamespaceCut.make(held, _read_here if waits else self._read_on_server, self._increments)
        except PacelineError as error:
            self._note_unsaved(error)
            return
        if waits:
            self._note_written(cut, partial(cut.write, self._folder.path))
        else:
            self._write_beside(cut)

    def _write_beside(self, cut: NamespaceCut) -> None:
        """Write a snapshot in a thread of its own; where the system has none left, it is tried again later."""
        try:
            self._writing = cut, self._writer.submit(cut.write, self._folder.path)
        except RuntimeError as error:
            self._writer.shutdown(wait=False, cancel_futures=True)  # it would write this cut with the next one
            self._writer = self._new_writer()
            cut.opened.close()
            self._note_unsaved(error)

    def _new_writer(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, f"paceline-snapshot-{self.name}")

    def _read_on_server(self, read: Read) -> memoryview:
        """Have the thread of the server read a piece of a cut, between two messages."""
        return self._ask(lambda _: read(), ANSWER_TIMEOUT_S)

    def _has_written(self) -> bool:
        """Return whether no snapshot is being written, and note what has become of one that was."""
        if self._writing is None:
            return True
        cut, writing = self._writing
        if not writing.done():
            return False
        self._writing = None
        self._note_written(cut, writing.result)
        return True

    def _note_written(self, cut: NamespaceCut, written: Callable[[], Snapshot]) -> None:
        try:
            found = written()
        except REQUEST_ERRORS as error:
            # Where updates were too far ahead of the disk, the next one is made while workers wait.
            self._holds_workers = isinstance(error, UsageError)
            self._note_unsaved(error)
        else:
            self.unsaved, self._holds_workers = "", False
            self._tell_failed(cut, found)
            self._saved_versions = cut.versions
            self._interval_s = self._config.snapshot_every_s or auto_interval_s(found.manifest.took_s)
        finally:
            cut.opened.close()

    def _begin_to_end(self, held: ServerState) -> Future[Snapshot] | None:
        """Begin no snapshot any more; return the one that is being written."""
        del held
        self._is_closing = True
        return None if self._writing is None else self._writing[1]

    def _save_and_end(self, held: ServerState) -> None:
        """Save what has changed, and end; raises `_Stopped`, so that nothing which waits is acknowledged and lost."""
        if self._has_written():
            self._save(held, waits=True)
            self._note_all_saved()
        else:
            self._note_unsaved(DeadlineExceeded(f"the snapshot before was not on disk after {SAVE_TIMEOUT_S:g} s"))
        if self._node is not None:
            self._node.replica.wait_received()  # one that lags has all before it serves
        raise _Stopped

    def _tell_failed(self, cut: NamespaceCut, written: Snapshot) -> None:
        """Tell once what snapshots have of each table whose update has failed."""
        for name, description in cut.describe_failed(self.name, written).items():
            if name not in self._failed:
                self._config.tell(description)
        self._failed = cut.failed

    def _note_unsaved(self, error: Exception) -> None:
        self._due_s = time.monotonic() + min(self._interval_s, _RETRY_S)
        why = explain(error) if is_shortage(error) else describe_error(error)
        counts = "the snapshot before it counts" if snapshots_in(self._folder.path) else "no snapshot of it is there"
        self.unsaved = f"namespace '{self.name}' could not be saved, {counts}: {why}"
        self._config.tell(self.unsaved)


def _read_here(read: Read) -> memoryview:
    """Read a piece of a cut on the thread of the server itself."""
    return read()


def _num_threads(consistency: Consistency) -> int:
    """Return the number of threads of an update; workers run on other machines."""
    return server_threads(consistency, len(cores_here()), num_servers=1, num_workers=0)
