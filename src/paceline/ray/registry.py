"""The processes of a Ray job as the launcher sees them: where each runs, which files it needs, what it reports."""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, final

import msgspec
from msgspec.structs import replace

from paceline.errors import EXIT_NOT_STARTED, PeerError
from paceline.job.addresses import (
    CLUSTER_NAME,
    SPEC_NAME,
    AddressBook,
    address_path,
    process_name,
    record_server_ended,
)
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import AUTHORITY_NAME, KEYS_NAME, Holder
from paceline.job.folders import names_in
from paceline.job.machines import LOOPBACK
from paceline.job.spec import TOKEN_NAME, write_private
from paceline.job.views import FIRST, View, Views
from paceline.launch.child import NUM_LAST_LINES, Launch
from paceline.launch.crash_policy import describe_exit
from paceline.launch.local import make_spec
from paceline.launch.rendezvous.liveness_lock import VERSION
from paceline.launch.signals import ABORT_MARKER_NAME
from paceline.launch.snapshots import resumption
from paceline.observe.trace import TraceFile, trace_path
from paceline.ray.messages import ActorCommand, ActorReady, News, Role

if TYPE_CHECKING:
    from paceline.launch.output import Console
    from paceline.launch.plan import LocalRun
    from paceline.ray.options import RayOptions

LOST: Final = -signal.SIGKILL  # how a process ends whose actor is gone


