"""Assembles a `Session`: the one place that joins servers as a worker and puts the worker's parts together."""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from pathlib import Path

import msgspec

from paceline.api.session import Session
from paceline.collective.collectives import Collectives
from paceline.collective.group import WorkerSet
from paceline.core.consistency import Consistency
from paceline.core.settings import WorkerSettings
from paceline.job.strategy import Distribution
from paceline.launch.script_exit import when_script_ends
from paceline.launch.signals import PreemptionNotice
from paceline.model_parallel.arrangement import Arrangement
from paceline.observe.trace import Trace
from paceline.snapshots.folder import Snapshot
from paceline.snapshots.taking import SavedJob, SnapshotPlan
from paceline.transport.base import Transport
from paceline.update.table import Scale
from paceline.worker.metrics import StepMetrics
from paceline.worker.node import WorkerNode
from paceline.worker.waits import WorkerOptions


class SessionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a session is made from. The defaults are those of a worker without a launcher.

    Args:
        settings: which worker this is, and how many servers there are.
        transport: leads to the servers.
        addresses: of the servers, by rank.
        options: how patient the worker is.
        size: number of workers.
        local_rank: number of this worker on its machine.
        consistency: what the launcher was told, if anything.
        scale: what the launcher was told, if anything.
        divide_lr: whether the launcher was told to divide learning rates.
        distribution: how workers share the work, as the launcher was told.
        run_dir: the folder of the job, where there is one.
        trace_path: where this worker writes its trace; None for no trace.
        trace_bytes: bound of the trace; 0 keeps all of it.
        allows_plain_collectives: whether collective calls may travel between machines unencrypted.
        uses_gloo: whether collective calls go over Gloo on one machine, too.
        apart: why workers can make no collective calls, and what to do; empty where they can.
        is_elastic: whether workers come and go while the job runs.
        publish_every: clocks, after which the models are published; 0 for never.
        snapshots: where and how often the job keeps snapshots.
        resume: the snapshot that it goes on from.
    """

    settings: WorkerSettings
    transport: Transport
    addresses: tuple[str, ...]
    options: WorkerOptions
    size: int
    local_rank: int = 0
    consistency: Consistency | None = None
    scale: Scale | None = None
    divide_lr: bool = False
    distribution: Distribution = msgspec.field(default_factory=Distribution)
    run_dir: Path | None = None
    trace_path: Path | None = None
    trace_bytes: int = 0
    allows_plain_collectives: bool = False
    uses_gloo: bool = False
    apart: str = ""
    is_elastic: bool = False
    publish_every: int = 0
    snapshots: SnapshotPlan | None = None
    resume: Path | None = None


def assemble_session(config: SessionConfig, notice: PreemptionNotice | None = None) -> Session:
    """Join the servers, and return the session; it is closed when the process ends. Blocks until they have answered.

    A worker that joins late does so when it first needs the servers.

    Args:
        config: what the session is made from.
        notice: tells when this process is preempted; by default one that knows of no job.

    Raises:
        PacelineError: a server cannot be reached in time, or refuses this worker.
    """
    rank, size = config.settings.sender.worker, config.size
    node = WorkerNode(config.settings, config.transport, config.addresses, config.options)
    with ExitStack() as undo:
        undo.callback(node.close)
        if not config.options.joins_late:
            node.join()
        metrics = StepMetrics(Trace(config.trace_path, config.trace_bytes), rank, meeting=node.waits.meeting)
        workers = WorkerSet(
            rank,
            size,
            node,
            config.run_dir,
            config.allows_plain_collectives,
            apart=config.apart,
            gloo=config.uses_gloo,
        )
        session = Session(
            rank,
            size,
            config.local_rank,
            node,
            metrics,
            config.consistency,
            config.scale,
            Collectives(workers),
            Arrangement(rank, size, config.distribution),
            notice=notice or PreemptionNotice(),
            divide_lr=config.divide_lr,
            is_elastic=config.is_elastic,
            publish_every=config.publish_every,
            snapshot_plan=config.snapshots,
            saved=None if config.resume is None else SavedJob(Snapshot.read(config.resume)),
        )
        if config.trace_path is not None:
            metrics.start_states()
        undo.pop_all()
    session.notice.may_save = lambda: node.is_failing
    session.notice.listen()
    atexit.register(session.leave_at_exit)
    return session


def close_with_script(session: Session) -> None:
    """Close the session when the script of this process ends: after an error without waiting for other workers."""
    when_script_ends(lambda well: session.close(politely=well))
