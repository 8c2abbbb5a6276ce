"""How a process takes part as a worker: it finds its place and joins the servers there, or embeds one."""

from __future__ import annotations

import atexit
import os
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline.api.session import Session
from paceline.collective.collectives import Collectives
from paceline.collective.group import WorkerSet
from paceline.core.consistency import Consistency
from paceline.core.messages import Sender
from paceline.core.settings import WorkerSettings
from paceline.data.readers import SessionReaders
from paceline.errors import UsageError
from paceline.job.addresses import data_addresses
from paceline.job.carriers import make_transport, tell_user
from paceline.job.credentials.holders import Holder
from paceline.job.environment import (
    Place,
    allows_plain_collectives,
    checks_memory,
    claim_place,
    find_place,
    inherited_from,
    is_serving,
    wait_timeout_s,
)
from paceline.job.spec import ClusterSpec, wait_spec
from paceline.job.strategy import Distribution
from paceline.launch.lost_servers import how_server_ended
from paceline.launch.preemption import CALLED_OFF_NAME, PreemptionNotice
from paceline.launch.rendezvous.join import enter
from paceline.launch.rendezvous.roster import START_TIMEOUT_S
from paceline.launch.script_exit import when_script_ends
from paceline.model_parallel.arrangement import Arrangement
from paceline.observe.trace import Trace, trace_path
from paceline.server.embedded import Embedded
from paceline.transport.base import Transport
from paceline.transport.memory import MemoryTransport
from paceline.wire.messages import Hello
from paceline.worker.lock import WorkerOptions
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.waits import Waits

if TYPE_CHECKING:
    from paceline.data.sources.reader import Reader
    from paceline.data.sources.recipe import BatchRecipe


@dataclass(slots=True)
class _Process:
    """What this process has joined: as a worker of the job that it was started for at most once."""

    sessions: list[Session] = field(default_factory=list[Session])
    has_joined: bool = False


_process: Final = _Process()

# The session of a worker that is a thread, where the workers of a job are threads of one process.
of_thread: Final[ContextVar[Session]] = ContextVar("paceline_session")


def start(*, transport: Transport | None = None, place: Place | None = None, servers: str | None = None) -> Session:
    """Join the job that this process was started in, or embed one server when it was started alone.

    Blocks until all servers are there and have let this worker take part.

    Args:
        transport: the carrier; by default the one the job's spec names.
        place: which worker of which job this is; by default what the launcher left in the environment.
        servers: where servers are under another launcher than ours; see `paceline.init`.

    Raises:
        PacelineError: no server can be reached in time, or they refuse this worker.
    """
    if place is None:
        bound = of_thread.get(None)
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
        tell_user(
            f"process {os.getpid()} was started by a worker (process {owner}), whose place it does not take: it trains "
            "alone, with a server of its own"
        )
    stay = enter(servers) if place is None and owner is None else None
    place = place if stay is None else stay.place
    if place is None:
        return _noted(_embed())
    with ExitStack() as undo:
        if stay is not None:
            undo.callback(stay.close, politely=False)
        spec = wait_spec(place.spec_path, START_TIMEOUT_S)
        session = join(spec, place, transport or make_transport(spec, Holder("worker", place.rank)))
        undo.pop_all()
    session.server = stay
    claim_place()
    _process.has_joined = True
    return _noted(session)


def _noted(session: Session) -> Session:
    _process.sessions[:] = [*(known for known in _process.sessions if not known.closed), session]
    return session


def open_session() -> Session | None:
    """Return the session that `start` has made last in this process, if it is still open."""
    return next((session for session in reversed(_process.sessions) if not session.closed), None)


def _own_place() -> Place | None:
    """Return the place of this process, which is taken once; raises UsageError the second time."""
    place = find_place()
    if place is not None and _process.has_joined:
        known = open_session()
        advice = (
            "a worker that has left does not come back" if known is None else "use paceline.init(), which returns it"
        )
        raise UsageError(f"this process has joined its job before, as worker {place.rank}: {advice}.")
    return place


def _forget() -> None:
    """Let go of what the parent of this forked process has joined."""
    for session in _process.sessions:
        session.abandon()
    _process.sessions.clear()


os.register_at_fork(after_in_child=_forget)


def join(spec: ClusterSpec, place: Place, transport: Transport, notice: PreemptionNotice | None = None) -> Session:
    """Take part in a job as the worker of this place; with a notice of its own, unless others listen for it."""
    sender = Sender(spec.generation, place.rank, place.incarnation)
    settings = WorkerSettings(sender, spec.num_servers, shares=spec.shares)
    rank, size, run_dir = place.rank, spec.num_workers, Path(spec.run_dir)
    options = WorkerOptions(
        spec.wait_timeout_s, checks_memory=checks_memory(), how_ended=partial(how_server_ended, run_dir)
    )
    node = WorkerNode(settings, transport, spec.addresses, options)
    with ExitStack() as undo:
        undo.callback(node.close)
        node.join()
        meter = StepMetrics(Trace(trace_path(run_dir, "worker", rank), spec.trace_bytes), rank)
        consistency = Consistency.parse(spec.consistency) if spec.consistency else None
        exchange = Collectives(WorkerSet(rank, size, node, run_dir, allows_plain_collectives()))
        among = Arrangement(rank, size, Distribution.parse(spec.strategy) if spec.strategy else Distribution())
        session = Session(rank, size, place.local_rank, node, meter, consistency, spec.scale, exchange, among)
        session.readers = _readers(spec, place, transport, node.waits)
        meter.start_states()
        undo.pop_all()
    session.notice = notice or PreemptionNotice(run_dir / CALLED_OFF_NAME)
    session.notice.may_save = lambda: node.is_failing
    session.notice.listen()
    atexit.register(session.leave_at_exit)
    when_script_ends(lambda well: session.close(politely=well))
    return session


def _readers(spec: ClusterSpec, place: Place, transport: Transport, waits: Waits) -> SessionReaders:
    """Return what reads training examples for this worker: data servers where the job has them, else this process."""
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
    transport = MemoryTransport()
    with ExitStack() as undo:
        checks = checks_memory()
        server = Embedded.start(transport, checks_memory=checks)
        undo.callback(server.close, politely=False)
        settings = WorkerSettings(Sender(1, 0, 0), num_servers=1)
        node = WorkerNode(settings, transport, server.addresses, WorkerOptions(wait_timeout_s(), checks_memory=checks))
        undo.callback(node.close)
        node.join()
        undo.pop_all()
    alone = Collectives(WorkerSet(0, 1, node, None))
    session = Session(0, 1, 0, node, StepMetrics(Trace(None), 0), None, None, alone, Arrangement(0, 1), server)
    session.notice.listen()
    atexit.register(session.leave_at_exit)
    return session
