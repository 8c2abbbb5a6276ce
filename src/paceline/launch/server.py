"""The entry of a server process: `python -m paceline.launch.server SPEC RANK [HOST [PROCESS]]`.

It listens, publishes its address, and serves until its standard input says `stop`. The end of that input means that
the launcher is gone: then it ends at once.
"""

import socket
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Final

import msgspec

from paceline.core.consistency import Consistency
from paceline.core.server import LEAD
from paceline.core.settings import ServerSettings
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.carriers import listen_address, make_transport
from paceline.job.credentials.holders import Holder
from paceline.job.credentials.revocation import revoked_path, watching_revoked
from paceline.job.environment import checks_memory, memory_descriptor
from paceline.job.folders import INTERVAL_SHARED_S, wait_for
from paceline.job.machines import LOOPBACK, cores_here, server_threads
from paceline.job.spec import ClusterSpec, wait_spec, write_private
from paceline.job.views import FIRST, Views
from paceline.launch.entry import read_orders, report_unknown_order, run_program
from paceline.launch.folder_watch import FolderWatch
from paceline.launch.rendezvous.node_places import is_to_hand_over, on_other_nodes
from paceline.notices import tell
from paceline.observe.trace import Trace, trace_path
from paceline.server.journal import LISTENER
from paceline.server.node import ServerNode
from paceline.server.record_file import RecordFile, record_path
from paceline.server.replica import Follower
from paceline.server.replica_lag import ReplicaLag
from paceline.server.replica_link import ReplicaLink
from paceline.server.replica_place import ReplicaPlace
from paceline.transport.base import HandsOver, Listener, SocketListener, Transport
from paceline.transport.lasting_memory import LastingMemory

_TOLD: Final = "its process ended, as its launcher has told"


def server_settings(spec: ClusterSpec, rank: int) -> ServerSettings:
    """Return what the core of this server is told."""
    return ServerSettings(
        rank,
        spec.num_servers,
        generation=spec.generation,
        workers=tuple(spec.first_workers),
        join_timeout_s=spec.join_timeout_s,
        lease_s=spec.lease_s,
        shares=spec.shares,
        clock=spec.clock,
    )


def threads_here(consistency: Consistency, spec: ClusterSpec) -> int:
    """Return with how many threads this server updates a table, on the cores that it was left."""
    return server_threads(consistency, len(cores_here()), spec.num_servers, spec.num_workers)


def lasting_memory() -> LastingMemory | None:
    """Return the memory that the launcher keeps for this server and its successors, where it does."""
    descriptor = memory_descriptor()
    if descriptor is None:
        return None
    return LastingMemory.connect(socket.socket(fileno=descriptor))


def open_listener(transport: Transport, memory: LastingMemory | None, published: Path, address: str) -> Listener:
    """Listen at this address; in the place of another process, at the one that it has published, and on its socket."""
    if memory is None:
        return transport.listen(address)
    if memory.has(LISTENER) and isinstance(transport, HandsOver):
        return transport.listen_again(published.read_text(), memory.descriptor(LISTENER))
    listener = transport.listen(published.read_text() if memory.is_successor else address)
    if not isinstance(listener, SocketListener):
        return listener
    with suppress(OSError):  # then a process in the place of this one listens anew
        memory.keep(LISTENER, listener.fileno())
    return listener


def record_file(spec: ClusterSpec, rank: int) -> RecordFile | None:
    """Return the record of a server, where the job keeps them."""
    path = record_path(Path(spec.run_dir), rank)
    return RecordFile(path, spec.record_bytes, tell) if spec.record_bytes else None


class ReplicaNews(msgspec.Struct, frozen=True):
    """What the folder of a job says to a process that serves.

    Attributes:
        has_come: whether a process has come that may be its replica.
        hands_over: whether its replica is to serve in its place.
    """

    has_come: bool = False
    hands_over: bool = False


def look_for_news(spec: ClusterSpec, rank: int, views: Views, own: int) -> ReplicaNews:
    """Look into the folder for process `own` of a server; raises OSError."""
    hands_over = not spec.launcher_decides and is_to_hand_over(Path(spec.run_dir), rank, own)
    return ReplicaNews(bool(candidates(spec, rank, views, own)), hands_over)


def candidates(spec: ClusterSpec, rank: int, views: Views, own: int) -> list[int]:
    """Return the processes that may be the replica of process `own` of a server, the newest first; raises OSError."""
    found = views.candidates()
    return found if spec.launcher_decides else on_other_nodes(Path(spec.run_dir), rank, own, found)


