"""A run's end of `paceline join`: listens, hands requests to the supervisor, and stands for the workers that join.

A thread for each `paceline join` reads what that says; everything else is called by the supervisor. The connection is
the life of what it has started: when it ends, the workers that have not ended are taken for killed, as the processes of
`paceline join` end with it, and with the connection.
"""

import signal
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final, final

from msgspec.structs import replace

from paceline.errors import ConnectionLost, DeadlineExceeded, PeerError
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.machines import this_machine
from paceline.job.spec import ClusterSpec, write_private
from paceline.launch.child import Launch
from paceline.launch.joining.messages import (
    ADDRESS_NAME,
    SEND_TIMEOUT_S,
    FromRun,
    JoinAccepted,
    JoinRefused,
    JoinRequest,
    WorkerExited,
    WorkerOrder,
    WorkerTrace,
    decode_from_joiner,
    encode,
)
from paceline.launch.joining.traces import TraceReceiver
from paceline.transport.base import Connection, Listener

MAX_JOINERS: Final = 64  # connections at a time
REQUEST_TIMEOUT_S: Final = 10.0
_TURN_S: Final = 60.0
_END_TIMEOUT_S: Final = 5.0
_MAX_NAME: Final = 255


@final
class JoinedWorker:
    """A worker that a `paceline join` has started in a place of the run, until it has ended; a `Member`."""

    def __init__(self, launch: Launch, joiner: "Joiner") -> None:
        """Note where it was started."""
        self.launch = launch
        self.pid: int | None = None  # that of another machine would mislead
        self.last_lines: Sequence[str] = ()  # they stand where it was started
        self._joiner = joiner

    @property
    def name(self) -> str:
        """What it is called in messages."""
        return self.launch.name

    def reap(self) -> int | None:
        """Return its exit code, SIGKILL where the connection to its launcher has ended; None while it runs."""
        return self._joiner.exit_code(self.launch.rank)

    def signal(self, number: int) -> None:
        """Have a signal sent to it."""
        self._joiner.tell(WorkerOrder(self.launch.rank, "end" if number == signal.SIGINT else "leave"))

    def kill(self) -> None:
        """Have it killed."""
        self._joiner.tell(WorkerOrder(self.launch.rank, "kill"))

    def send_line(self, line: str) -> None:
        """Do nothing: workers take no orders."""


@final
class Joiner:
    """The run's end of the connection to one `paceline join`; a `Candidate` until it is answered."""

    def __init__(
        self, connection: Connection, request: JoinRequest, spec: ClusterSpec, changed: Callable[[], None]
    ) -> None:
        """Stand for the process that has made this request; `changed` is called when a worker has ended."""
        self._connection = connection
        self._spec = spec
        self._traces = TraceReceiver(Path(spec.run_dir), spec.trace_bytes)
        self._request = request
        self._changed = changed
        self._lock = threading.Lock()
        self._running: set[int] = set()  # ranks
        self._exit_codes: dict[int, int] = {}  # by rank

    @property
    def num(self) -> int:
        """For how many places it asks."""
        return self._request.num

    @property
    def origin(self) -> str:
        """The machine that it runs on, or its process on this one."""
        machine = self._request.process.machine
        return f"process {self._request.pid}" if machine == this_machine() else f"machine {machine}"

    def permits(self, launch: Launch) -> bool:
        """Return whether it may have this place: worker 0 writes the snapshots, in a folder that it has to have.

        It needs a certificate for it, or none: servers look at that again.
        """
        if not launch.rank and self._spec.snapshots and not self._request.shares_folder:
            return False
        return self._request.ranks is None or launch.rank in self._request.ranks

    def refuse(self, reason: str) -> None:
        """Answer that it gets no place."""
        self.tell(JoinRefused(reason))

    def admit(self, launches: Sequence[Launch]) -> Sequence[JoinedWorker]:
        """Answer that it gets these places, and return its workers there; raises PeerError if it is gone."""
        spec = (Path(self._spec.run_dir) / CLUSTER_NAME).read_bytes()
        with self._lock:
            self._running = {launch.rank for launch in launches}
        places = tuple((launch.rank, launch.incarnation) for launch in launches)
        self._connection.send(encode(JoinAccepted(spec, places)), timeout_s=SEND_TIMEOUT_S)
        return [JoinedWorker(replace(launch, origin=self.origin), self) for launch in launches]

    def tell(self, message: FromRun) -> None:
        """Send a message; one that does not take it is lost, with its workers."""
        try:
            self._connection.send(encode(message), timeout_s=SEND_TIMEOUT_S)
        except PeerError:
            self.close()

    def exit_code(self, rank: int) -> int | None:
        """Return how a worker has ended, or None."""
        with self._lock:
            return self._exit_codes.get(rank)

    def follow(self) -> str:
        """Note the ends of its workers until the connection ends; return why it has, or nothing if none runs there."""
        try:
            while True:
                self._receive()
        except PeerError as error:
            with self._lock:
                return str(error) if self._running - self._exit_codes.keys() else ""

    def give_up(self) -> None:
        """Take the workers that have not ended for killed: the connection is over."""
        self.close()
        self._traces.close()
        with self._lock:
            lost = self._running - self._exit_codes.keys()
            self._exit_codes.update(dict.fromkeys(lost, -signal.SIGKILL))
        self._changed()

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def _receive(self) -> None:
        """Wait for a message, and note what it says; raises PeerError for one that does not belong here."""
        try:
            message = decode_from_joiner(self._connection.receive(timeout_s=_TURN_S).header)
        except DeadlineExceeded:
            return
        with self._lock:
            if isinstance(message, JoinRequest) or message.rank not in self._running:
                raise PeerError(f"{self.origin} said {type(message).__name__} when that means nothing")
            if isinstance(message, WorkerExited):
                self._exit_codes.setdefault(message.rank, message.exit_code)
        if isinstance(message, WorkerTrace):
            self._traces.keep(message)
        else:
            self._changed()