@final
class RayRegistry:
    """One job. The launcher's folder has what all tell, also where a process has another.

    Where the folder of a process is: on the launcher's own node that of the launcher; on one other node that of server
    0, which lives longest; on several nodes, and where servers have replicas, each has its own, with a certificate in
    it. There this process decides which process of a server serves (see `job.views`), and gives that to all.
    """

    def __init__(
        self, run: LocalRun, options: RayOptions, run_dir: Path, nodes: Mapping[tuple[str, int], str], here: str
    ) -> None:
        """Write down what is known when all have a place; `nodes` says where, by role and rank."""
        self._run = run
        self._options = options
        self._run_dir = run_dir
        self._nodes = nodes
        where = set(nodes.values())
        self.num_nodes = len(where)
        self._has_replicas = options.replicas > 0
        self.encrypted = self.num_nodes > 1 or self._has_replicas
        self._are_here = where == {here}
        self._is_here = self._are_here and not self.encrypted
        self._folder = str(run_dir) if self._is_here else None
        spec = make_spec(run, run_dir)
        self.resumption = resumption(spec)  # what is told of it, empty for a job that begins anew
        self._trace_bytes, self._traces = spec.trace_bytes, dict[Path, TraceFile]()
        self._authority = Authority.make(spec.job) if self.encrypted else None
        spec = replace(spec, transport="tcp", encrypted=True) if self.encrypted else spec
        if self._has_replicas:
            spec = replace(spec, has_replicas=True, replica_lag=options.lag, launcher_decides=True)
        self._views = [Views(run_dir, rank) for rank in range(run.num_servers if self._has_replicas else 0)]
        for views in self._views:
            views.change(FIRST)
        self._given: set[str] = set()  # files that all processes have got
        spec.write(run_dir / SPEC_NAME)
        self.book = AddressBook(spec)

    @property
    def awaits_folder(self) -> bool:
        """Whether only server 0 can be started yet, because the others are to share its folder."""
        return self._folder is None and not self.encrypted

    def command_for(self, launch: Launch, arrival: ActorReady) -> ActorCommand:
        """Return the command for an actor that is ready; raises PeerError when it runs another version."""
        if arrival.version != VERSION:
            raise PeerError(
                f"{launch.name} is on {arrival.host}, where paceline {arrival.version} is installed, and the launcher "
                f"runs {VERSION}: install the same on all nodes"
            )
        if self.awaits_folder:
            self._folder = arrival.folder
        folder = arrival.folder if self._folder is None else self._folder
        return ActorCommand(
            role=_role(launch),
            name=launch.name,
            rank=launch.rank,
            incarnation=launch.incarnation,
            local_rank=self._local_rank(launch),
            script=str(self._options.script_there(self._run.script)),
            args=self._run.args,
            variables=self._options.variables(),
            files={} if self._is_here else self._files(launch, arrival),
            folder=folder,
            is_followed=not self._is_here,
            cwd=str(Path.cwd()) if self._are_here and self._options.folder(self._run.script) is None else None,
            host=arrival.host if self.encrypted else LOOPBACK,
            traceback=self._run.traceback,
            process=launch.process,
        )

    def store_news(self, launch: Launch, news: News) -> None:
        """Keep what a process has left in its own folder."""
        role = _role(launch)
        if news.address and role != "worker":
            path = address_path(self._run_dir, role, launch.rank)
            if launch.process:
                path = self._views[launch.rank].published(launch.process)
            write_private(path, news.address.encode())
        for view in news.views if launch.rank < len(self._views) else ():
            self._views[launch.rank].decide(View(*view))
        if news.exit_code is not None:
            self.note_end(launch, news.exit_code)
        if news.trace:
            path = trace_path(self._run_dir, role, launch.rank)
            if path not in self._traces:
                self._traces[path] = TraceFile(path, self._trace_bytes)
            self._traces[path].append(news.trace)

    def note_end(self, launch: Launch, exit_code: int) -> None:
        """Keep how a process of a server with a replica has ended."""
        if launch.role == "server" and self._has_replicas:
            record_server_ended(self._run_dir, launch.rank, describe_exit(exit_code), launch.process)

    def missing(self) -> list[str]:
        """Return the names of the servers and replicas that have not said yet where they listen."""
        replicas = [
            f"server {rank}.{FIRST.replica}"
            for rank, views in enumerate(self._views)
            if not views.published(FIRST.replica).exists()
        ]
        return self.book.missing() + replicas

    def take_server_files(self) -> dict[str, bytes]:
        """Return what all processes have to know of servers with replicas, as far as it is new since the last call."""
        new = {name: content for name, content in self._server_files().items() if name not in self._given}
        self._given |= new.keys()
        return new

    def _server_files(self) -> dict[str, bytes]:
        """Return the files that say where processes of servers listen, which of them serve, and how others ended."""
        stems = tuple(f"{process_name(rank, 0)}." for rank in range(len(self._views)))
        names = sorted(name for name in names_in(self._run_dir) if name.startswith(stems)) if stems else []
        return {name: (self._run_dir / name).read_bytes() for name in names}

    def close(self) -> None:
        """Close what it keeps open; nothing is kept any more."""
        for trace in self._traces.values():
            trace.close()

    def read_file(self, name: str) -> dict[str, bytes]:
        """Return a file of the launcher's folder for processes that do not see it, if it exists."""
        path = self._run_dir / name
        return {} if self._is_here or not path.exists() else {name: path.read_bytes()}

    def data_addresses(self) -> dict[str, bytes]:
        """Return the files that say where data servers listen now, for workers that have a folder of their own."""
        ranks = range(self._run.num_data_servers if self.encrypted else 0)  # on one node they write where all look
        paths = (address_path(self._run_dir, "data", rank) for rank in ranks)
        return {name: content for path in paths for name, content in self.read_file(path.name).items()}

    def _local_rank(self, launch: Launch) -> int:
        """Count the workers of lower rank on the same node; a server has no use for that."""
        if launch.role != "worker":
            return 0
        here = self._nodes["worker", launch.rank]
        return sum(self._nodes["worker", rank] == here for rank in range(launch.rank))

    def _files(self, launch: Launch, arrival: ActorReady) -> dict[str, bytes]:
        names = (SPEC_NAME, CLUSTER_NAME, TOKEN_NAME, ABORT_MARKER_NAME)
        known = {name: content for each in names for name, content in self.read_file(each).items()}
        known |= self._server_files()
        return known | (self.data_addresses() if launch.role == "worker" else {}) | self._keys(launch, arrival)

    def _keys(self, launch: Launch, arrival: ActorReady) -> dict[str, bytes]:
        """Sign for the key that the actor has made; the authority's own key never leaves this process."""
        if self._authority is None:
            return {}
        holder = Holder(_role(launch), launch.rank)
        return {
            f"{KEYS_NAME}/{AUTHORITY_NAME}.pem": self._authority.pem,
            f"{KEYS_NAME}/{holder}.pem": self._authority.sign(arrival.request, holder),
        }