def replica_link(
    spec: ClusterSpec, rank: int, views: Views, transport: Transport, own: int, news: Callable[[], ReplicaNews]
) -> ReplicaLink:
    """Return how a server reaches its replica, where the job has replicas; its first process, 0, has one at once."""
    if not spec.has_replicas:
        return ReplicaLink(record=record_file(spec, rank))

    def place(view: int, address: Callable[[], str], process: int) -> ReplicaPlace:
        return ReplicaPlace(rank, view, views, address, transport, tell, spec.generation, process)

    def find() -> list[ReplicaPlace]:
        # Without news the folder is not asked: it may be of a file server that does not answer.
        view = views.newest() if news().has_come else None
        if view is None:
            return []
        return [
            place(view.number + 1, views.published(one).read_text, one) for one in candidates(spec, rank, views, own)
        ]

    first = place(FIRST.number, partial(first_replica_address, spec, rank, views), FIRST.replica)
    lag = ReplicaLag(spec.replica_lag) if spec.replica_lag else None
    return ReplicaLink(first if own == FIRST.head else None, find, lambda: news().hands_over, lag=lag)


def first_replica_address(spec: ClusterSpec, rank: int, views: Views) -> str:
    """Return where the first replica of a server listens; blocks until it does, raises DeadlineExceeded."""
    path = views.published(FIRST.replica)
    return wait_for(
        lambda: path.read_text() if path.exists() else None,
        spec.join_timeout_s,
        lambda: (
            f"the replica of server {rank} did not come within {spec.join_timeout_s:g} s: look at what the first "
            "worker of the next machine wrote"
        ),
        INTERVAL_SHARED_S,
    )


def serve(
    spec: ClusterSpec,
    rank: int,
    obey: Callable[[ServerNode], None],
    host: str = LOOPBACK,
    *,
    process: int = FIRST.head,
) -> None:
    """Serve one shard of the job; blocks until told to stop by `obey`, which runs in a thread of its own.

    By TCP it listens at `host`, an address of this machine. `process`: which one it is of those of its server.
    """
    run_dir = Path(spec.run_dir)
    memory = lasting_memory()
    transport = make_transport(spec, Holder("server", rank))
    views = Views(run_dir, rank, launcher_decides=spec.launcher_decides)
    is_replica = process != FIRST.head
    published = views.published(process)
    listener = open_listener(transport, memory, published, listen_address(spec, rank, host))

    @cache
    def first_addresses() -> tuple[str, ...]:
        return wait_spec(run_dir / CLUSTER_NAME, spec.join_timeout_s).addresses

    def addresses() -> tuple[str, ...]:
        if not spec.has_replicas:
            return first_addresses()
        return tuple(Views(run_dir, other).address() or first for other, first in enumerate(first_addresses()))

    # A replica writes none: it would say the same as that of its server once more.
    trace = Trace(None if is_replica else trace_path(run_dir, "server", rank), spec.trace_bytes)
    settings = server_settings(spec, rank)
    watch = FolderWatch(
        lambda: look_for_news(spec, rank, views, process),
        ReplicaNews(),
        f"server {rank} cannot see whether a replica comes or its machine is to leave",
    )
    timeout_s, lag = spec.join_timeout_s, spec.replica_lag
    node = ServerNode(
        settings,
        listener,
        transport,
        addresses,
        trace,
        full_trace=spec.trace == "full",
        checks_memory=checks_memory(),
        num_threads=lambda consistency: spec.server_threads or threads_here(consistency, spec),
        memory=memory,
        tell=tell,
        note_given_up=_tell_given_up if rank == LEAD else lambda _, __: None,
        replica=replica_link(spec, rank, views, transport, process, lambda: watch.seen),
        follows=Follower(rank, views, listener, timeout_s, tell, lag=lag) if is_replica else None,
    )
    threading.Thread(target=obey, args=(node,), name="paceline-orders", daemon=True).start()
    write_private(published, listener.address.encode())
    with watch if spec.has_replicas else nullcontext(), watching_revoked(revoked_path(spec), node.expel):
        node.run()


def _tell_given_up(worker: int, reason: str) -> None:
    if reason != _TOLD:
        tell(f"worker {worker} is given up: {reason}; the others go on without it")


def _obey(node: ServerNode) -> None:
    for words in read_orders():
        match words:
            case ["ended", worker, incarnation]:
                node.report_death(int(worker), int(incarnation), _TOLD)
            case ["stop"]:
                node.stop()
                return
            case _:
                report_unknown_order(words, "server")


def main() -> None:
    """Serve as the command line says; the launcher stops the servers last."""
    spec, rank, *place = sys.argv[1:]
    host = place[0] if place else LOOPBACK
    process = int(place[1]) if len(place) > 1 else FIRST.head
    run_program(lambda: serve(ClusterSpec.read(Path(spec)), int(rank), _obey, host, process=process))


if __name__ == "__main__":
    main()
