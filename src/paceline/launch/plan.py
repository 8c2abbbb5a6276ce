"""What to run on this machine, and how each of its processes is started."""

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from paceline.core.consistency import Consistency
from paceline.core.partition import check_shares
from paceline.errors import UsageError
from paceline.job.addresses import CLUSTER_NAME, SPEC_NAME, Serving, serving_name
from paceline.job.choices import ScaleName, TraceLevel, TransportName
from paceline.job.environment import Place, with_import_path
from paceline.job.machines import cores_here, share_of
from paceline.job.strategy import PARAMETER_SERVER, Distribution
from paceline.launch.child import Launch
from paceline.launch.crash_policy import CrashPolicy
from paceline.launch.joining.options import ListenOptions
from paceline.launch.recording import RecordOptions
from paceline.launch.script import OPTION, sets_variables
from paceline.observe.export.options import ExportOptions
from paceline.snapshots.options import SnapshotOptions

# These modules have to run before torch is imported, and so in no process that was forked.
_BEFORE_TORCH: Final = ("coverage",)
# On a busy machine an import of torch takes a minute; a process that fails to start is seen at once, whatever this is.
START_TIMEOUT_S: Final = 180.0
MOST_THREADS: Final = 1024  # of a server; each has memory of its own


class Programs(msgspec.Struct, frozen=True):
    """How the processes of a job are started; the launcher appends what each is told.

    `server` and `data_server` are followed by the spec's path and a rank, `worker` and `threads` by the script and its
    arguments. `threads` runs a whole job in one process. `preloaded` is the module that processes are forked with;
    without it, each is started afresh.
    """

    server: tuple[str, ...] = (sys.executable, "-m", "paceline.launch.server")
    worker: tuple[str, ...] = (sys.executable, "-m", "paceline.launch.worker")
    data_server: tuple[str, ...] = (sys.executable, "-m", "paceline.launch.data_server")
    threads: tuple[str, ...] = ()
    preloaded: str | None = None


DEFAULT_PROGRAMS: Final = Programs()