def _role(launch: Launch) -> Role:
    assert launch.role != "fork-server", "a cluster has no fork server"
    return launch.role


class Method(Protocol):
    """A method of an actor, to be called from elsewhere."""

    def remote(self, *arguments: object) -> object:
        """Call it; return what stands for its answer."""
        ...

    def options(self, *, concurrency_group: str) -> Method:
        """Return the same method, to be carried out by the threads of this name."""
        ...


class ActorHandle(Protocol):
    """What Ray makes of a `ProcessActor`: its methods, callable from elsewhere."""

    report_ready: Method
    start: Method
    news: Method
    send_line: Method
    signal: Method
    write_file: Method


@final
class RemoteProcess:
    """A process in an actor, seen from the launcher. Nothing here blocks.

    One question to the actor is always open, `question`; its answer goes to `handle_answer`.
    """

    def __init__(
        self,
        launch: Launch,
        actor: ActorHandle,
        registry: RayRegistry,
        console: Console,
        kill: Callable[[ActorHandle], None],
        deadline_s: float,
    ) -> None:
        """Ask the actor where it is; it has until `deadline_s` (monotonic) to say it."""
        self.launch = launch
        self.last_lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
        self._actor = actor
        self._registry = registry
        self._console = console
        self._kill = kill
        self._deadline_s = deadline_s
        self._is_killed = False
        self._exit_code: int | None = None
        self._arrived = False
        self.question: Any = actor.report_ready.remote(launch.role, launch.rank, registry.encrypted)

    @property
    def name(self) -> str:
        """What it is called in messages: "worker 0"."""
        return self.launch.name

    @property
    def pid(self) -> int | None:
        """Its number is that of another machine, and not told."""
        return None

    def reap(self) -> int | None:
        """Return its exit code, or None while it runs."""
        return self._exit_code

    def signal(self, number: int) -> None:
        """Send a signal to the process, after what it has to know of it."""
        for name, content in self._registry.read_file(ABORT_MARKER_NAME).items():
            self.write_file(name, content)
        self._actor.signal.remote(number)

    def send_line(self, line: str) -> None:
        """Write a line to its standard input."""
        self._actor.send_line.remote(line)

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file into its folder."""
        self._actor.write_file.remote(name, content)

    def kill(self) -> None:
        """Kill the actor, and with it the process and all that it started."""
        self._is_killed = True
        self._kill(self._actor)

    def handle_answer(self, answer: bytes) -> bool:
        """Handle the answer to the open question, and ask the next one; return whether it has an address."""
        listens = False
        if self._arrived:
            listens = self._handle_news(msgspec.msgpack.decode(answer, type=News))
        else:
            order = self._registry.command_for(self.launch, msgspec.msgpack.decode(answer, type=ActorReady))
            self._actor.start.remote(msgspec.msgpack.encode(order))
            self._arrived = True
        self.question = self._actor.news.options(concurrency_group="news").remote()
        return listens

    def is_late(self, now_s: float) -> bool:
        """Return whether the actor has missed its deadline to be ready (`now_s`: monotonic)."""
        return not self._arrived and self._exit_code is None and now_s >= self._deadline_s

    def wait_for_room(self) -> None:
        """Have the actor take its time from now on."""
        self._deadline_s = math.inf

    def mark_lost(self, cause: str) -> None:
        """Record that the actor is gone, and kill it in case it only cannot be reached.

        A process that never starts counts as a mistake that would recur, not as a crash.
        """
        if not self._is_killed:
            self._relay_line(cause, to_stderr=True)
        self._exit_code = LOST if self._arrived or self.launch.incarnation else EXIT_NOT_STARTED
        self._registry.note_end(self.launch, self._exit_code)
        self.kill()

    def _handle_news(self, news: News) -> bool:
        for to_stderr, line in news.lines:
            self._relay_line(line, to_stderr=to_stderr)
        self._registry.store_news(self.launch, news)
        self._exit_code = news.exit_code
        return bool(news.address)

    def _relay_line(self, line: str, *, to_stderr: bool) -> None:
        if to_stderr:
            self.last_lines.append(line)
        self._console.relay(self.name, self.launch.rank, line, to_stderr=to_stderr)
