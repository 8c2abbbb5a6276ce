"""The launcher's registry of a Ray job: where each process runs, which files it needs, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, final

from paceline.errors import PeerError
from paceline.job.addresses import CLUSTER_NAME, SPEC_NAME, AddressBook, address_path
from paceline.job.credentials.certificates import Authority
from paceline.job.credentials.holders import AUTHORITY_NAME, KEYS_NAME, Holder
from paceline.job.machines import LOOPBACK
from paceline.job.spec import TOKEN_NAME, write_private
from paceline.launch.local import make_spec
from paceline.launch.preemption import ABORT_MARKER_NAME
from paceline.launch.rendezvous.liveness_lock import VERSION
from paceline.observe.trace import TraceFile, trace_path
from paceline.ray.messages import ActorCommand, ActorReady, News, Role

if TYPE_CHECKING:
    from paceline.launch.child import Launch
    from paceline.launch.plan import LocalRun
    from paceline.ray.options import RayOptions


@final
class RayRegistry:
    """One job. The launcher's folder has what all tell, also where a process has another.

    Where the folder of a process is: on the launcher's own node that of the launcher; on one other node that of server
    0, which lives longest; on several nodes each has its own, with a certificate in it.
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
        self.encrypted = self.num_nodes > 1
        self._is_here = where == {here}
        self._folder = str(run_dir) if self._is_here else None
        spec = make_spec(run, run_dir)
        self._trace_bytes, self._traces = spec.trace_bytes, dict[Path, TraceFile]()
        self._authority = Authority.make(spec.job) if self.encrypted else None
        spec = replace(spec, transport="tcp", encrypted=True) if self.encrypted else spec
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
            cwd=str(Path.cwd()) if self._is_here and self._options.folder(self._run.script) is None else None,
            host=arrival.host if self.encrypted else LOOPBACK,
            traceback=self._run.traceback,
        )

    def store_news(self, launch: Launch, news: News) -> None:
        """Keep what a process has left in its own folder."""
        role = _role(launch)
        if news.address and role != "worker":
            write_private(address_path(self._run_dir, role, launch.rank), news.address.encode())
        if news.trace:
            path = trace_path(self._run_dir, role, launch.rank)
            if path not in self._traces:
                self._traces[path] = TraceFile(path, self._trace_bytes)
            self._traces[path].append(news.trace)

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
