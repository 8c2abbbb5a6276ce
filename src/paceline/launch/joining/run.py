"""Starts workers in places of a run that another launcher supervises: what `paceline join` does."""

import os
import signal
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, final

import msgspec
from msgspec.structs import replace

from paceline.errors import EXIT_FAILURE, EXIT_PREEMPTED, PeerError, UsageError
from paceline.job.addresses import CLUSTER_NAME
from paceline.job.environment import Place, child_environment, inherited, kept_runs_folder
from paceline.job.machines import cores_here
from paceline.job.spec import ClusterSpec
from paceline.launch.child import Launch
from paceline.launch.crash_policy import CrashPolicy
from paceline.launch.forkserver.subreaper import Orphans
from paceline.launch.guard import Guard, clear
from paceline.launch.joining.connection import RunAddress, RunConnection, find_run_address
from paceline.launch.joining.messages import JoinAccepted, JoinRequest, WorkerOrder, program_digest
from paceline.launch.joining.traces import TraceSender
from paceline.launch.local import (
    GUARD_TIMEOUT_S,
    TRACE_NAME,
    LocalBackend,
    make_temporary,
    open_fork_server,
    require_startable,
)
from paceline.launch.output import Console, unblocked_output
from paceline.launch.plan import LocalRun, Programs, plan_workers
from paceline.launch.rendezvous.liveness_lock import ProcessInfo
from paceline.launch.signals import ABORT_MARKER_NAME, Signals
from paceline.launch.supervise import Exits, SupervisionConfig, Supervisor
from paceline.launch.supervision import Member

SUBJECT: Final = "paceline join"


class JoinOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What `paceline join` was told: which run, how many workers, and what these run.

    `address` is the folder of the run, or HOST:PORT where it listens; then `keys` is a folder of certificates.
    """

    address: str
    script: Path
    args: tuple[str, ...] = ()
    module: str | None = None
    num_workers: int = 1
    keys: Path | None = None
    any_script: bool = False
    quiet: bool = False
    traceback: bool = False

    def validate(self) -> None:
        """Raise UsageError for a number that makes no workers."""
        if self.num_workers < 1:
            raise UsageError(f"--workers must be at least 1, got {self.num_workers}")

    def request(self, address: RunAddress) -> JoinRequest:
        """Return what the run is asked."""
        program = "" if self.any_script else program_digest(self.script)
        return JoinRequest(
            self.num_workers, ProcessInfo.own(), os.getpid(), program, address.ranks, shares_folder=address.is_here
        )


@final
class JoiningBackend:
    """Starts workers on this machine, tells the run of their ends, and does with them what the run says."""

    def __init__(
        self,
        inner: LocalBackend,
        run: RunConnection,
        console: Console,
        signals: Signals,
        run_dir: Path,
        traces: TraceSender | None,
    ) -> None:
        """Start them by `inner`; an order of the run to end at once is obeyed as if it were a signal to this process.

        In `run_dir` workers are told that nothing is worth finishing. Without traces, workers write theirs where the
        run reads them.
        """
        self._inner = inner
        self._run = run
        self._console = console
        self._signals = signals
        self._run_dir = run_dir
        self._traces = traces
        self._workers: dict[int, Member] = {}  # that run, by rank
        self.is_cut_off = False

    def prepare(self) -> Sequence[Member]:
        """Start the fork server, if there is one."""
        return self._inner.prepare()

    def settled(self) -> bool:
        """Return whether processes can be started now."""
        return self._inner.settled()

    def start(self, launch: Launch) -> Member:
        """Start a worker."""
        member = self._inner.start(launch)
        self._workers[launch.rank] = member
        return member

    def wait(self, timeout_s: float) -> None:
        """Block until something happens or `timeout_s` have passed, and obey the run."""
        self._inner.wait(timeout_s)
        for order in self._run.orders():
            self._obey(order)
        self._send_traces(whole=False)
        if self._run.lost and self._workers and not self.is_cut_off:
            self.is_cut_off = True
            self._console.announce(f"the run is out of reach ({self._run.lost}): the workers here end at once")
            for worker in self._workers.values():
                worker.kill()

    def release(self, member: Member) -> None:
        """Tell the run how a worker has ended; one that was told to leave before it had begun has left."""
        code = member.reap()
        self._inner.release(member)
        self._send_traces(whole=True)
        if self._workers.get(member.launch.rank) is member and code is not None:
            del self._workers[member.launch.rank]
            self._run.report(member.launch.rank, EXIT_PREEMPTED if code == -signal.SIGTERM else code)

    def close(self) -> None:
        """Release what is left."""
        self._inner.close()

    def _send_traces(self, *, whole: bool) -> None:
        if self._traces is None:
            return
        try:
            if whole:
                self._traces.send_rest()
            else:
                self._traces.send_news()
        except (OSError, UsageError) as error:
            self._traces = None
            self._console.announce(f"what workers write down is no longer sent to the run: {error}. Training goes on")

    def _obey(self, told: WorkerOrder) -> None:
        worker = self._workers.get(told.rank)
        if told.order == "end":
            with suppress(OSError):  # a full disk, say: then they finish their step
                (self._run_dir / ABORT_MARKER_NAME).touch()
            self._signals.add(signal.SIGINT)
        elif worker is not None and told.order == "kill":
            worker.kill()
        elif worker is not None:
            worker.signal(signal.SIGTERM)


@final
class NoServers:
    """The rendezvous with the servers of this launcher, which has none: those of the run listen already."""

    def poll(self) -> bool:
        """Return True."""
        return True

    def missing(self) -> list[str]:
        """Return nothing."""
        return []


def join_run(order: JoinOrder, programs: Programs) -> int:
    """Start workers that join a run, and watch over them until they have ended.

    Blocks, and returns the exit code: 0 when all have ended well or have left as the run told them, else that of
    `paceline run` for such an end, 130 after Ctrl-C, 1 when the run is out of reach. Call it from the main thread.

    Raises:
        UsageError: there is no such run, or the script cannot be run.
        Refused: the run takes no workers, with its reason.
        PeerError: the run cannot be reached.
    """
    order.validate()
    require_startable(order.script, "join_run")
    with _own_folder() as (folder, guard):
        address = find_run_address(order.address, order.num_workers, order.keys, folder)
        with RunConnection(address) as run:
            accepted = run.ask(order.request(address))
            spec, path = _spec_here(accepted, address)
            return _supervise(order, programs, spec, _places(accepted, address, path), folder, guard, run)


@contextmanager
def _own_folder() -> Generator[tuple[Path, Guard]]:
    """Have a temporary folder for this process, and a guard over what it starts."""
    folder = make_temporary()
    guard = Guard(folder, temporary=True, keep_in=kept_runs_folder())
    try:
        yield folder, guard
    finally:
        guard.dismiss(GUARD_TIMEOUT_S)
        clear(folder, temporary=True)


def _spec_here(accepted: JoinAccepted, address: RunAddress) -> tuple[ClusterSpec, Path]:
    """Return the spec of the run as it holds for workers of this process, and where they read it.

    Raises:
        PeerError: what the run has sent is no spec.
        UsageError: the run goes on from a snapshot that this machine does not see.
    """
    if address.is_here:
        path = address.folder / CLUSTER_NAME
        return ClusterSpec.read(path), path
    try:
        spec = msgspec.json.decode(accepted.spec, type=ClusterSpec)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"{address.name} has sent no valid spec: {error}") from error
    if spec.resume and not Path(spec.resume).is_dir():
        raise UsageError(
            f"{address.name} goes on from the snapshot {spec.resume}, which this machine does not see: workers need it "
            "for where loops go on. Put the snapshots on a file system that all machines share"
        )
    (address.folder / TRACE_NAME).mkdir()
    spec, path = replace(spec, run_dir=str(address.folder), snapshots=""), address.folder / CLUSTER_NAME
    spec.write(path)
    return spec, path


def _places(accepted: JoinAccepted, address: RunAddress, path: Path) -> list[Place]:
    """Return the places of the workers; on a machine of their own they count from 0 there."""
    return [
        Place(path, rank, rank if address.is_here else number, incarnation)
        for number, (rank, incarnation) in enumerate(accepted.places)
    ]


def _supervise(
    order: JoinOrder,
    programs: Programs,
    spec: ClusterSpec,
    places: Sequence[Place],
    folder: Path,
    guard: Guard,
    connection: RunConnection,
) -> int:
    run = LocalRun(script=order.script, args=order.args, module=order.module, num_workers=spec.num_workers)
    environment, console = _environment(order, spec, folder, len(places)), Console()
    config = SupervisionConfig(
        crash_policy=CrashPolicy(),
        start_timeout_s=run.start_timeout_s,
        grace_s=spec.grace_s,
        run_dir=folder,
        subject=SUBJECT,
        lets_finish=True,
    )
    with (
        Signals() as signals,
        unblocked_output() as outlets,
        Orphans(guard) as orphans,
        open_fork_server(run, programs, folder, environment) as fork_server,
    ):
        if not order.quiet:
            names = ", ".join(f"worker {place.rank}" for place in places)
            console.announce(f"{names} to come; Ctrl-C has {_them(places)} finish the step and leave")
        connection.follow(signals.wake)
        is_elsewhere = Path(spec.run_dir) == folder
        ranks = [place.rank for place in places]
        traces = TraceSender(folder / TRACE_NAME, ranks, connection.send_trace) if is_elsewhere else None
        inner = LocalBackend(console, guard, signals.wakeup_fd, fork_server, outlets, orphans)
        backend = JoiningBackend(inner, connection, console, signals, folder, traces)
        exits = Exits(console, None, None, subject=SUBJECT)
        supervisor = Supervisor(config, backend, NoServers(), console, signals, None, exits)
        code = supervisor.run(plan_workers(run, programs, environment, places))
    return EXIT_FAILURE if backend.is_cut_off else code


def _them(places: Sequence[Place]) -> str:
    return "it" if len(places) == 1 else "them"


def _environment(order: JoinOrder, spec: ClusterSpec, folder: Path, num_workers: int) -> Mapping[str, str]:
    """Return what workers inherit; on the machine of the run they share its cores with those that are there."""
    is_elsewhere = Path(spec.run_dir) == folder
    num_processes = num_workers if is_elsewhere else spec.num_workers + spec.num_servers + spec.num_data_servers
    return child_environment(num_processes, len(cores_here()), inherited(), traceback=order.traceback)
