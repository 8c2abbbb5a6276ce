"""Starts a whole job on this machine and watches over it: what `paceline run` does."""

import math
import secrets
import shlex
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, TextIO, final

from msgspec.structs import replace

from paceline.errors import PacelineError, UsageError
from paceline.job.addresses import SPEC_NAME, AddressBook
from paceline.job.credentials.holders import KEYS_NAME, Holder, TokenFiles, link_keys, tls_settings
from paceline.job.credentials.revocation import revoked_path, watching_revoked
from paceline.job.environment import (
    NUM_THREADS,
    child_environment,
    chose_num_threads,
    fork_server_environment,
    inherited,
    kept_runs_folder,
    wait_timeout_s,
)
from paceline.job.folders import require_own, require_text
from paceline.job.machines import LOOPBACK, cores_here, format_host_port
from paceline.job.spec import ClusterSpec, write_token
from paceline.job.strategy import Distribution
from paceline.launch.child import Child, Launch, Process, start_process
from paceline.launch.dashboard import beside
from paceline.launch.exporter import exporting
from paceline.launch.forkserver.server import ForkServer
from paceline.launch.forkserver.subreaper import Orphans
from paceline.launch.guard import PREFIX, Guard, clear, remove_abandoned
from paceline.launch.joining.admission import JoinListener
from paceline.launch.joining.messages import JOB, LIMITS, program_digest
from paceline.launch.limits import check_limits, explain, files_left
from paceline.launch.output import Console, Outlets, Pipe, Pump, unblocked_output
from paceline.launch.places import WorkerPlaces
from paceline.launch.plan import LocalRun, Programs, plan_launches
from paceline.launch.script import check_script
from paceline.launch.signals import Signals
from paceline.launch.snapshots import resumption, with_snapshots
from paceline.launch.successors import LEAST_FILES, Successors
from paceline.launch.supervise import Exits, SupervisionConfig, Supervisor
from paceline.launch.supervision import Member, ProgressDisplay
from paceline.notices import tell
from paceline.observe.trace import UNNAMED_TRACE_BYTES
from paceline.transport.tcp import TcpTransport

GUARD_TIMEOUT_S: Final = 5.0
TRACE_NAME: Final = "trace"
IN_USE: Final = "the run directory {} is not empty; name a new one, or remove it"
LEAST_JOIN_TIMEOUT_S: Final = 60.0
# The start of a job is left the cores, and short jobs need no spare process; the next death may follow soon.
SPARE_AFTER_S: Final = 1.0
SPARE_AGAIN_AFTER_S: Final = 0.25
DEBUG_PATIENCE_S: Final = 7 * 24 * 3600.0  # how long all wait for a worker that a debugger has stopped


@final
class LocalBackend:
    """Starts processes on this machine, forks them where there is a fork server, and reads their output."""

    def __init__(
        self,
        console: Console,
        guard: Guard,
        wakeup_fd: int,
        fork_server: ForkServer | None,
        outlets: Outlets,
        orphans: Orphans,
        *,
        keeps_spares: bool = False,
    ) -> None:
        """Have the guard watch over all that is started; a signal makes `wakeup_fd` readable.

        While an outlet is full, what processes write there is left to wait. With `keeps_spares`, processes are forked
        ahead for the next servers.
        """
        self._console = console
        self._guard = guard
        self._fork_server = fork_server
        self._outlets = outlets
        self._pump = Pump(wakeup_fd, outlets)
        self._orphans = orphans
        self._pipes: dict[Child, Sequence[Pipe]] = {}
        self._keeps_spares = keeps_spares
        self._spare_at_s = math.inf  # when to have a process forked ahead

    def prepare(self) -> Sequence[Member]:
        """Start the fork server, if there is one."""
        return (
            () if self._fork_server is None else (self._add(self._fork_server.launch, self._fork_server.start_server),)
        )

    def settled(self) -> bool:
        """Return whether the fork server is ready, or has failed."""
        return self._fork_server is None or self._fork_server.settled()

    def start(self, launch: Launch) -> Member:
        """Start a process."""
        self._spare_at_s = time.monotonic() + (SPARE_AGAIN_AFTER_S if launch.num_restarts else SPARE_AFTER_S)
        fork_server = None if launch.has_terminal or launch.is_fresh else self._fork_server
        return self._add(launch, start_process if fork_server is None else fork_server.start)

    def wait(self, timeout_s: float) -> None:
        """Block until a process writes or ends, or a signal comes."""
        if self._keeps_spares and self._fork_server is not None and time.monotonic() > self._spare_at_s:
            self._fork_server.prepare_spare()
        self._pump.wait(timeout_s)
        self._orphans.reap([child.pid for child in self._pipes])

    def release(self, member: Member) -> None:
        """Read the rest of what it wrote, and kill what it has left behind."""
        child = next(child for child in self._pipes if child is member)
        child.clear()
        for pipe in self._pipes.pop(child):
            self._pump.remove(pipe)

    def close(self) -> None:
        """Nothing is left to release: pipes are closed with their processes."""

    def _add(self, launch: Launch, start: Callable[[Launch], Process]) -> Child:
        try:
            child = Child(launch, self._console, self._guard, start, self._is_held)
        except OSError as error:
            raise PacelineError(f"cannot start {launch.name}: {explain(error)}") from error
        self._pipes[child] = child.pipes
        for pipe in child.pipes:
            self._pump.add(pipe)
        return child

    def _is_held(self, *, to_stderr: bool) -> bool:
        return (self._outlets.stderr if to_stderr else self._outlets.stdout).is_full