class LocalRun(msgspec.Struct, frozen=True, kw_only=True):
    """What to run on this machine, and how.

    `run_dir` must be new or empty and is made private to this user; None takes a temporary one that is removed at the
    end. `copy_to` gets a copy of all that workers write and the launcher says. `progress` shows the live board; `quiet`
    leaves out what the launcher has to say unless something went wrong.
    """

    script: Path
    args: tuple[str, ...] = ()
    module: str | None = None  # under whose name the script runs, as by `python -m`; without it, as a file
    num_workers: int = 2
    num_at_start: int | None = None  # that begin, if the others of them are to come and go while it runs
    num_servers: int = 1
    transport: TransportName = "shm"
    consistency: str | None = None
    scale: ScaleName | None = None
    divide_lr: bool = False  # among the pushes of a clock, where each is an update of its own
    strategy: str | None = None
    trace: TraceLevel = "steps"
    run_dir: Path | None = None
    copy_to: Path | None = None
    crash_policy: CrashPolicy = msgspec.field(default_factory=CrashPolicy)
    start_timeout_s: float = START_TIMEOUT_S  # until all servers say where they listen
    timeout_s: float | None = None  # of a wait of a worker; None takes PACELINE_TIMEOUT_S, else the default
    progress: bool = False
    dashboard: bool = False  # on a page in a browser, by a process beside the job
    quiet: bool = False
    shares: tuple[float, ...] = ()  # of each table, one a server, as proportions; none for equal parts
    server_threads: int | None = None  # of each server, for updates; None leaves it to the table's consistency
    pin: bool = False  # keep each worker on cores of its own; servers go where there is room
    traceback: bool = False  # show where the errors of workers and servers come from
    debug: int | None = None  # the worker that has the terminal, for a debugger
    defaults: tuple[tuple[str, str], ...] = ()  # variables of all processes, where the user has not set them
    publish_every: int = 0  # clocks, after which the models are published; 0 for never
    snapshots: SnapshotOptions = msgspec.field(default_factory=SnapshotOptions)
    record: RecordOptions = msgspec.field(default_factory=RecordOptions)
    export: ExportOptions = msgspec.field(default_factory=ExportOptions)
    joining: ListenOptions = msgspec.field(default_factory=ListenOptions)
    num_data_servers: int = 0  # that `paceline.feed` gets its batches from; without any, workers read them themselves

    @property
    def first_workers(self) -> range:
        """The ranks of the workers that it begins with."""
        return range(self.num_workers if self.num_at_start is None else self.num_at_start)

    @property
    def needs_all(self) -> str:
        """The strategy, where no step is possible without every worker; else nothing."""
        strategy = self.strategy or ""
        return strategy if strategy and Distribution.parse(strategy).needs_all(self.num_workers) else ""

    @property
    def words(self) -> tuple[str, ...]:
        """What a worker is told to run, as Python takes it."""
        return (str(self.script), *self.args) if self.module is None else (OPTION, self.module, *self.args)

    @property
    def folder(self) -> Path:
        """Where modules are looked for first: beside the script, or where the run was started."""
        return self.script.absolute().parent if self.module is None else Path.cwd()

    @property
    def scripts(self) -> list[tuple[Path, Path]]:
        """What is run, each with the folder of its own modules: a module may run a script itself, as cProfile does."""
        named = [Path(word) for word in self.args if self.module is not None and word.endswith(".py")]
        return [(self.script, self.folder), *((script, script.absolute().parent) for script in named)]

    def validate(self) -> None:
        """Raise UsageError for numbers that make no run."""
        for what, number, least in (
            ("workers", self.num_workers, 1),
            ("servers", self.num_servers, 1),
            ("data-servers", self.num_data_servers, 0),
            ("publish", self.publish_every, 0),
            ("server-threads", 1 if self.server_threads is None else self.server_threads, 1),
            ("max-restarts", self.crash_policy.max_restarts, 0),
        ):
            if number < least:
                raise UsageError(f"--{what} must be at least {least}, got {number}")
        if self.server_threads is not None and self.server_threads > MOST_THREADS:
            raise UsageError(f"--server-threads must be at most {MOST_THREADS}, got {self.server_threads}")
        self._validate_consistency()
        self.snapshots.validate()
        self.record.validate(stays=self.run_dir is not None)
        if self.debug is not None and self.debug not in self.first_workers:
            raise UsageError(f"--debug is {self.debug}, expected a worker from 0 to {self.first_workers[-1]}")
        if not 0 < self.crash_policy.grace_s < math.inf:
            raise UsageError(f"--grace-s must be more than 0 seconds, got {self.crash_policy.grace_s:g}")
        if self.timeout_s is not None and not 0 < self.timeout_s < math.inf:
            raise UsageError(f"--timeout must be more than 0 seconds, got {self.timeout_s:g}")
        check_shares(self.shares, self.num_servers)
        if self.transport == "memory" and self.num_data_servers:
            raise UsageError(
                f"--data-servers is {self.num_data_servers}, and with --transport memory the job is one process, where "
                "paceline.feed reads by itself: leave them out, or choose shm or tcp"
            )
        if self.transport == "memory" and self.crash_policy.on_crash == "restart":
            raise UsageError(
                "--on-crash restart needs processes to start again, and with --transport memory the job is one "
                "process; choose shm or tcp"
            )
        self.joining.validate(self.transport, is_elastic=self.num_at_start is not None)
        if self.num_at_start is not None:
            self._validate_elastic(self.num_at_start)

    def _validate_consistency(self) -> None:
        """Raise UsageError unless the consistency is one, and that of the strategy, where this names one."""
        given = None if self.consistency is None else str(Consistency.parse(self.consistency))
        named = None if self.strategy is None else Distribution.parse(self.strategy).consistency
        if None not in (given, named) and given != named:
            raise UsageError(
                f"--consistency is {given}, and --strategy {self.strategy} says {named}: leave out one of the two, or "
                "say the same in both"
            )

    def _validate_elastic(self, num_at_start: int) -> None:
        """Raise UsageError for a run whose workers cannot come and go."""
        asked = f"--workers is {num_at_start}:{self.num_workers}"
        if not 1 <= num_at_start <= self.num_workers:
            raise UsageError(f"{asked}, expected how many begin, at least 1, and then how many there may be, no fewer")
        if self.transport == "memory":
            raise UsageError(f"{asked}, and with --transport memory the job is one process; choose shm or tcp")
        distribution = Distribution() if self.strategy is None else Distribution.parse(self.strategy)
        is_shared = distribution.ranks_per_replica * distribution.shards > 1
        if distribution.data not in (None, PARAMETER_SERVER) or is_shared:
            raise UsageError(
                f"{asked}, and --strategy {self.strategy} needs all workers at every step: give one number of workers, "
                "or a strategy of the parameter server"
            )


