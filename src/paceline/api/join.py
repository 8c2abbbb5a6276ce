"""Joins a job as a worker: finds the place of this process and joins its servers, or embeds one server."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from paceline.api.assembly import SessionConfig, assemble_session, close_with_script
from paceline.api.session import Session
from paceline.core.consistency import Consistency
from paceline.core.messages import Sender
from paceline.core.settings import WorkerSettings
from paceline.data.sources.reader import SessionReaders
from paceline.errors import PacelineError, UsageError
from paceline.job.addresses import data_addresses
from paceline.job.carriers import make_transport
from paceline.job.credentials.holders import Holder
from paceline.job.environment import (
    Place,
    allows_plain_collectives,
    asked_servers,
    asks_for_gloo,
    checks_memory,
    claim_place,
    find_place,
    inherited,
    inherited_from,
    is_serving,
    wait_timeout_s,
)
from paceline.job.spec import ClusterSpec, wait_spec
from paceline.job.strategy import Distribution
from paceline.job.views import Views
from paceline.launch.limits import explain, is_shortage
from paceline.launch.rendezvous.detect import detect
from paceline.launch.signals import ABORT_MARKER_NAME, PreemptionNotice
from paceline.notices import set_rank, tell
from paceline.observe.trace import trace_path
from paceline.snapshots.taking import SnapshotPlan
from paceline.transport.base import Transport
from paceline.transport.memory import MemoryTransport
from paceline.wire.messages import Hello
from paceline.worker.waits import Waits, WorkerOptions

if TYPE_CHECKING:
    from paceline.data.sources.declared import BatchRecipe
    from paceline.data.sources.reader import Reader
    from paceline.launch.rendezvous.join import JoinedJob


SPEC_TIMEOUT_S: Final = 300.0  # longer than a launcher waits for servers, which knows better why one is late

_COME_AND_GO: Final = (
    "the workers of this job come and go (--workers 2:8). Use tables and strategies of the parameter server, or a "
    "fixed number of workers."
)


@dataclass(slots=True)
class _ProcessSessions:
    """The sessions of this process; at most one is of the job that the process was started for."""

    sessions: list[Session] = field(default_factory=list[Session])
    has_joined: bool = False


_of_process: Final = _ProcessSessions()

# The session of a worker that is a thread.
thread_session: Final[ContextVar[Session]] = ContextVar("paceline_session")


def start(*, transport: Transport | None = None, place: Place | None = None, servers: str | None = None) -> Session:
    """Join the job that this process was started in; without a launcher, embed one server.

    Blocks until all servers have accepted this worker.

    Args:
        transport: the carrier. Default: the one in the job's spec.
        place: which worker of which job this is. Default: what the launcher set in the environment.
        servers: where servers run under another launcher; see `paceline.init`.

    Raises:
        PacelineError: no server can be reached in time, or they refuse this worker.
    """
    if place is None:
        bound = thread_session.get(None)
        if bound is not None and not bound.closed:
            return bound
        place = _own_place()
    if place is None and is_serving():
        raise UsageError(
            "this process is a server of a job, which has imported a script that trains. Put what servers import into "
            "a module of its own, or what trains under `if __name__ == '__main__':`"
        )
    owner = inherited_from()
    if owner is not None and place is None:
        tell(
            f"process {os.getpid()} was started by a worker (process {owner}), whose place it does not take: it trains "
            "alone, with a server of its own"
        )
    stay = _join_started_job(servers) if place is None and owner is None else None
    place = place if stay is None else stay.place
    if place is None:
        with _explained():
            return _noted(_embed())
    with _explained(), ExitStack() as undo:
        if stay is not None:
            undo.callback(stay.close, politely=False)
        spec = wait_spec(place.spec_path, SPEC_TIMEOUT_S)
        session = join(spec, place, transport or make_transport(spec, Holder("worker", place.rank)))
        undo.pop_all()
    if stay is not None:
        session.server = replace(stay, was_preempted=lambda: session.notice.told_at_s is not None)
    claim_place()
    _of_process.has_joined = True
    return _noted(session)


@contextmanager
def _explained() -> Generator[None]:
    """Say in one sentence that this process may start no more threads."""
    try:
        yield
    except RuntimeError as error:
        if not is_shortage(error):
            raise
        raise PacelineError(f"this process cannot join: {explain(error)}") from error


def _join_started_job(servers: str | None) -> JoinedJob | None:
    """Enter the job of another launcher, if there is one: only then is what that takes imported."""
    if servers is None and asked_servers() is None and detect(inherited()) is None:
        return None
    from paceline.launch.rendezvous.join import join_started_job

    return join_started_job(servers)


def _noted(session: Session) -> Session:
    _of_process.sessions[:] = [*(known for known in _of_process.sessions if not known.closed), session]
    set_rank(session.rank)
    return session


def open_session() -> Session | None:
    """Return the newest session of `start` that is still open, if any."""
    return next((session for session in reversed(_of_process.sessions) if not session.closed), None)


def _own_place() -> Place | None:
    """Return the place of this process; raises UsageError when it has been used."""
    place = find_place()
    if place is not None and _of_process.has_joined:
        known = open_session()
        advice = (
            "a worker that has left does not come back" if known is None else "use paceline.init(), which returns it"
        )
        raise UsageError(f"this process has joined its job before, as worker {place.rank}: {advice}.")
    return place


def _forget() -> None:
    """Abandon the sessions that this forked process has from its parent."""
    for session in _of_process.sessions:
        session.abandon()
    _of_process.sessions.clear()


os.register_at_fork(after_in_child=_forget)


def join(spec: ClusterSpec, place: Place, transport: Transport, notice: PreemptionNotice | None = None) -> Session:
    """Join a launched job as the worker of this place.

    `notice` is given where several workers share a process, and only one notice can listen for signals.
    """
    run_dir = Path(spec.run_dir)
    views = [Views(run_dir, server) for server in range(spec.num_servers)]
    config = SessionConfig(
        settings=WorkerSettings(
            Sender(spec.generation, place.rank, place.incarnation),
            spec.num_servers,
            shares=spec.shares,
            keeps_pushes=spec.replica_lag > 0,
        ),
        transport=transport,
        addresses=spec.addresses,
        options=WorkerOptions(
            spec.wait_timeout_s,
            spec.lease_s,
            checks_memory=checks_memory(),
            how_ended=lambda server: views[server].how_ended(),
            where=(lambda server: views[server].address()) if spec.has_replicas else (lambda _: ""),
            joins_late=spec.is_elastic and place.incarnation > 0,
        ),
        size=spec.num_workers,
        local_rank=place.local_rank,
        consistency=Consistency.parse(spec.consistency) if spec.consistency else None,
        scale=spec.scale,
        divide_lr=spec.divide_lr,
        distribution=Distribution.parse(spec.strategy) if spec.strategy else Distribution(),
        run_dir=run_dir,
        trace_path=trace_path(run_dir, "worker", place.rank),
        trace_bytes=spec.trace_bytes,
        allows_plain_collectives=allows_plain_collectives(),
        uses_gloo=asks_for_gloo(),
        apart=_COME_AND_GO if spec.is_elastic else "",
        is_elastic=spec.is_elastic,
        publish_every=spec.publish_every,
        snapshots=_snapshot_plan(spec),
        resume=Path(spec.resume) if spec.resume else None,
    )
    session = assemble_session(config, notice or PreemptionNotice(run_dir / ABORT_MARKER_NAME))
    session.readers = _readers(spec, place, transport, session.node.waits)
    close_with_script(session)
    return session


def _snapshot_plan(spec: ClusterSpec) -> SnapshotPlan | None:
    if not spec.snapshots:
        return None
    return SnapshotPlan(Path(spec.snapshots), spec.snapshot_every_s or None, spec.snapshots_kept)


def _readers(spec: ClusterSpec, place: Place, transport: Transport, waits: Waits) -> SessionReaders:
    """Return what reads training examples: data servers where the job has them, else this process."""
    if not spec.num_data_servers:
        return SessionReaders()
    hello = Hello("worker", place.rank, place.incarnation, spec.generation)

    def open_reader(recipe: BatchRecipe, prefetch: int) -> Reader:
        from paceline.data.service.client import ReaderOptions, RemoteReader

        options = ReaderOptions(prefetch=prefetch)
        return RemoteReader(recipe, lambda: data_addresses(spec), transport, hello, options, waits)

    return SessionReaders(open_reader)


def _embed() -> Session:
    """Start one server in this process and join it as the only worker."""
    from paceline.server.embedded import EmbeddedServer

    transport = MemoryTransport(maps=True)  # values and gradients are not copied
    with ExitStack() as undo:
        server = EmbeddedServer.start(transport, "memory://server-0", checks_memory=checks_memory())
        undo.callback(server.close, politely=False)
        session = assemble_session(
            SessionConfig(
                settings=WorkerSettings(Sender(1, 0, 0), num_servers=1),
                transport=transport,
                addresses=server.addresses,
                options=WorkerOptions(wait_timeout_s(), checks_memory=checks_memory()),
                size=1,
            )
        )
        undo.pop_all()
    session.server = server
    return session