def run_local(run: LocalRun, programs: Programs) -> int:
    """Run a script as a job of several processes on this machine.

    Blocks until the job has ended, and returns its exit code: 0, or that of the worker that made it fail (128 + signal
    for a killed one), 75 when workers were lost, 1 when a server was, 128 + signal when the launcher was told to stop.
    Raises UsageError for a run that cannot start. Call it from the main thread: it answers signals while it runs.
    """
    run.validate()
    require_startable(run.script, "run_local")
    check_limits(run.num_workers + run.num_servers + run.num_data_servers)
    with guarded_folder(run.run_dir) as (run_dir, guard):
        return _supervise(run, programs, run_dir, guard)


def require_startable(script: Path, caller: str) -> None:
    """Raise UsageError when a script is none, or this thread cannot answer signals for it."""
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(f"{caller} must be called from the main thread: it answers Ctrl-C and SIGTERM")
    check_script(script)


@contextmanager
def guarded_folder(wanted: Path | None) -> Generator[tuple[Path, Guard]]:
    """Have a folder for a run, and a guard over its processes, which clears up even if this process is killed."""
    run_dir, temporary = prepare_run_dir(wanted), wanted is None
    try:
        (run_dir / TRACE_NAME).mkdir()  # of two launchers that begin at once, one can
        guard = Guard(run_dir, temporary=temporary, keep_in=kept_runs_folder())
    except FileExistsError as error:  # nothing is cleared: it is the other's
        raise UsageError(IN_USE.format(run_dir)) from error
    except OSError:
        clear(run_dir, temporary=temporary)
        raise
    try:
        yield run_dir, guard
    except OSError:  # the disk is full, say: a run that could not begin leaves the directory to the next one
        with suppress(OSError):
            (run_dir / TRACE_NAME).rmdir()
        raise
    finally:
        guard.dismiss(GUARD_TIMEOUT_S)
        clear(run_dir, temporary=temporary)


def prepare_run_dir(wanted: Path | None) -> Path:
    """Return a directory of this user's that no other user can enter.

    Raises:
        UsageError: it is another user's, holds something already, or cannot be made.
    """
    if wanted is None:
        return make_temporary()
    run_dir = wanted.absolute()
    require_text(run_dir)
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        require_own(run_dir)
        run_dir.chmod(0o700)  # first: no other user puts something into it from here on
        if any(run_dir.iterdir()):
            raise UsageError(IN_USE.format(run_dir))
    except OSError as error:
        raise UsageError(f"cannot use the run directory {run_dir}: {error.strerror}") from error
    return run_dir


def make_temporary() -> Path:
    """Return a new temporary folder, short, as sockets in it have 107 bytes for a path; remove abandoned ones first.

    Raises UsageError where none can be made.
    """
    try:
        place = Path(tempfile.gettempdir())
        require_text(place)
        remove_abandoned(place)
        return Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        named = f"{error.filename}: " if error.filename else ""
        raise UsageError(
            f"cannot make a temporary folder for this run: {named}{error.strerror}. Point TMPDIR at a folder that you "
            "can write and that has room"
        ) from error