@final
class JoinListener:
    """Where each `paceline join` asks for places of a run. A context manager: leaving it ends all connections.

    Args:
        listener: where they connect; it belongs to this.
        spec: of the run; in its folder is said where this listens.
        program: digest of the script of the run.
        wake: called by other threads when the supervisor has something to look at.
        tell: gets a line for each that is lost with workers that run.
    """

    def __init__(
        self, listener: Listener, spec: ClusterSpec, program: str, wake: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        self._listener = listener
        self._spec = spec
        self._program = program
        self._wake = wake
        self._tell = tell
        self._lock = threading.Lock()
        self._requested: list[Joiner] = []
        self._connections: dict[Connection, threading.Thread] = {}
        self._is_over = False
        self._thread = threading.Thread(target=self._accept, name="paceline-join", daemon=True)

    def __enter__(self) -> "JoinListener":
        """Begin to listen."""
        self._thread.start()
        write_private(Path(self._spec.run_dir) / ADDRESS_NAME, self.address.encode())
        return self

    def __exit__(self, *error: object) -> None:
        """End all connections: what was started over them ends."""
        with self._lock:
            self._is_over = True
            left = dict(self._connections)
        self._listener.close()
        for connection in left:
            connection.close()
        for thread in (self._thread, *left.values()):
            thread.join(_END_TIMEOUT_S)

    @property
    def address(self) -> str:
        """Where it listens."""
        return self._listener.address

    def requested(self) -> Sequence[Joiner]:
        """Return those that have asked since the last call; does not block."""
        with self._lock:
            requested, self._requested = self._requested, []
        return requested

    def expel(self, names: Collection[str]) -> None:
        """End the connections whose certificate has such a holder or serial number, and so what was started there."""
        with self._lock:
            expelled = [each for each in self._connections if each.peer_identity.are_among(names)]
        for connection in expelled:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept(timeout_s=_TURN_S)
            except DeadlineExceeded:
                continue
            except ConnectionLost:
                return
            thread = threading.Thread(target=self._serve, args=(connection,), name="paceline-joiner", daemon=True)
            with self._lock:
                has_room = len(self._connections) < MAX_JOINERS and not self._is_over
                if has_room:
                    self._connections[connection] = thread
                    thread.start()
            if not has_room:
                connection.close()

    def _serve(self, connection: Connection) -> None:
        """Take a request, and follow what becomes of the workers."""
        try:
            joiner = self._take(connection)
            if joiner is not None:
                self._follow(joiner)
        except PeerError:  # it said nothing in time, or nothing that is valid: it learns that by the end
            pass
        finally:
            connection.close()
            with self._lock:
                del self._connections[connection]

    def _follow(self, joiner: Joiner) -> None:
        """Follow what becomes of the workers of a joiner until its connection ends, and take the rest for killed."""
        try:
            why = joiner.follow()
            if why and not self._is_over:
                self._tell(f"the connection to {joiner.origin}, which has joined, has ended: {why}")
        finally:
            joiner.give_up()

    def _take(self, connection: Connection) -> Joiner | None:
        """Return the process that asks, unless it is refused whatever places there are."""
        request = decode_from_joiner(connection.receive(timeout_s=REQUEST_TIMEOUT_S).header)
        if not isinstance(request, JoinRequest) or not _is_name(str(request.process.machine)):
            raise PeerError("the first message is not a request to join")
        joiner = Joiner(connection, request, self._spec, self._wake)
        refusal = self._objection(connection, request)
        if refusal:
            joiner.refuse(refusal)
            return None
        with self._lock:
            self._requested.append(joiner)
        self._wake()
        return joiner

    def _objection(self, connection: Connection, request: JoinRequest) -> str:
        holder = connection.peer_identity.holder
        if holder.partition("-")[0] not in ("", "any", "worker"):
            return f"its certificate is for {holder}, and not for a worker"
        other = request.process.refusal("`paceline join`")
        if other is not None:
            return other
        if request.program and request.program != self._program:
            return (
                "its script is not the one that the run was started with: run the same file, or give --any-script to "
                "join with another one that trains the same model"
            )
        return ""


def _is_name(text: str) -> bool:
    return 0 < len(text) <= _MAX_NAME and text.isprintable()