class WorkerCount(NamedTuple):
    """How many workers begin, None for all, and how many places for workers there are."""

    at_start: int | None
    places: int


def read_workers(text: str) -> WorkerCount:
    """Read a number of workers, or two: how many begin, and how many there may be.

    Raises UsageError for another text.

    >>> read_workers("4"), read_workers("2:8")
    (WorkerCount(at_start=None, places=4), WorkerCount(at_start=2, places=8))
    """
    numbers = text.strip().split(":")
    if len(numbers) > 2 or not all(each.isascii() and each.removeprefix("-").isdigit() for each in numbers):
        raise UsageError(
            f"--workers is {text[:40]!r}, expected a whole number, or as 2:8 how many begin and how many there may be"
        )
    return WorkerCount(int(numbers[0]) if len(numbers) == 2 else None, int(numbers[-1]))


def plan_launches(run: LocalRun, programs: Programs, run_dir: Path, environment: Mapping[str, str]) -> list[Launch]:
    """Return how each process of the job is started: servers first, so that they listen soon.

    To the servers, a worker that is not there at the start comes as the next life of one that has ended.
    """
    if run.transport == "memory":
        return [_plan_threads(run, (*programs.threads, *run.words), run_dir, environment)]
    importing = with_import_path(environment, run.folder)
    # By TCP they listen where workers of other machines reach them.
    host = () if run.joining.listen is None else (run.joining.address()[0],)
    servers = [
        _plan_serving("server", rank, programs.server, run_dir, importing, host) for rank in range(run.num_servers)
    ]
    data_servers = [
        _plan_serving("data", rank, programs.data_server, run_dir, importing, host)
        for rank in range(run.num_data_servers)
    ]
    places = [
        Place(run_dir / CLUSTER_NAME, rank, rank, incarnation=0 if rank in run.first_workers else 1)
        for rank in range(run.num_workers)
    ]
    return servers + data_servers + plan_workers(run, programs, environment, places)


def plan_workers(
    run: LocalRun, programs: Programs, environment: Mapping[str, str], places: Sequence[Place]
) -> list[Launch]:
    """Return how the workers of these places are started."""
    cores, is_fresh = cores_here(), run.module in _BEFORE_TORCH
    is_fresh = is_fresh or any(sets_variables(script.absolute(), folder) for script, folder in run.scripts)
    passing = {**environment, "PYTHONBREAKPOINT": "0"}  # for workers without the terminal: breakpoint() does nothing
    return [
        Launch(
            role="worker",
            name=f"worker {place.rank}",
            rank=place.rank,
            command=(*programs.worker, *run.words),
            environment=environment if run.debug in (None, place.rank) else passing,
            place=place,
            cores=share_of(cores, place.rank, run.num_workers) if run.pin else (),
            has_terminal=place.rank == run.debug,
            is_fresh=is_fresh,
        )
        for place in places
    ]


def _plan_serving(
    role: Serving,
    rank: int,
    program: tuple[str, ...],
    run_dir: Path,
    environment: Mapping[str, str],
    host: tuple[str, ...],
) -> Launch:
    return Launch(
        role=role,
        name=serving_name(role, rank),
        rank=rank,
        command=(*program, str(run_dir / SPEC_NAME), str(rank), *host),
        environment=environment,
    )


def _plan_threads(run: LocalRun, command: tuple[str, ...], run_dir: Path, environment: Mapping[str, str]) -> Launch:
    """All workers and servers as threads of one process; to the launcher it is a single worker."""
    last = run.num_workers - 1
    return Launch(
        role="worker",
        name="worker 0" if last == 0 else f"workers 0-{last}",
        rank=0,
        command=command,
        environment=environment,
        place=Place(run_dir / CLUSTER_NAME, rank=0, local_rank=0),
        has_terminal=run.debug is not None,
    )