def make_spec(run: LocalRun, run_dir: Path) -> ClusterSpec:
    """Return what the processes of this run must agree on.

    A worker that prepares its data before it joins is waited for as in any wait: servers hear of those that have ended.
    """
    timeout_s = wait_timeout_s() if run.timeout_s is None else run.timeout_s
    spec = ClusterSpec(
        job=secrets.token_hex(8),
        num_workers=run.num_workers,
        num_at_start=run.num_at_start or 0,
        num_servers=run.num_servers,
        transport=run.transport if run.joining.keys is None else "tcp",
        encrypted=run.joining.keys is not None,
        run_dir=str(run_dir),
        consistency=run.consistency,
        scale=run.scale,
        divide_lr=run.divide_lr,
        strategy=run.strategy,
        trace=run.trace,
        join_timeout_s=max(LEAST_JOIN_TIMEOUT_S, timeout_s),
        wait_timeout_s=timeout_s,
        grace_s=run.crash_policy.grace_s,
        shares=run.shares,
        server_threads=run.server_threads,
        num_data_servers=run.num_data_servers,
        publish_every=run.publish_every,
        record_bytes=run.record.max_bytes(run.num_servers),
        trace_bytes=UNNAMED_TRACE_BYTES if run.run_dir is None else 0,
    )
    spec = with_snapshots(spec, run.snapshots)
    if run.debug is None:
        return spec
    return replace(spec, join_timeout_s=DEBUG_PATIENCE_S, wait_timeout_s=DEBUG_PATIENCE_S)


def _supervise(run: LocalRun, programs: Programs, run_dir: Path, guard: Guard) -> int:
    spec = make_spec(run, run_dir)
    if run.joining.keys is None:
        write_token(run_dir)
    else:
        _use_keys(run.joining.keys, run_dir)
    spec.write(run_dir / SPEC_NAME)
    trace_folder = run_dir / TRACE_NAME
    config = SupervisionConfig(
        crash_policy=run.crash_policy,
        start_timeout_s=run.start_timeout_s,
        grace_s=run.crash_policy.grace_s,
        run_dir=run_dir,
        needs_all=run.needs_all,
        meets_early=True,
    )
    with kept_terminal(), Signals() as signals, unblocked_output() as outlets, open_copy(run.copy_to) as copy:
        display = open_board(trace_folder, len(run.first_workers)) if run.progress and run.debug is None else None
        console = Console(copy)
        if run.debug is not None and not run.quiet:
            console.announce(f"worker {run.debug} has this terminal, for breakpoint() and pdb; Ctrl-C goes to it alone")
        environment = _share_cores(run, console)
        launches = plan_launches(run, programs, run_dir, environment)
        with (
            Orphans(guard) as orphans,
            open_fork_server(run, programs, run_dir, environment) as fork_server,
            open_successors(run) as successors,
            exporting(run.export, run_dir, console.announce, quiet=run.quiet),
            open_dashboard(run, run_dir, console),
            open_admission(run, spec, signals, console) as admission,
        ):
            keeps_spares = successors is not None
            backend = LocalBackend(
                console, guard, signals.wakeup_fd, fork_server, outlets, orphans, keeps_spares=keeps_spares
            )
            exits = Exits(console, display, run_dir)
            if not run.quiet:
                _announce_start(run, spec, run_dir, admission, console)
            starting = [each for each in launches if each.role != "worker" or each.rank in run.first_workers]
            vacant = None if run.num_at_start is None else [each for each in launches if each not in starting]
            supervisor = Supervisor(
                config,
                backend,
                AddressBook(spec),
                console,
                signals,
                display,
                exits,
                successors=successors,
                places=None if vacant is None else WorkerPlaces(run_dir, vacant),
                candidates=admission,
            )
            return supervisor.run(starting if successors is None else successors.equip(starting))


@contextmanager
def kept_terminal() -> Generator[None]:
    """Leave the terminal as it was, if standard input is one: a debugger that is killed leaves it without echo."""
    descriptor = 0
    try:
        settings = termios.tcgetattr(descriptor)
    except termios.error:  # a file, a pipe, or closed
        yield
        return
    try:
        yield
    finally:
        with suppress(termios.error):  # it has gone meanwhile
            termios.tcsetattr(descriptor, termios.TCSADRAIN, settings)


def open_copy(path: Path | None) -> AbstractContextManager[TextIO | None]:
    """Open the file that is to have a copy of what is told, or nothing."""
    return nullcontext() if path is None else path.open("w", encoding="utf-8", errors="surrogateescape")


def open_fork_server(
    run: LocalRun, programs: Programs, run_dir: Path, environment: Mapping[str, str]
) -> AbstractContextManager[ForkServer | None]:
    """Return the fork server of this run, or none: one process needs none."""
    if sys.platform != "linux" or programs.preloaded is None or run.transport == "memory":
        return nullcontext()
    return ForkServer(fork_server_environment(environment, run.folder), run_dir, programs.preloaded, run.script)


def open_successors(run: LocalRun) -> AbstractContextManager[Successors | None]:
    """Return what keeps the memory of servers that may be succeeded, or nothing."""
    if sys.platform != "linux" or run.transport == "memory" or run.crash_policy.on_server_crash == "stop":
        return nullcontext()
    num_processes = run.num_workers + run.num_servers + run.num_data_servers
    num_files = files_left(num_processes) // run.num_servers
    return Successors(run.num_servers, num_files) if num_files >= LEAST_FILES else nullcontext()


@contextmanager
def open_admission(
    run: LocalRun, spec: ClusterSpec, signals: Signals, console: Console
) -> Generator[JoinListener | None]:
    """Listen for `paceline join`, if workers come and go in this run; raises UsageError where it cannot listen."""
    if run.num_at_start is None:
        yield None
        return
    run_dir, host, port = Path(spec.run_dir), LOOPBACK, 0
    if run.joining.listen is not None:
        host, port = run.joining.address()
    tls = tls_settings(run_dir / KEYS_NAME, Holder("server", 0)) if spec.encrypted else None
    transport = TcpTransport(TokenFiles(run_dir, JOB), LIMITS, tls=tls, notice=console.announce)
    listener = transport.listen(format_host_port(host, port))
    with (
        JoinListener(listener, spec, program_digest(run.script), signals.wake, console.announce) as admission,
        watching_revoked(revoked_path(spec), admission.expel),
    ):
        yield admission


def _announce_start(
    run: LocalRun, spec: ClusterSpec, run_dir: Path, admission: JoinListener | None, console: Console
) -> None:
    """Tell what is known of a run before it begins."""
    if admission is not None:
        console.announce(
            f"{run.num_at_start} of up to {run.num_workers} workers begin; for another number of them: "
            f"paceline scale {run_dir} --workers NUMBER"
        )
        where = "from another terminal" if run.joining.listen is None else "on other machines"
        console.announce(f"{where} workers join by: {_join_command(run, run_dir, admission)}")
    if spec.record_bytes:
        size = f"{run.record.record_gib:g} GiB"
        console.announce(f"what servers are told is kept for paceline replay: at most {size}")
    if spec.resume:
        console.announce(resumption(spec))


def _join_command(run: LocalRun, run_dir: Path, admission: JoinListener) -> str:
    """Return what a user types to have a worker join."""
    script = shlex.join(run.words[: 1 if run.module is None else 2])
    if run.joining.listen is None:
        return f"paceline join {shlex.quote(str(run_dir))} {script}"
    return f"paceline join {admission.address.removeprefix('tcp://')} --keys KEYS {script}"


def _use_keys(keys: Path, run_dir: Path) -> None:
    """Have the processes of a run show the certificates of a user's folder; raises UsageError for keys of no use."""
    from paceline.job.credentials.key_store import check_keys  # deferred: not needed on one machine

    soon = check_keys(keys, Holder("server", 0))
    if soon:
        tell(soon)
    link_keys(keys, run_dir)


def open_board(trace_folder: Path, num_workers: int) -> ProgressDisplay:
    """Open the live display of the run that writes its trace into this folder."""
    from paceline.observe.progress import TraceDisplay as ProgressBoard  # brings the terminal library with it

    return ProgressBoard(trace_folder, num_workers)


def open_dashboard(run: LocalRun, run_dir: Path, console: Console) -> AbstractContextManager[None]:
    """Have a dashboard of this run beside it, if it is asked for."""
    return beside(run_dir, console) if run.dashboard else nullcontext()


def _share_cores(run: LocalRun, console: Console) -> dict[str, str]:
    busy = run.strategy is None or Distribution.parse(run.strategy).needs_servers
    num_servers = run.num_servers if busy else 0
    num_processes = 1 if run.transport == "memory" else run.num_workers + num_servers + run.num_data_servers
    num_cores = len(cores_here())
    environment = child_environment(
        num_processes, num_cores, {**dict(run.defaults), **inherited()}, traceback=run.traceback
    )
    if not (run.quiet or chose_num_threads()):
        console.announce(
            f"{NUM_THREADS}={environment[NUM_THREADS]} for each of {num_processes} processes "
            f"on {num_cores} cores; set it yourself to change that"
        )
    return environment
